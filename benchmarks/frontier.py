# SPDX-License-Identifier: Apache-2.0
"""Accuracy against tokens per forward of the bundled model: quota, threshold, factor, Fréchet margin, Flash-Verify."""

from __future__ import annotations

import argparse
from typing import Any

from . import paired_accuracy

BASE = "one token a step"
GAMMAS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_VERIFY = {"cache": "flash", "commit": "flash_verify", "threshold": 0.9}

# By rule, in the order in which they are drawn: what each setting is called, and what it sets.
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "quota": {BASE: {}, "two a step": {"steps": 64}, "four a step": {"steps": 32}},
    "threshold": {f"{value}": {"threshold": value} for value in (0.95, 0.9, 0.8, 0.7)},
    "factor": {f"{value}": {"factor": value} for value in (0.5, 0.75, 1.0, 1.5)},
    "Fréchet margin": {f"{value}": {"frechet_margin": value} for value in (0.5, 0.25, 0.1, 0.0)},
    "threshold, Flash-Cache": {f"{value}": {"cache": "flash", "threshold": value} for value in (0.95, 0.9, 0.8, 0.7)},
    "Flash-Verify, product": {f"γ {value}": {**_VERIFY, "gamma": value} for value in reversed(GAMMAS)},
    "Flash-Verify, per token": {
        f"γ {value}": {**_VERIFY, "gamma": value, "verify_rule": "per_token"} for value in reversed(GAMMAS)
    },
}


add_arguments = paired_accuracy.add_arguments


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each setting and family, paired with one token a step on the same problems."""
    return paired_accuracy.evaluate_settings(GROUPS, arguments)
