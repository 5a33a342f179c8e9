# SPDX-License-Identifier: Apache-2.0
"""LaCache on more layers than the first: accuracy and time of a step against the update interval (Appendix C)."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.evaluate import evaluate
from dllm_compile.models import load_small, load_small_tokenizer

from .paired_accuracy import paired

# None: the state is filled at the start of a block only.
INTERVALS = (1, 2, 3, 4, 6, 8, 16, None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=125)
    parser.add_argument("--family", default="arithmetic")
    parser.add_argument("--threshold", type=float, default=0.9)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate the uncached loop, the first layer's cache, and the wide set at each interval."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = dllm_compile.optimize(load_small(device=device))
    tokenizer = load_small_tokenizer()
    plain = DecodingConfig(threshold=arguments.threshold)
    configs = {"uncached": plain, "layer 0": plain.replace(cache="lacache")}
    for interval in INTERVALS:
        name = "wide, once a block" if interval is None else f"wide, every {interval}"
        configs[name] = plain.replace(cache="lacache", lacache_layers="wide", lacache_interval=interval)
    rows: list[dict[str, Any]] = []
    base: tuple[bool, ...] | None = None
    for name, config in configs.items():
        evaluate(fast, tokenizer, config, family=arguments.family, problems=2, batch_size=2)  # builds the programs
        found = evaluate(
            fast,
            tokenizer,
            config,
            family=arguments.family,
            problems=arguments.problems,
            batch_size=arguments.batch_size,
        )
        base = found.solved if base is None else base
        rows.append({"name": name, **found.to_dict(), **paired(base, found.solved)})
        print(name, found, flush=True)
    return rows
