# SPDX-License-Identifier: Apache-2.0
"""Draw `docs/frontier.svg` and write `docs/flash_verify.md`'s table from the committed figures.

python -m benchmarks.plot_frontier benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- table: frontier -->\n", "<!-- end of table -->"
MARKERS = ("s", "o", "v", "D", "o", "^", "P")


def main() -> None:
    """Read a result file, draw, and put the table between its marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    result = json.loads(parser.parse_args().result.read_text(encoding="utf-8"))
    page = DOCS / "flash_verify.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no {BEGIN.strip()} ... {END}")
    page.write_text(before + BEGIN + table(result) + END + after, encoding="utf-8")
    draw(result["rows"], DOCS / "frontier.svg")


def table(result: dict[str, Any]) -> str:
    """Rows of the page's table: solved, difference to one token a step on the same problems, tokens a forward."""
    environment, rows = result["environment"], result["rows"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    counts = {row["problems"] for row in rows}
    where = f"{environment['card']}, torch {environment['torch']}, commit {environment['commit']}"
    setting = f"{counts.pop()} held-out problems a family, fp32, 128 new tokens"
    notes = (
        "The difference is to one token a step on the same problems, ± its standard error. A verify pass counts as a "
        "forward; rows tell what forwards cost where they compute few."
    )
    lines = [
        f"{where}; {setting}. {notes}",
        "",
        "| rule | "
        + " | ".join(f"{family}: solved; difference; tokens a forward; rows a token" for family in families)
        + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for group, name in dict.fromkeys((row["group"], row["name"]) for row in rows):
        cells = []
        for family in families:
            (row,) = (one for one in rows if (one["group"], one["name"], one["family"]) == (group, name, family))
            change = f"{100 * row['difference']:+.1f} ± {100 * row['difference_error']:.1f}"
            cells.append(
                f"{100 * row['accuracy']:.1f} %; {change}; {row['tokens_per_forward']:.2f}; {_rows_a_token(row):.0f}"
            )
        lines.append(f"| {group}, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rows_a_token(row: dict[str, Any]) -> float:
    """Rows computed for each answer token."""
    return float(row["row_forwards"] / row["answer_tokens"])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Problems solved, with their standard error, against tokens a forward and rows a token; one column a family."""
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(2, len(families), figsize=(4.2 * len(families), 8), squeeze=False)
    kinds = {"answer tokens a forward": lambda row: row["tokens_per_forward"], "rows an answer token": _rows_a_token}
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


if __name__ == "__main__":
    main()
