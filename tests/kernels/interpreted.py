# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton kernels on CPU tensors in Triton's interpreter and prints what it measured as JSON.

A program of its own (`python -m tests.kernels.interpreted`), since the interpreter must be on before any kernel is
defined. fp32 and fp16 only: the interpreter's bf16 products are wrong.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from dllm_compile.kernels import counter_rng
from dllm_compile.kernels.head_confidence import head_confidence_reference
from dllm_compile.kernels.head_confidence_triton import Tiling, head_confidence_triton
from dllm_compile.kernels.row_attention_triton import (
    Blocks,
    plan_row_attention,
    row_attention_kernel,
    row_attention_triton,
)
from tests.kernels.cases import dense_attention, exact_head, packed_heads, tiles_of

# A name, then samples, pad, tile rows, heads, key heads, head dim, block rows, block keys.
ATTENTION = {
    "one row": ([(1, 1)], 0, 16, 1, 1, 16, 16, 16),
    "whole blocks only": ([(16, 32)], 0, 16, 2, 2, 16, 16, 16),
    "ragged samples and pad rows": ([(17, 21), (3, 50), (5, 1)], 4, 16, 4, 2, 32, 16, 16),
    "several parts a tile": ([(40, 40)], 0, 40, 2, 1, 16, 16, 32),
    "block larger than everything": ([(5, 5), (2, 2)], 1, 64, 2, 2, 64, 64, 64),
    "head dim 128": ([(9, 40)], 0, 16, 1, 1, 128, 16, 32),
}

# A name, then rows, vocabulary, width, scale, banned ids, whether to sample, tiling.
HEAD = {
    "one row": (1, 50, 16, 1.0, [-1], False, Tiling(16, 16, 16, 2, 4, 0)),
    "ragged everything": (19, 133, 37, 0.3, [5, -1, 77], False, Tiling(16, 32, 16, 2, 4, 0)),
    "persistent": (19, 133, 32, 1.0, [], False, Tiling(16, 16, 32, 2, 4, 3)),
    "sampled": (33, 70, 24, 0.5, [0], True, Tiling(32, 16, 16, 2, 4, 0)),
    "banned tile": (3, 48, 16, 1.0, list(range(16, 32)), True, Tiling(16, 16, 16, 2, 4, 1)),
    "more than a block of tiles": (2, 16 * 1030, 16, 1.0, [-1], False, Tiling(16, 16, 16, 2, 4, 1)),
}


def attention_errors() -> dict[str, dict[str, float]]:
    """Largest error against the fp64 definition, by case and dtype."""
    errors: dict[str, dict[str, float]] = {}
    for name, (samples, pad, tile_rows, heads, kv_heads, head_dim, block_rows, block_keys) in ATTENTION.items():
        rows, keys = sum(s[0] for s in samples) + pad, sum(s[1] for s in samples)
        tiles = tiles_of(samples, tile_rows, pad)
        for dtype in (torch.float32, torch.float16):  # fp16 goes through tensor descriptors
            q, k, v = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype)
            out = row_attention_triton(q, k, v, tiles, tile_rows, Blocks(block_rows, block_keys, 2, 4))
            assert out.shape == (rows, heads * head_dim)
            error = (out.double() - dense_attention(q, k, v, tiles)).abs().max().item()
            errors.setdefault(name, {})[str(dtype)] = error
    return errors


def attention_layouts() -> dict[str, bool]:
    """Inputs a descriptor cannot read, NaN in another sample, rows that no tile names."""
    q, k, v = packed_heads(20, 20, 4, 2, 16, torch.float16)
    tiles, blocks = tiles_of([(8, 8), (12, 12)], 16), Blocks(16, 16, 2, 4)
    out = row_attention_triton(q, k, v, tiles, 16, blocks)
    heads_outside = k.transpose(0, 1).contiguous().transpose(0, 1)
    odd_rows = torch.nn.functional.pad(v.flatten(1), (0, 3))[:, :32].unflatten(1, (2, 16))
    dims_outside = q.transpose(1, 2).contiguous().transpose(1, 2)
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[8:] = torch.nan
    partly = torch.full((20, 64), 7.0, dtype=torch.float16)
    grid, arguments, constants = plan_row_attention(q, k, v, tiles[1:], 16, partly, blocks)
    row_attention_kernel[grid](*arguments, **constants)
    return {
        "rows in no tile": bool((partly[:8] == 7).all()) and torch.equal(partly[8:], out[8:]),
        "heads outside": torch.equal(row_attention_triton(q, heads_outside, v, tiles, 16, blocks), out),
        "odd rows": torch.equal(row_attention_triton(q, k, odd_rows, tiles, 16, blocks), out),
        "dims outside": torch.equal(row_attention_triton(dims_outside, k, v, tiles, 16, blocks), out),
        "NaN stays": torch.equal(row_attention_triton(*poisoned, tiles, 16, blocks)[:8], out[:8]),
        "chosen blocks": torch.allclose(row_attention_triton(q, k, v, tiles, 16), out, atol=2e-3),
    }


def head_errors() -> dict[str, dict[str, float]]:
    """Number of other tokens and largest relative error of the confidence against the reference."""
    errors: dict[str, dict[str, float]] = {}
    for name, (rows, vocabulary, width, scale, banned, sampled, tiling) in HEAD.items():
        for dtype in (torch.float32, torch.float16):
            x, weight = exact_head(rows, vocabulary, width, dtype)
            noise = (torch.arange(rows) * 2654435761 - 5, torch.tensor(1.5)) if sampled else (None, None)
            arguments = (x, weight, scale, 9, torch.tensor(banned, dtype=torch.int64), *noise)
            token, confidence = head_confidence_triton(*arguments, tiling=tiling)
            expected_token, expected = head_confidence_reference(*arguments)
            errors.setdefault(name, {})[f"{dtype} tokens"] = (token != expected_token).sum().item()
            errors[name][f"{dtype} confidence"] = ((confidence - expected) / expected).abs().max().item()
    return errors


@triton.jit
def noise_kernel(seeds, bits, noise, COUNT: tl.constexpr):
    """Bits and Gumbel noise of COUNT indices under one seed."""
    row = tl.program_id(0)
    index = tl.arange(0, COUNT)
    seed = tl.load(seeds + row)
    tl.store(bits + row * COUNT + index, counter_rng.combine_bits(seed, index).to(tl.int64))
    tl.store(noise + row * COUNT + index, counter_rng.gumbel_noise(seed, index))


def compare_noise(device: str) -> tuple[int, float]:
    """Number of other bits patterns, and largest difference of the noise, between Triton and torch on `device`."""
    seeds = torch.tensor([0, 1, -1, 2**31, 2**40 + 12345, -(2**63)], device=device)
    bits = torch.empty(len(seeds), 1024, dtype=torch.int64, device=device)
    noise = torch.empty(len(seeds), 1024, dtype=torch.float32, device=device)
    noise_kernel[(len(seeds),)](seeds, bits, noise, COUNT=1024)
    index = torch.arange(1024, device=device)
    other = (bits != counter_rng.combine(seeds.unsqueeze(1), index)).sum().item()
    return int(other), (noise - counter_rng.gumbel(seeds.unsqueeze(1), index)).abs().max().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = {
        "attention": attention_errors(),
        "layouts": attention_layouts(),
        "head": head_errors(),
        "noise": compare_noise("cpu"),
    }
    json.dump(measured, sys.stdout)
