# SPDX-License-Identifier: Apache-2.0
"""Kernels of a verify pass at the 8B shape: attention by launch configuration, and the head with a given token.

bf16, 32 heads of 128, 1,280 cached keys a sample, 32 rows a sample of which 16 are context, 8 drafts and 8 masks.
Microseconds are medians of graph replays over several sets of caches, so that the L2 does not help.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.kernels.head_confidence_triton import head_confidence_triton, head_verify_triton
from dllm_compile.kernels.row_attention_blocks import Blocks
from dllm_compile.kernels.verify_attention_triton import choose_verify_blocks, verify_attention_triton

from .timing import interleaved, replayable

HEADS, HEAD_DIM, KEYS, ROWS, DRAFTS = 32, 128, 1280, 32, 8
SAMPLES = (1, 2, 8, 32)
SETS = 4
VOCABULARY, WIDTH = 126_464, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations of the attention as well")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Attention for each number of samples, then the head."""
    rows = []
    for samples in SAMPLES:
        sets = [_inputs(samples, seed) for seed in range(SETS)]
        chosen = choose_verify_blocks(
            torch.bfloat16,
            HEAD_DIM,
            ROWS,
            HEADS * samples,
            torch.cuda.get_device_properties(0).multi_processor_count,
        )
        configurations = [chosen, *(_sweep(samples) if arguments.sweep else [])]
        variants = {
            f"verify_attention {'x'.join(map(str, blocks))}": replayable(_attention(sets, blocks))
            for blocks in dict.fromkeys(configurations)
        }
        read = 2 * samples * (KEYS + ROWS) * HEADS * HEAD_DIM * 2
        for name, times in interleaved(variants, rounds=arguments.rounds).items():
            each = 1e3 * times["median_ms"] / SETS
            shape = name.removeprefix("verify_attention ")
            rows.append(
                {
                    "operator": "verify_attention",
                    "samples": samples,
                    "blocks": shape,
                    "chosen": shape == "x".join(map(str, chosen)),
                    "us": round(each, 2),
                    "TB/s": round(read / each / 1e6, 3),
                }
            )
            print(rows[-1], flush=True)
        rows += _head(samples, arguments.rounds)
    return rows


def _inputs(samples: int, seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    rows, keys = samples * ROWS, samples * KEYS + 1

    def draw(n: int) -> Tensor:
        return torch.randn(n, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    first = torch.arange(samples, device="cuda")
    tiles = torch.stack((first * ROWS, first * ROWS + ROWS, first * KEYS, first * KEYS + KEYS), 1).int()
    drafts = [[j + 1, j + 1, DRAFTS + 1] for j in range(DRAFTS)] + [[j, 0, j + 1] for j in range(DRAFTS)]
    views = torch.tensor(([[0, 0, DRAFTS + 1]] * (ROWS - 2 * DRAFTS) + drafts) * samples, dtype=torch.int32)
    hidden = torch.zeros(keys, dtype=torch.bool, device="cuda")
    for sample in range(samples):
        hidden[sample * KEYS + torch.randperm(KEYS)[: ROWS - DRAFTS].cuda()] = True
    return draw(rows), draw(rows), draw(rows), draw(keys), draw(keys), tiles, views.cuda(), hidden


def _attention(sets: list[tuple[Tensor, ...]], blocks: Blocks) -> Any:
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")

    def call() -> None:
        for inputs in sets:
            verify_attention_triton(*inputs, ROWS, blocks, arrived=arrived)

    return call


def _sweep(samples: int) -> list[Blocks]:
    splits = (1, 2, 4, 8) if samples <= 2 else (1, 2)
    return [
        Blocks(rows, keys, stages, warps, split)
        for rows in (32, 64)
        for keys in (32, 64, 128)
        for stages in (2, 3, 4)
        for warps in (4, 8)
        for split in splits
        if rows * keys <= 4096 and keys * stages <= 256
    ]


def _head(samples: int, rounds: int) -> list[dict[str, Any]]:
    """The mask rows' head, with and without the probability of a given token."""
    rows = samples * DRAFTS
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
    banned = torch.tensor([-1], device="cuda")
    given = torch.randint(0, VOCABULARY, (rows,), device="cuda")
    variants = {
        "head_confidence": replayable(lambda: head_confidence_triton(x, weight, 1.0, 5, banned)),
        "head_verify": replayable(lambda: head_verify_triton(x, weight, 1.0, 5, banned, given)),
    }
    found = [
        {"operator": name, "samples": samples, "rows": rows, "us": round(1e3 * times["median_ms"], 2)}
        for name, times in interleaved(variants, rounds=rounds).items()
    ]
    for row in found:
        print(row, flush=True)
    return found
