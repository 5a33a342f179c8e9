# SPDX-License-Identifier: Apache-2.0
"""Decoding settings on the bundled model's held-out problems, each paired with the first one on the same problems."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig
from dllm_compile.evaluate import FAMILIES, evaluate
from dllm_compile.models import load_small, load_small_tokenizer

Groups = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By group, by name: the fields of `DecodingConfig` that a setting sets. The first of all is the base."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a case that compares settings."""
    parser.add_argument("-n", "--problems", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=125)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")


def evaluate_settings(groups: Groups, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each family and setting."""
    compiled = False if arguments.no_compile else None
    fast = dllm_compile.optimize(load_small(device=arguments.device), CompileConfig(compile=compiled))
    tokenizer = load_small_tokenizer()
    rows = []
    for family in arguments.families:
        base: tuple[bool, ...] | None = None
        for group, settings in groups.items():
            for name, options in settings.items():
                found = evaluate(
                    fast,
                    tokenizer,
                    DecodingConfig(**options, check_every=1),  # no rows of samples that have ended are counted
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


def paired(base: tuple[bool, ...], other: tuple[bool, ...]) -> dict[str, Any]:
    """The same problems under two settings.

    Returns:
        gained: solved by `other` alone; lost: by `base` alone; difference: of the solved shares, and difference_error,
        its standard error from the pairs; p: of McNemar's exact test, both sides.
    """
    gained = sum(new and not old for old, new in zip(base, other, strict=True))
    lost = sum(old and not new for old, new in zip(base, other, strict=True))
    changed, problems = gained + lost, len(base)
    mean = (gained - lost) / problems
    smaller = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    return {
        "gained": gained,
        "lost": lost,
        "difference": mean,
        "difference_error": math.sqrt(max(changed / problems - mean * mean, 0.0) / problems),
        "p": min(1.0, 2 * smaller),
    }


def p_value(p: float) -> str:
    """A p-value with two digits, which are never 0.00."""
    return "< 0.005" if p < 0.005 else f"{p:.2f}"


def rows_a_token(row: dict[str, Any]) -> float:
    """Rows computed for each answer token."""
    return float(row["row_forwards"] / row["answer_tokens"])


def table(result: dict[str, Any]) -> str:
    """Solved, difference to the base on the same problems, tokens a forward and rows a token; one column a family."""
    environment, rows = result["environment"], result["rows"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    (problems,) = {row["problems"] for row in rows}
    where = f"{environment['card']}, torch {environment['torch']}, commit {environment['commit']}"
    setting = f"{problems} held-out problems a family, fp32, 128 new tokens"
    base = f"{rows[0]['group']}, {rows[0]['name']}"
    notes = (
        "The difference is to the first line on the same problems, ± its standard error, with p of McNemar's exact "
        "test. A verify pass counts as a forward; rows tell what forwards cost where they compute few."
    )
    lines = [
        f"{where}; {setting}. {notes}",
        "",
        "| setting | "
        + " | ".join(f"{family}: solved; difference (p); tokens a forward; rows a token" for family in families)
        + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for group, name in dict.fromkeys((row["group"], row["name"]) for row in rows):
        cells = []
        for family in families:
            (row,) = (one for one in rows if (one["group"], one["name"], one["family"]) == (group, name, family))
            cell = f"{100 * row['accuracy']:.1f} %; "
            if f"{group}, {name}" != base:
                error = 100 * row["difference_error"]
                cell += f"{100 * row['difference']:+.1f} ± {error:.1f} ({p_value(row['p'])}); "
            cells.append(cell + f"{row['tokens_per_forward']:.2f}; {rows_a_token(row):.0f}")
        lines.append(f"| {group}, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
