# SPDX-License-Identifier: Apache-2.0
"""The picture of `frontier`: problems solved against tokens a forward and rows a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import drawing
from .paired_accuracy import rows_a_token

MARKERS = ("s", "o", "v", "D", "o", "^", "P")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Problems solved, with their standard error, against tokens a forward and rows a token; one column a family."""
    plt = drawing.pyplot()
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(2, len(families), figsize=(4.2 * len(families), 8), squeeze=False)
    kinds = {"answer tokens a forward": lambda row: row["tokens_per_forward"], "rows an answer token": rows_a_token}
    for line, (label, value) in zip(axes, kinds.items(), strict=True):
        for axis, family in zip(line, families, strict=True):
            here = [row for row in rows if row["family"] == family]
            for group, marker in zip(dict.fromkeys(row["group"] for row in here), MARKERS, strict=True):
                points = [row for row in here if row["group"] == group]
                axis.errorbar(
                    [value(row) for row in points],
                    [100 * row["accuracy"] for row in points],
                    yerr=[100 * row["accuracy_error"] for row in points],
                    marker=marker,
                    markersize=4,
                    linewidth=1,
                    capsize=2,
                    label=group,
                )
            base = f"{here[0]['group']}, {here[0]['name']}"
            axis.axhline(100 * here[0]["accuracy"], color="grey", linestyle="--", linewidth=0.8, label=base)
            axis.set_title(family)
            axis.set_xlabel(label)
        line[0].set_ylabel("problems solved, %")
    for axis in axes[1]:
        axis.set_xscale("log")
        _plain_ticks(axis)
    axes[1][-1].legend(fontsize=7, loc="lower right")  # many rows a token that solve little: empty
    figure.tight_layout()
    drawing.save(figure, path)


def _plain_ticks(axis: Any) -> None:
    """A few round numbers, written in full, on an axis with a logarithmic scale."""
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
