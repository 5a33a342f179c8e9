# SPDX-License-Identifier: Apache-2.0
"""The kernels of the caches in Triton's interpreter; see `interpreted.py`."""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from dllm_compile.kernels.facache_triton import facache_triton
from dllm_compile.kernels.qkv_rope_cache_write import qkv_rope_cache_write_reference
from dllm_compile.kernels.qkv_rope_cache_write_triton import Share, qkv_rope_cache_write_triton
from dllm_compile.kernels.row_attention_triton import Blocks
from dllm_compile.kernels.row_scores_triton import Cut, row_scores_triton
from tests.kernels.cache_cases import (
    block_tiles,
    dense_scores,
    dense_state,
    empty_state,
    outside_rows,
    rope_write_inputs,
)
from tests.kernels.cases import dense_attention, packed_heads

DTYPES = (torch.float32, torch.float16)  # fp16 keys go through tensor descriptors

# A name, then samples (rows, block begin, block end), tile rows, heads, key heads, head dim, block rows, block keys.
FACACHE = {
    "one row, its own block": ([(1, 0, 1)], 16, 1, 1, 16, 16, 16),
    "a block of one row": ([(21, 9, 10)], 16, 2, 2, 16, 16, 16),
    "first, last, whole and middle": ([(20, 0, 5), (23, 17, 23), (9, 0, 9), (40, 18, 37)], 16, 4, 2, 16, 16, 16),
    "several parts a tile": ([(50, 21, 40)], 50, 2, 1, 32, 16, 16),
    "tiles larger than all": ([(5, 2, 3), (2, 0, 1)], 64, 2, 2, 64, 64, 64),
    "head dim 128": ([(40, 3, 20)], 16, 1, 1, 128, 16, 16),
}


def facache_errors() -> dict[str, dict[str, float]]:
    """Largest errors against fp64, and whether what must not change did not, by case and dtype."""
    errors: dict[str, dict[str, float]] = {}
    for name, (samples, tile_rows, heads, kv_heads, head_dim, block_rows, block_keys) in FACACHE.items():
        rows, outside = sum(sample[0] for sample in samples), outside_rows(samples)
        tiles, blocks = block_tiles(samples, tile_rows), Blocks(block_rows, block_keys, 2, 4)
        for dtype in DTYPES:
            q, k, v = packed_heads(rows, rows, heads, kv_heads, head_dim, dtype)
            state = empty_state(rows, heads, head_dim, 7.0)
            out = facache_triton(q, k, v, *state, tiles, tile_rows, False, blocks)
            found = errors.setdefault(f"{name}, {dtype}", {})
            found["first"] = (out.double() - dense_attention(q, k, v, tiles[:, :4])).abs().max().item()
            m, den, num = (x[outside].double() for x in state)
            for part, got, expected in zip(
                ("m", "den", "num"), (m, den, num), dense_state(q, k, v, samples), strict=True
            ):
                expected = expected[outside]
                same = got == expected  # -inf - -inf
                found[part] = torch.where(same, 0.0, got - expected).abs().amax().item() if len(got) else 0.0
            found["inside touched"] = sum((x[~outside] != 7).sum().item() for x in state)

            # The block changes, the state stays.
            later = packed_heads(rows, rows, heads, kv_heads, head_dim, dtype, seed=1)
            for x, fresh in zip((q, k, v), later, strict=True):
                x[~outside] = fresh[~outside]
            for x in state:
                x[~outside] = torch.nan
            before = [x.clone() for x in state]
            out = facache_triton(q, k, v, *state, tiles, tile_rows, True, blocks)
            found["step"] = (out.double() - dense_attention(q, k, v, tiles[:, :4])).abs().max().item()
            found["state changed"] = sum((a != b)[outside].sum().item() for a, b in zip(state, before, strict=True))
    return errors


