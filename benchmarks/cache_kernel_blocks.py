# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of a cached step's kernels at the 8B shape: what `choose_blocks` and `choose_share` weigh.

Each configuration compiles once (about a second). One that does not fit is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dllm_compile.kernels import _launch
from dllm_compile.kernels.row_attention_blocks import Blocks, Work, choose_blocks

from .cached_step import CASES, HEADS, SETS, TILE_ROWS, WIDTH, Call, Step, Variants, random, timed

# Heads of a program, warps.
SHARES = ((4, 8), (16, 8), (16, 4), (8, 2), (4, 4), (4, 2), (4, 1), (32, 8))
# By rows of a sample.
BLOCKS = {
    32: (
        *(Blocks(32, 64, 3, 4, splits) for splits in (1, 2, 4)),
        *(Blocks(16, 64, 3, 4, splits) for splits in (2, 4)),
        *(Blocks(64, 64, 3, 4), Blocks(32, 128, 2, 4), Blocks(64, 128, 3, 4)),
    ),
    128: (
        *(Blocks(128, 128, 3, 8), Blocks(128, 128, 2, 8), Blocks(128, 64, 3, 8), Blocks(128, 64, 4, 8)),
        *(Blocks(64, 128, 3, 4), Blocks(64, 64, 3, 4), Blocks(64, 64, 4, 4), Blocks(64, 64, 4, 4, 2)),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", nargs="+", default=["write", "attention", "scored"])


@torch.no_grad()
def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every configuration of every kernel for every case."""
    if not torch.cuda.is_available():
        raise SystemExit("cache-kernel-blocks measures CUDA kernels: run it on a card")
    rows = []
    measures = {"write": _write, "attention": _attention, "scored": _scored}
    for samples, query in CASES:
        step = Step(samples, query)
        for kernel in arguments.kernels:
            variants, chosen = measures[kernel](step)
            times = timed({name: make for name, make in variants.items() if _runs(make(0))}, arguments)
            fastest = dict(sorted(times.items(), key=lambda item: item[1]))
            rows.append({**step.row(kernel, fastest, {}), "chosen": str(tuple(chosen))})
            print(rows[-1], flush=True)
        del step, variants
        torch.cuda.empty_cache()
    return rows


def _runs(call: Call) -> bool:
    """Whether a configuration fits; one that was never compiled stays out of the graph."""
    from triton.runtime.errors import OutOfResources

    try:
        call()
        torch.cuda.synchronize()
    except OutOfResources:
        return False
    return True


def _write(step: Step) -> tuple[Variants, tuple[int, ...]]:
    from dllm_compile.kernels.qkv_rope_cache_write_triton import Share, choose_share, qkv_rope_cache_write_triton

    projected = [random(len(step.x), 3 * WIDTH) for _ in range(SETS)]

    def call(share: Share) -> Callable[[int], Call]:
        rest = (*step.tables, step.positions, step.rows)
        return lambda i: (
            lambda: qkv_rope_cache_write_triton(projected[i], *rest, *step.caches[i], HEADS, HEADS, share=share)
        )

    return {str(share): call(Share(*share)) for share in SHARES}, choose_share(len(step.x), HEADS)


def _attention(step: Step, tracking: Any = None) -> tuple[Variants, tuple[int, ...]]:
    from dllm_compile.kernels.row_attention_triton import row_attention_triton

    q = random(len(step.x), WIDTH).unflatten(1, (HEADS, -1))
    work = Work(len(q), len(step.tiles), TILE_ROWS, HEADS, len(step.caches[0][0]))
    chosen = choose_blocks(q.dtype, q.shape[2], work, _launch.processors(q.device))

    def call(blocks: Blocks) -> Callable[[int], Call]:
        def attend(i: int) -> Tensor:
            return row_attention_triton(
                q, *step.caches[i], step.tiles, TILE_ROWS, blocks, tracking=tracking, arrived=step.arrived
            )

        return lambda i: lambda: attend(i)

    blocks_of = dict.fromkeys((*BLOCKS[step.query], chosen))
    return {str(tuple(blocks)): call(blocks) for blocks in blocks_of}, chosen


def _scored(step: Step) -> tuple[Variants, tuple[int, ...]]:
    from dllm_compile.kernels.summed_query import Tracking

    return _attention(step, Tracking(step.window, step.spans, step.by_head))
