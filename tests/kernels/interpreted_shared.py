# SPDX-License-Identifier: Apache-2.0
"""Attention whose programs share a tile's keys, and attention that scores keys, in Triton's interpreter, as JSON.

A program of its own (`python -m tests.kernels.interpreted_shared`), since the interpreter must be on before any kernel
is defined. fp32 and fp16 only: the interpreter's bf16 products are wrong.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from dllm_compile.kernels.row_attention_blocks import Blocks
from dllm_compile.kernels.row_attention_triton import row_attention_triton
from dllm_compile.kernels.summed_query import Tracking
from tests.kernels.cache_cases import dense_scores
from tests.kernels.cases import dense_attention, packed_heads, tiles_of

DTYPES = (torch.float32, torch.float16)

# A name, then samples as (rows, keys), pad, tile rows, heads, key heads, head dim, blocks.
SHARED = {
    "one key": ([(1, 1)], 0, 16, 1, 1, 16, Blocks(16, 16, 2, 4, 4)),
    "whole shares": ([(16, 64)], 0, 16, 2, 1, 32, Blocks(16, 16, 2, 4, 2)),
    "the last share is short": ([(9, 70)], 0, 16, 2, 2, 16, Blocks(16, 16, 2, 4, 4)),
    "shares without keys, pad rows": ([(3, 17), (5, 40)], 4, 16, 4, 2, 16, Blocks(16, 16, 2, 4, 8)),
    "several parts a tile": ([(40, 90), (7, 33)], 0, 64, 2, 1, 16, Blocks(16, 16, 2, 4, 3)),
    "head dim 128": ([(20, 100)], 0, 32, 1, 1, 128, Blocks(32, 32, 2, 4, 2)),
    "64 rows": ([(70, 50), (5, 130), (3, 0)], 2, 64, 2, 1, 16, Blocks(64, 16, 2, 4, 1)),
    "64 rows, whole blocks only": ([(64, 96)], 0, 64, 1, 1, 16, Blocks(64, 32, 2, 4, 1)),
    "64 rows, shared keys": ([(66, 33), (1, 7)], 0, 64, 2, 2, 32, Blocks(64, 16, 2, 4, 4)),
}

# A name, then samples, tile rows, heads, key heads, head dim, window rows (of all samples' rows), blocks.
SCORED = {
    "one key": ([(1, 1)], 16, 1, 1, 16, [[0]], Blocks(16, 16, 2, 4)),
    "grouped heads, gaps in the window": (
        [(9, 30), (12, 21)],
        16,
        4,
        2,
        16,
        [[3, -1, 4, 0, -1], [20, 9, -1, -1, 10]],
        Blocks(16, 16, 2, 4),
    ),
    "the window ends in the third tile": ([(50, 64)], 16, 2, 2, 32, [[3, 40, 17]], Blocks(16, 16, 2, 4)),
    "part of a tile, shared keys": ([(30, 77), (5, 50)], 64, 2, 1, 16, [[20, 2], [31, 30]], Blocks(16, 16, 2, 4, 3)),
    "samples without a window": ([(4, 20), (6, 18), (3, 40)], 16, 2, 2, 16, [[-1], [5], [-1]], Blocks(16, 16, 2, 4)),
    "head dim 128": ([(20, 45)], 32, 1, 1, 128, [[*range(16)]], Blocks(32, 32, 2, 4, 2)),
}


def shared_errors() -> dict[str, dict[str, float]]:
    """Largest error against the fp64 definition, other bits in a second run, counters that are not zero afterwards."""
    found: dict[str, dict[str, float]] = {}
    for name, (samples, pad, tile_rows, heads, kv_heads, head_dim, blocks) in SHARED.items():
        rows, keys = sum(s[0] for s in samples) + pad, sum(s[1] for s in samples)
        tiles = tiles_of(samples, tile_rows, pad)
        for dtype in DTYPES:
            q, k, v = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype)
            arrived = torch.zeros(999, dtype=torch.int32)
            out = row_attention_triton(q, k, v, tiles, tile_rows, blocks, arrived=arrived)
            again = row_attention_triton(q, k, v, tiles, tile_rows, blocks)
            found[f"{name}, {dtype}"] = {
                "error": (out.double() - dense_attention(q, k, v, tiles)).abs().max().item(),
                "other bits": (out != again).sum().item(),
                "counted": arrived.count_nonzero().item(),
            }
    return found


def scored_errors() -> dict[str, dict[str, float]]:
    """Errors of scores (relative to the magnitudes summed), writes outside the spans, other bits of the attention."""
    found: dict[str, dict[str, float]] = {}
    for name, (samples, tile_rows, heads, kv_heads, head_dim, window_rows, blocks) in SCORED.items():
        rows, keys = sum(s[0] for s in samples), sum(s[1] for s in samples)
        # Behind the samples a second half with keys of its own and no window, as guidance has it.
        half = tiles_of(samples, tile_rows)
        offset = torch.tensor([rows, rows, keys, keys], dtype=torch.int32)
        tiles, window = torch.cat((half, half + offset)), torch.tensor(window_rows)
        ends = torch.tensor([s[1] for s in samples]).cumsum(0)
        spans = torch.stack((ends - torch.tensor([s[1] for s in samples]), ends), 1).int()
        spans = torch.cat((spans, torch.zeros(1, 2, dtype=torch.int32)))
        window = torch.cat((window, torch.full_like(window[:1], -1)))
        for dtype in DTYPES:
            q, k, v = packed_heads(2 * rows, 2 * keys + 1, heads, kv_heads, head_dim, dtype)
            before = torch.randn(heads, 2 * keys + 1, generator=torch.Generator().manual_seed(3))
            scores = before.clone()
            tracking = Tracking(window, spans, scores)
            out = row_attention_triton(q, k, v, tiles, tile_rows, blocks, tracking=tracking)
            plain = row_attention_triton(q, k, v, tiles, tile_rows, blocks)
            added, magnitude = dense_scores(q, window, k, spans)
            error = ((scores.double() - before.double()).sum(0) - added).abs()
            scored = magnitude > 0
            scale = magnitude + before.abs().double().sum(0)
            found[f"{name}, {dtype}"] = {
                "error": (error / scale)[scored].max().item(),
                "outside": (scores != before)[:, ~scored].sum().item(),
                "other bits": (out != plain).sum().item(),
            }
    return found


def nan_stays() -> bool:
    """A NaN in one sample's queries, keys and values reaches no score and no row of the other."""
    tiles, blocks = tiles_of([(8, 21), (12, 22)], 16), Blocks(16, 16, 2, 4, 2)
    window, spans = torch.tensor([[2, 5], [9, 10]]), torch.tensor([[0, 21], [21, 43]], dtype=torch.int32)
    results = []
    for poison in (False, True):
        q, k, v = packed_heads(20, 43, 4, 2, 16, torch.float16)
        if poison:
            q[8:], k[21:], v[21:] = torch.nan, torch.nan, torch.nan
        scores = torch.zeros(4, 43)
        out = row_attention_triton(q, k, v, tiles, 16, blocks, tracking=Tracking(window, spans, scores))
        results.append((out, scores))
    (out, scores), (poisoned, reached) = results
    clean = torch.equal(poisoned[:8], out[:8]) and torch.equal(reached[:, :21], scores[:, :21])
    return clean and bool(poisoned[8:].isnan().all()) and bool(reached[:, 21:].isnan().all())


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({"shared": shared_errors(), "scored": scored_errors(), "NaN stays": nan_stays()}, sys.stdout)
