# SPDX-License-Identifier: Apache-2.0
"""Accuracy against tokens per forward of the bundled model: quota, threshold, factor, Fréchet margin, Flash-Verify."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig
from dllm_compile.evaluate import evaluate
from dllm_compile.models import load_small, load_small_tokenizer

from .fp8_accuracy import paired

FAMILIES = ("arithmetic", "code", "prose")
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("-n", "--problems", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=125)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each setting and family, paired with one token a step on the same problems."""
    compiled = False if arguments.no_compile else None
    fast = dllm_compile.optimize(load_small(device=arguments.device), CompileConfig(compile=compiled))
    tokenizer = load_small_tokenizer()
    rows = []
    for family in arguments.families:
        base: tuple[bool, ...] | None = None
        for group, settings in GROUPS.items():
            for name, options in settings.items():
                found = evaluate(
                    fast,
                    tokenizer,
                    DecodingConfig(**options),
                    family=family,
                    problems=arguments.problems,
                    batch_size=arguments.batch_size,
                )
                base = found.solved if base is None else base
                row = {"group": group, "name": name, **found.to_dict(), **paired(base, found.solved)}
                rows.append(row)
                print(
                    f"{family}, {group}, {name}: {100 * found.accuracy:.1f} ± {100 * found.accuracy_error:.1f} %, "
                    f"{found.tokens_per_forward:.2f} tokens a forward, {row['gained']} gained, {row['lost']} lost",
                    flush=True,
                )
    return rows
