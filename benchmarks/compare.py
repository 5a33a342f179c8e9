# SPDX-License-Identifier: Apache-2.0
"""Compare two result files of the same case on the same card: times are shown, ratios are judged.

    python -m benchmarks compare OLD.json NEW.json --fail-on 5%

A ratio is measured against the baseline of its own file, so a clock that runs slower today, or a driver that changed,
touches both sides of it. Exit status: 0 no ratio fell by more than the limit, 1 one did, 2 not comparable.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .figures import Figure, Result, ResultError

# Options that change how something is measured, not what.
_OF_MEASURING = frozenset({"rounds", "profile", "no_calls", "no_steps", "only", "peer", "render", "out", "precisions"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--fail-on", type=percentage, default=0.05, metavar="N%", help="a fall of a ratio [5%%]")


def percentage(text: str) -> float:
    """`5%` or `0.05` as a share."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 5% or 0.05") from error
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 100 %")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Print the comparison and return the exit status."""
    try:
        old, new = Result.read(arguments.old), Result.read(arguments.new)
        refuse_unlike(old, new)
        text, fallen = comparison(old, new, arguments.fail_on)
    except ResultError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(text)
    return int(bool(fallen))


def refuse_unlike(old: Result, new: Result) -> None:
    """Refuse results that say nothing about each other.

    Raises:
        ResultError: another card, case or setting.
    """
    cards = [result.environment.get("card") for result in (old, new)]
    if cards[0] != cards[1]:
        raise ResultError(
            f"{old.name} was measured on {cards[0]!r} and {new.name} on {cards[1]!r}: ratios differ from card to card, "
            "measure both on one"
        )
    if old.case != new.case:
        raise ResultError(f"{old.name} holds {old.case!r} and {new.name} {new.case!r}: compare files of one case")
    if not (old.settings and new.settings):
        return  # an older file: what its rows are called must do
    names = sorted({*old.settings, *new.settings} - _OF_MEASURING)
    unlike = [
        f"{name} {old.settings.get(name)} and {new.settings.get(name)}"
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    ]
    if unlike:
        raise ResultError(
            f"{old.name} and {new.name} were measured with different settings: {'; '.join(unlike)}. "
            "Measure the new one with the options of the old one"
        )


def comparison(old: Result, new: Result, limit: float) -> tuple[str, list[str]]:
    """A table of what both files measured, and the labels whose ratio fell by more than `limit`.

    Raises:
        ResultError: they have no ratio in common.
    """
    common = [name for name in old.figures if name in new.figures]
    judged = [name for name in common if old.figures[name].ratio and new.figures[name].ratio]
    if not judged:
        raise ResultError(f"{old.name} and {new.name} have no ratio in common: nothing can be judged")
    rows, fallen = [("", "old", "new", "old ratio", "new ratio", "change", "")], []
    for name in common:
        before, after = old.figures[name], new.figures[name]
        change = after.ratio / before.ratio - 1 if before.ratio and after.ratio else None
        verdict = ""
        if change is not None and change < -limit:
            verdict = "SLOWER"
            fallen.append(name)
        elif change is not None and change > limit:
            verdict = "faster"
        rows.append((name, _time(before), _time(after), _ratio(before), _ratio(after), _change(change), verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_head(old), _head(new), ""]
    lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    for result, other in ((old, new), (new, old)):
        missing = [name for name in result.figures if name not in other.figures]
        lines += [f"only in {result.name}: {name}" for name in missing]
    share = f"{100 * limit:g} %"
    lines.append(
        f"{len(fallen)} of {len(judged)} ratios fell by more than {share}: {'; '.join(fallen)}"
        if fallen
        else f"none of {len(judged)} ratios fell by more than {share}"
    )
    return "\n".join(lines), fallen


def _head(result: Result) -> str:
    env = result.environment
    return f"{result.name}: {env.get('card')}, torch {env.get('torch')}, commit {env.get('commit')}"


def _time(figure: Figure) -> str:
    spread = "" if figure.spread is None else f" ±{50 * figure.spread:.0f}%"
    return f"{figure.time:.3f} {figure.unit}{spread}"


def _ratio(figure: Figure) -> str:
    return "baseline" if figure.ratio is None else f"{figure.ratio:.3f}"


def _change(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.1f} %"
