# SPDX-License-Identifier: Apache-2.0
"""The picture of `frontier`: problems solved against tokens a forward and rows a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .paired_accuracy import rows_a_token

MARKERS = ("s", "o", "v", "D", "o", "^", "P")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Problems solved, with their standard error, against tokens a forward and rows a token; one column a family."""
    import matplotlib.pyplot as plt

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
            axis.axhline(100 * here[0]["accuracy"], color="grey", linestyle="--", linewidth=0.8)
            axis.set_title(family)
            axis.set_xlabel(label)
        line[0].set_ylabel("problems solved, %")
    for axis in axes[1]:
        axis.set_xscale("log")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
