# SPDX-License-Identifier: Apache-2.0
"""Accuracy against speed on the bundled model's held-out problems: the README's table.

The figures do not depend on the machine, up to rounding: every decoding configuration is a fixed algorithm in fp32 on
a fixed list of problems. Wall time is recorded and is not part of the table.
"""

from __future__ import annotations

import argparse
from typing import Any

from . import paired_accuracy

CONFIGS: dict[str, dict[str, Any]] = {
    "one token a step": {},
    "two tokens a step": {"steps": 64},
    "threshold 0.95": {"threshold": 0.95},
    "threshold 0.9": {"threshold": 0.9},
    "threshold 0.7": {"threshold": 0.7},
    "factor 1.0": {"factor": 1.0},
    "Fréchet margin 0.25": {"frechet_margin": 0.25},
    "threshold 0.9, prefix cache": {"threshold": 0.9, "cache": "prefix"},
    "threshold 0.9, dual cache": {"threshold": 0.9, "cache": "dual"},
    "threshold 0.9, Flash-Cache": {"threshold": 0.9, "cache": "flash"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what is measured."""
    paired_accuracy.add_arguments(parser)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=tuple(CONFIGS), metavar="NAME")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each family and configuration."""
    chosen = {name: CONFIGS[name] for name in arguments.configs}
    return paired_accuracy.evaluate_settings({"decoding": chosen}, arguments)


def table(figures: dict[str, Any]) -> str:
    """The README's table."""
    rows = figures["rows"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    (problems,) = {row["problems"] for row in rows}
    setting = f"{problems} held-out problems a family, fp32, 128 new tokens in blocks of 32"
    lines = [
        f"{setting}; ± is one standard error of the sample.",
        "",
        "| decoding | " + " | ".join(f"{family}: solved, forwards a problem" for family in families) + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for family in families:
            (row,) = (row for row in rows if row["name"] == name and row["family"] == family)
            solved = f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy_error']:.1f} %"
            cells.append(f"{solved}, {row['forwards_per_problem']:.1f} ± {row['forwards_error']:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
