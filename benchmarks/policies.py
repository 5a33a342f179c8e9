# SPDX-License-Identifier: Apache-2.0
"""Accuracy and work of the cache policies on the bundled model, paired with the uncached loop under the same rule."""

from __future__ import annotations

import argparse
from typing import Any

from . import paired_accuracy

BUDGETS = (16, 48, 64, 96)
_RULE = {"threshold": 0.9}

GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"threshold 0.9": _RULE},
    "lacache": {"layer 0": {**_RULE, "cache": "lacache"}},
    "prefix": {"refreshed each block": {**_RULE, "cache": "prefix"}},
    "dual": {
        "refreshed each block": {**_RULE, "cache": "dual"},
        "and every 4 steps": {**_RULE, "cache": "dual", "refresh_interval": 4},
    },
    "vicinity": {"8 before, 32 behind": {**_RULE, "cache": "vicinity", "prefix_look": 8, "after_look": 32}},
    "dkv": {f"every {steps} steps": {**_RULE, "cache": "dkv", "cache_steps": steps} for steps in (8, 4)},
    "flash": {f"track {budget}": {**_RULE, "cache": "flash", "track": budget} for budget in BUDGETS},
    "DPad": {
        "uncached, window 64": {**_RULE, "suffix": "dpad", "suffix_window": 64},
        "dual, window 64": {**_RULE, "suffix": "dpad", "suffix_window": 64, "cache": "dual"},
    },
}

add_arguments = paired_accuracy.add_arguments


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each family and policy."""
    return paired_accuracy.evaluate_settings(GROUPS, arguments)
