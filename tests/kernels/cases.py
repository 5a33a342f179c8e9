# SPDX-License-Identifier: Apache-2.0
"""Inputs and dense fp64 definitions that the kernel tests share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllm_compile.kernels import counter_rng


def tiles_of(samples: list[tuple[int, int]], tile_rows: int, pad: int = 0) -> Tensor:
    """Tile table of samples given as (rows, keys), both laid end to end, then `pad` rows that see nothing."""
    table: list[tuple[int, int, int, int]] = []
    q_begin = k_begin = 0
    for rows, keys in samples:
        q_end, k_end = q_begin + rows, k_begin + keys
        table.extend((q, min(q + tile_rows, q_end), k_begin, k_end) for q in range(q_begin, q_end, tile_rows))
        q_begin, k_begin = q_end, k_end
    q_end = q_begin + pad
    table.extend((q, min(q + tile_rows, q_end), 0, 0) for q in range(q_begin, q_end, tile_rows))
    return torch.tensor(table, dtype=torch.int32).reshape(-1, 4)


def packed_heads(
    rows: int, keys: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as a packed projection leaves them: column slices of one matrix (of two, where keys are not rows)."""
    generator = torch.Generator().manual_seed(seed)
    width, kv_width = heads * head_dim, kv_heads * head_dim
    packed = torch.randn(rows, width + 2 * kv_width, generator=generator).to(dtype)
    cache = packed if keys == rows else torch.randn(keys, width + 2 * kv_width, generator=generator).to(dtype)
    q = packed[:, :width].unflatten(1, (heads, head_dim))
    k = cache[:, width : width + kv_width].unflatten(1, (kv_heads, head_dim))
    v = cache[:, width + kv_width :].unflatten(1, (kv_heads, head_dim))
    return q, k, v


def dense_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor) -> Tensor:
    """The definition in fp64: softmax(q k / sqrt(hd)) v, a head and a tile at a time."""
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64, device=q.device)
    for q_begin, q_end, k_begin, k_end in tiles.tolist():
        if k_end > k_begin and q_end > q_begin:
            for head in range(heads):
                query = q[q_begin:q_end, head].double()
                key, value = (x[k_begin:k_end, head // groups].double() for x in (k, v))
                out[q_begin:q_end, head] = torch.softmax(query @ key.T / math.sqrt(head_dim), 1) @ value
    return out.flatten(1)


def dense_head(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, confidence, candidates (W, V) and probabilities (W, V), in fp64 after the roundings of x's dtype."""
    z = (x.double() @ weight.double().T).to(x.dtype)
    z = (z if scale == 1.0 else z * scale).double()
    z[:, banned[banned >= 0]] = -math.inf
    candidates = z.clone()
    if seeds is not None and temperature is not None:
        ids = torch.arange(weight.shape[0], device=x.device)
        candidates += temperature.double() * counter_rng.gumbel(seeds.unsqueeze(1), ids).double()
    if mask_id >= 0:
        candidates[:, mask_id] = -math.inf
    token = candidates.argmax(1)
    probabilities = torch.softmax(z, 1)
    return token, probabilities.gather(1, token.unsqueeze(1)).squeeze(1), candidates, probabilities


def exact_head(rows: int, vocabulary: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x and weight whose products and sums are exact in fp32 in any order, so that logits are equal everywhere.

    Few values, hence many ties, and every row has its best token twice.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, width), generator=generator).to(dtype)
    weight = (torch.randint(-3, 4, (vocabulary, width), generator=generator) / 8).to(dtype)
    weight[vocabulary // 2 :] = weight[: vocabulary - vocabulary // 2].clone()
    return x, weight
