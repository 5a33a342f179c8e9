# SPDX-License-Identifier: Apache-2.0
"""Inputs and fp64 definitions for the kernels of the caches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllm_compile.runtime.block_tiles import block_tile_table

Sample = tuple[int, int, int]  # rows, first and end row of the block within the sample


def block_tiles(samples: list[Sample], tile_rows: int | None) -> Tensor:
    """Tile table of samples laid end to end, with the empty tiles the builder leaves."""
    lengths = torch.tensor([sample[0] for sample in samples])
    start = lengths.cumsum(0) - lengths
    block = start[:, None] + torch.tensor([sample[1:] for sample in samples])
    return block_tile_table(start, lengths, block, tile_rows, int(lengths.max()))


def empty_state(rows: int, heads: int, head_dim: int, fill: float = torch.nan) -> tuple[Tensor, Tensor, Tensor]:
    """A state nobody wrote; NaN by default, so that a forgotten or a wrong read shows."""
    return torch.full((rows, heads), fill), torch.full((rows, heads), fill), torch.full((rows, heads, head_dim), fill)


def outside_rows(samples: list[Sample]) -> Tensor:
    """Whether a row lies outside its sample's block, (R,)."""
    parts = [(torch.arange(rows) < begin) | (torch.arange(rows) >= end) for rows, begin, end in samples]
    return torch.cat(parts)


def dense_state(q: Tensor, k: Tensor, v: Tensor, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """m, den, num over the keys outside the block in fp64, for every row (rows inside the block too)."""
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    m, den, num = (x.to(q.device).double() for x in empty_state(rows, heads, head_dim))
    start = 0
    for length, begin, end in samples:
        sample = slice(start, start + length)
        keys = torch.tensor([j for j in range(start, start + length) if not start + begin <= j < start + end])
        keys = keys.to(q.device, torch.int64)
        for head in range(heads):
            query = q[sample, head].double() / math.sqrt(head_dim)
            key, value = (x[keys, head // groups].double() for x in (k, v))
            scores = query @ key.T
            m[sample, head] = scores.amax(1) if len(keys) else -torch.inf
            weights = torch.exp(scores - m[sample, head][:, None])
            den[sample, head] = weights.sum(1)
            num[sample, head] = weights @ value
        start += length
    return m, den, num


def dense_scores(q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [K] in fp64 by the definition (a product a row, a head and a key), and the sum of their magnitudes."""
    heads, groups = q.shape[1], q.shape[1] // k_cache.shape[1]
    scores, magnitude = torch.zeros(2, k_cache.shape[0], dtype=torch.float64, device=q.device)
    key = k_cache.double().repeat_interleave(groups, dim=1)
    for rows, (begin, end) in zip(window.tolist(), spans.tolist(), strict=True):
        for row in rows:
            if row >= 0:
                for head in range(heads):
                    products = key[begin:end, head] * q[row, head].double()
                    scores[begin:end] += products.sum(1)
                    magnitude[begin:end] += products.abs().sum(1)
    return scores, magnitude


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim], fp32, the half table twice."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)


def rope_write_inputs(
    rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """Arguments of `qkv_rope_cache_write`: qkv is a column slice, the caches hold 7 and have rows nobody names."""
    generator = torch.Generator().manual_seed(seed)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(rows, width + 16, generator=generator).to(dtype)[:, 8 : 8 + width]
    cos, sin = rope_tables(3 * rows + 5, head_dim)
    positions = torch.randint(0, 3 * rows + 5, (rows,), generator=generator)
    cache_rows = torch.randperm(2 * rows + 3, generator=generator)[:rows]
    caches = (torch.full((2 * rows + 3, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2))
    return qkv, cos, sin, positions, cache_rows, *caches, heads, kv_heads
