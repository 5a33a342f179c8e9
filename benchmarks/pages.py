# SPDX-License-Identifier: Apache-2.0
"""Write the tables and pictures of the documentation from result files.

`pages FILE` for a result of frontier, policies, fp8-accuracy, lacache-interval, small-model or decoding (with
`--profile`) puts its table between the marks of the page that shows it, and draws its picture. Several files of one
case and commit are parts of one result (`frontier --families code`, …).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .figures import ResultError, load, write

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of table -->"


@dataclass(frozen=True)
class Page:
    """Where a case is shown.

    Attributes:
        path: the page, from the top of the repository.
        line: the fields of a row that name its line in the table; "family" is its column. Empty: a row is a line.
        table: "module.function" of this package that makes the table from a result.
        picture: the same for its picture, drawn from rows into a path.
        drawing: the picture's path.
    """

    path: str
    line: tuple[str, ...]
    table: str
    picture: str | None = None
    drawing: str | None = None


PAGES = {
    "frontier": Page(
        "docs/flash_verify.md",
        ("group", "name"),
        "paired_accuracy.table",
        "plot_frontier.draw",
        "docs/frontier.svg",
    ),
    "policies": Page("docs/caches.md", ("group", "name"), "paired_accuracy.table"),
    "fp8-accuracy": Page("docs/fp8.md", ("precision",), "fp8_accuracy.table"),
    "lacache-interval": Page(
        "docs/lacache.md",
        ("name",),
        "plot_lacache_interval.table",
        "plot_lacache_interval.draw",
        "docs/lacache_interval.svg",
    ),
    "small-model": Page("README.md", ("name",), "small_model.table"),
    "decoding": Page("docs/steps.md", (), "step_table.table"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE")


def main(arguments: argparse.Namespace) -> int:
    """Fill in the page of the results' case."""
    try:
        result = joined(arguments.results)
        page = PAGES[result["case"]]
        path = ROOT / page.path
        text = filled(_text(path), result["case"], _made(page.table, result["case"], result))
        if page.picture is not None and page.drawing is not None:
            _made(page.picture, result["case"], result["rows"], ROOT / page.drawing)
        write(path, text)
    except ResultError as error:
        print(f"pages: {error}", file=sys.stderr)
        return 2
    return 0


def joined(paths: list[Path]) -> dict[str, Any]:
    """The parts of one result, rows in the order of the files.

    Raises:
        ResultError: no result, a case without a page, or parts that do not make one table: of different cases,
            commits, cards or torch versions, twice the same, or with gaps.
    """
    parts = [load(path) for path in paths]
    first = parts[0]
    if first["case"] not in PAGES:
        raise ResultError(f"{first['case']} is shown on no page; these are: {', '.join(PAGES)}")
    for path, part in zip(paths, parts, strict=True):
        if part["case"] != first["case"]:
            raise ResultError(f"{path} is a result of {part['case']}, {paths[0]} of {first['case']}: give one case")
        for key in ("commit", "card", "torch"):
            if part["environment"][key] != first["environment"][key]:
                raise ResultError(f"{path} and {paths[0]} differ in {key}: they are not parts of one result")
    rows = [row for part in parts for row in part["rows"]]
    _refuse_gaps(first["case"], rows)
    return {**{key: first[key] for key in ("case", "environment", "settings")}, "rows": rows}


def _refuse_gaps(case: str, rows: list[dict[str, Any]]) -> None:
    """Refuse rows that do not fill a table: each line once in each family, over as many problems.

    Raises:
        ResultError: a row without names, a cell that is there twice or not at all, or different numbers of problems.
    """
    if not PAGES[case].line:
        return
    names = (*PAGES[case].line, "family")
    for number, row in enumerate(rows, 1):
        for name in names:
            if not isinstance(row.get(name), str):
                raise ResultError(
                    f"row {number} of {case} has no {name}: measure it with `python -m benchmarks {case}`"
                )
    cells = Counter(tuple(row[name] for name in names) for row in rows)
    wanted = itertools.product(dict.fromkeys(c[:-1] for c in cells), dict.fromkeys(c[-1] for c in cells))
    for line, family in wanted:
        count = cells[*line, family]
        if count != 1:
            what = f"{', '.join(line)} on {family}"
            raise ResultError(
                f"{case} has no row of {what}: measure every setting on every family"
                if count == 0
                else f"{case} has {count} rows of {what}: give each part once"
            )
    problems = list(dict.fromkeys(str(row.get("problems")) for row in rows))
    if len(problems) > 1:
        raise ResultError(f"rows of {case} were measured on {' and '.join(problems)} problems: measure all on as many")


def filled(text: str, mark: str, table: str) -> str:
    """`text` with what stands between the marks of `mark` replaced.

    Raises:
        ResultError: there are no such marks.
    """
    begin = f"<!-- table: {mark} -->\n"
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ResultError(f"the page has no {begin.strip()} ... {END}: add them where the table belongs")
    return before + begin + table + END + after


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error


def _made(name: str, case: str, *values: Any) -> Any:
    """What a table's or picture's function returns.

    Raises:
        ResultError: it misses a figure in the rows, or finds something else there.
    """
    try:
        return _function(name)(*values)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ResultError(
            f"{name} cannot show these rows ({type(error).__name__}: {error}): "
            f"measure them with `python -m benchmarks {case}`"
        ) from error


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)  # type: ignore[no-any-return]
