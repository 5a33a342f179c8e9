# SPDX-License-Identifier: Apache-2.0
"""Draw the ratios of all result files of a folder over commits, one panel for each case and card.

python -m benchmarks history benchmarks/results --out history.svg
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

from . import drawing
from .figures import Result, ResultError

Panels = dict[tuple[str, str], list[Result]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("folder", type=Path, metavar="DIR")
    endings = ", ".join(drawing.ENDINGS)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"where the drawing goes: {endings}")
    parser.add_argument("--only", metavar="CASE", help="one case only")
    parser.add_argument("--most", type=positive, default=8, help="lines in a panel, those that changed most [8]")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def main(arguments: argparse.Namespace) -> int:
    """Read, draw; 2 where there is nothing to draw, nothing to draw with, or nowhere to draw to."""
    try:
        drawing.check_ending(arguments.out)
        panels = read(arguments.folder, arguments.only)
        draw(panels, arguments.out, arguments.most)
    except ResultError as error:
        print(f"history: {error}", file=sys.stderr)
        return 2
    for (case, card), results in panels.items():
        print(f"{case} on {card}: {', '.join(str(result.environment.get('commit')) for result in results)}")
    print(f"drawn to {arguments.out}")
    return 0


def read(folder: Path, case: str | None = None) -> Panels:
    """Results by case and card, in order of their dates; files of another kind are left out.

    Raises:
        ResultError: there is none.
    """
    panels: Panels = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        try:
            result = Result.read(path)
        except ResultError:
            continue
        if case in (None, result.case) and any(figure.ratio for figure in result.figures.values()):
            panels[result.case, str(result.environment.get("card"))].append(result)
    if not panels:
        raise ResultError(f"{folder} holds no result{f' of {case}' if case else ''} with ratios")
    for results in panels.values():
        results.sort(key=date)
    return dict(sorted(panels.items()))


def date(result: Result) -> str:
    """When a result was measured: what it says itself, else the date in the file's name."""
    named = re.search(r"\d{4}-\d{2}-\d{2}", result.name)
    return str(result.environment.get("date") or (named.group() if named else ""))


def series(results: list[Result], most: int) -> dict[str, list[float | None]]:
    """Ratios by label, None where a file has none; the `most` that changed most."""
    names = dict.fromkeys(name for result in results for name, figure in result.figures.items() if figure.ratio)
    lines = {
        name: [result.figures[name].ratio if name in result.figures else None for result in results] for name in names
    }

    def change(name: str) -> float:
        known = [value for value in lines[name] if value]
        return max(known) / min(known)

    return {name: lines[name] for name in sorted(lines, key=change, reverse=True)[:most]}


def draw(panels: Panels, path: Path, most: int) -> None:
    """Write the drawing.

    Raises:
        ResultError: matplotlib is not installed, or the drawing cannot be written there.
    """
    plt = drawing.pyplot()
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 3.6 * len(panels)), squeeze=False)
    for axis, ((case, card), results) in zip(axes[:, 0], panels.items(), strict=True):
        places = range(len(results))
        for name, values in series(results, most).items():
            known = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
            axis.plot(*zip(*known, strict=True), marker="o", label=name)
        ticks = [f"{result.environment.get('commit')}\n{date(result)[:10]}" for result in results]
        axis.set_xticks(places, ticks, fontsize=8)
        axis.set_title(f"{case} on {card}", fontsize=10)
        axis.set_ylabel("times as fast as\nthe file's baseline", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    drawing.save(figure, path)
