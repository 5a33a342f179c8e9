# SPDX-License-Identifier: Apache-2.0
"""Write the tables and pictures of the documentation from result files.

`pages FILE` for a result of frontier, policies, fp8-accuracy, lacache-interval or small-model puts its table between
the marks of the page that shows it, and draws its picture. Several files of one case and commit are parts of one
result (`frontier --families code`, …).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .figures import ResultError

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of table -->"


@dataclass(frozen=True)
class Page:
    """Where a case is shown.

    Attributes:
        path: the page, from the top of the repository.
        table: "module.function" of this package that makes the table from a result.
        picture: the same for its picture, drawn from rows into a path.
        drawing: the picture's path.
    """

    path: str
    table: str
    picture: str | None = None
    drawing: str | None = None


PAGES = {
    "frontier": Page("docs/flash_verify.md", "paired_accuracy.table", "plot_frontier.draw", "docs/frontier.svg"),
    "policies": Page("docs/caches.md", "paired_accuracy.table"),
    "fp8-accuracy": Page("docs/fp8.md", "fp8_accuracy.table"),
    "lacache-interval": Page(
        "docs/lacache.md", "plot_lacache_interval.table", "plot_lacache_interval.draw", "docs/lacache_interval.svg"
    ),
    "small-model": Page("README.md", "small_model.table"),
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
        text = filled(path.read_text(encoding="utf-8"), result["case"], _function(page.table)(result))
        if page.picture is not None and page.drawing is not None:
            _function(page.picture)(result["rows"], ROOT / page.drawing)
    except ResultError as error:
        print(f"pages: {error}", file=sys.stderr)
        return 2
    path.write_text(text, encoding="utf-8")
    return 0


def joined(paths: list[Path]) -> dict[str, Any]:
    """The parts of one result, rows in the order of the files.

    Raises:
        ResultError: no result, a case without a page, or parts of different cases, commits, cards or torch versions.
    """
    parts = []
    for path in paths:
        try:
            part = json.loads(path.read_text(encoding="utf-8"))
            parts.append({key: part[key] for key in ("case", "environment", "rows")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultError(f"{path} is no result of `python -m benchmarks CASE --json FILE`") from error
    first = parts[0]
    if first["case"] not in PAGES:
        raise ResultError(f"{first['case']} is shown on no page; these are: {', '.join(PAGES)}")
    for path, part in zip(paths, parts, strict=True):
        if part["case"] != first["case"]:
            raise ResultError(f"{path} is a result of {part['case']}, {paths[0]} of {first['case']}: give one case")
        for key in ("commit", "card", "torch"):
            if part["environment"][key] != first["environment"][key]:
                raise ResultError(f"{path} and {paths[0]} differ in {key}: they are not parts of one result")
    return {**first, "rows": [row for part in parts for row in part["rows"]]}


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


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)  # type: ignore[no-any-return]