def facache_layouts() -> dict[str, bool]:
    """Inputs a descriptor cannot read, NaN in another sample, the chosen blocks."""
    samples = [(12, 3, 8), (20, 15, 20)]
    tiles, blocks = block_tiles(samples, 16), Blocks(16, 16, 2, 4)
    q, k, v = packed_heads(32, 32, 4, 2, 16, torch.float16)
    first, step = {}, {}
    heads_outside = k.transpose(0, 1).contiguous().transpose(0, 1)
    dims_outside = q.transpose(1, 2).contiguous().transpose(1, 2)
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[12:] = torch.nan
    inputs = {"plain": (q, k, v), "heads outside": (q, heads_outside, v), "dims outside": (dims_outside, k, v)}
    for name, arguments in {**inputs, "NaN stays": poisoned, "chosen blocks": (q, k, v)}.items():
        state = empty_state(32, 4, 16)
        chosen = None if name == "chosen blocks" else blocks
        first[name] = facache_triton(*arguments, *state, tiles, 16, False, chosen)
        step[name] = facache_triton(*arguments, *state, tiles, 16, True, chosen)
    plain = (first["plain"], step["plain"])
    return {
        "heads outside": torch.equal(first["heads outside"], plain[0]) and torch.equal(step["heads outside"], plain[1]),
        "dims outside": torch.equal(first["dims outside"], plain[0]) and torch.equal(step["dims outside"], plain[1]),
        "NaN stays": torch.equal(first["NaN stays"][:12], plain[0][:12])
        and torch.equal(step["NaN stays"][:12], plain[1][:12]),
        "chosen blocks": torch.allclose(first["chosen blocks"], plain[0], atol=2e-3)
        and torch.allclose(step["chosen blocks"], plain[1], atol=2e-3),
    }


# A name, then rows, heads, key heads, head dim, heads of a program.
ROPE_WRITE = {
    "one row": (1, 1, 1, 16, 1),
    "grouped heads": (5, 8, 2, 16, 4),
    "one key head": (3, 6, 1, 32, 2),
    "heads no multiple of the share": (4, 6, 3, 16, 4),
    "head dim no power of two": (3, 4, 2, 24, 4),
    "share larger than all": (2, 4, 4, 64, 16),
    "chosen share": (2, 4, 2, 128, 0),
}


def rope_write_differences() -> dict[str, int]:
    """Numbers of q and the caches that are not the reference's, bit for bit."""
    differences = {}
    for name, (rows, heads, kv_heads, head_dim, share) in ROPE_WRITE.items():
        for dtype in DTYPES:
            arguments = rope_write_inputs(rows, heads, kv_heads, head_dim, dtype)
            expected = rope_write_inputs(rows, heads, kv_heads, head_dim, dtype)
            q = qkv_rope_cache_write_triton(*arguments, share=Share(share, 4) if share else None)
            expected_q = qkv_rope_cache_write_reference(*expected)
            pairs = ((q, expected_q), (arguments[5], expected[5]), (arguments[6], expected[6]))
            differences[f"{name}, {dtype}"] = sum((a != b).sum().item() for a, b in pairs)
    return differences


# A name, then rows, keys, heads, key heads, head dim, window, spans, cut.
SCORES = {
    "one key": (1, 1, 1, 1, 16, [[0]], [[0, 1]], Cut(8, 16, 4)),
    "grouped, padded window": (9, 30, 6, 2, 16, [[3, 4, -1], [8, -1, -1]], [[0, 11], [11, 30]], Cut(8, 16, 4)),
    "many spans in one block": (
        3,
        40,
        2,
        1,
        16,
        [[0], [1], [0], [2]],
        [[1, 3], [9, 9], [6, 8], [20, 37]],
        Cut(16, 32, 4),
    ),
    "no window, no span": (3, 12, 2, 2, 16, [[-1, -1], [0, 2]], [[0, 5], [7, 7]], Cut(8, 32, 4)),
    "width no power of two": (4, 21, 6, 3, 24, [[0, 1, 2, 3]], [[2, 19]], Cut(8, 32, 4)),
    "chosen cut": (4, 21, 4, 2, 32, [[0, 1], [2, 3]], [[0, 10], [12, 21]], None),
}


def score_errors() -> dict[str, float]:
    """Largest error against fp64, relative to the sum of the products' magnitudes; scores outside spans are exact."""
    errors = {}
    for name, (rows, keys, heads, kv_heads, head_dim, window, spans, cut) in SCORES.items():
        for dtype in DTYPES:
            q, k, _ = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype)
            rows_of, ranges = torch.tensor(window), torch.tensor(spans, dtype=torch.int32)
            before = torch.randn(keys, generator=torch.Generator().manual_seed(3))
            scores = before.clone()
            row_scores_triton(q, rows_of, k, ranges, scores, cut)
            added, magnitude = dense_scores(q, rows_of, k, ranges)
            error = (scores.double() - before.double() - added).abs()
            errors[f"{name}, {dtype}"] = (error / (magnitude + before.abs() * (magnitude > 0) + 1e-30)).max().item()
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = {
        "facache": facache_errors(),
        "layouts": facache_layouts(),
        "rope write": rope_write_differences(),
        "scores": score_errors(),
    }
    json.dump(measured, sys.stdout)
