# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of `lacache-interval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import drawing
from .paired_accuracy import p_value


def table(result: dict[str, Any]) -> str:
    """Rows of the page's table."""
    environment = result["environment"]
    where = f"{environment['card']}, torch {environment['torch']}, commit {environment['commit']}"
    lines = [
        f"{where}; {result['rows'][0]['problems']} held-out problems, {result['rows'][0]['batch_size']} in a batch.",
        "",
        "| cached layers | solved | against uncached, same problems | forwards a problem | ms a forward |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {100 * row['accuracy']:.1f} ± {100 * row['accuracy_error']:.1f} % "
        f"| {_change(row)} | {row['forwards_per_problem']:.1f} | {_ms(row):.2f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def _change(row: dict[str, Any]) -> str:
    """Points lost or gained, with their standard error; nothing in files made before rows were paired."""
    if "difference" not in row:
        return ""
    return f"{100 * row['difference']:+.1f} ± {100 * row['difference_error']:.1f} ({p_value(row['p'])})"


def _ms(row: dict[str, Any]) -> float:
    """Wall time of the loop for each step of a batch: forwards are shared by the problems of a batch."""
    return 1e3 * row["seconds"] / row["batch_forwards"]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy with its standard error, and milliseconds a forward, against the interval."""
    plt = drawing.pyplot()
    wide = [row for row in rows if row["name"].startswith("wide")]
    labels = [row["name"].removeprefix("wide, ") for row in wide]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    left.errorbar(
        range(len(wide)),
        [100 * row["accuracy"] for row in wide],
        yerr=[100 * row["accuracy_error"] for row in wide],
        marker="o",
        capsize=3,
    )
    left.axhline(100 * rows[0]["accuracy"], color="grey", linestyle="--", label="uncached")
    left.set_ylabel("problems solved, %")
    right.plot(range(len(wide)), [_ms(row) for row in wide], marker="o")
    right.axhline(_ms(rows[0]), color="grey", linestyle="--", label="uncached")
    right.set_ylabel("ms a forward")
    right.set_ylim(bottom=0, top=1.08 * max(map(_ms, [rows[0], *wide])))
    for axis in (left, right):
        axis.set_xticks(range(len(wide)), labels, rotation=45, ha="right")
        axis.set_xlabel("state filled anew")
        axis.legend()
    figure.tight_layout()
    drawing.save(figure, path)
