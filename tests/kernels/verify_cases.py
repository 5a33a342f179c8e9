# SPDX-License-Identifier: Apache-2.0
"""Inputs and the fp64 definition of `verify_attention`: kinds and ranks of rows, written as section 11.2's table."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# One sample: context rows, candidates, padding rows, cached keys, hidden ones among them.
Sample = tuple[int, int, int, int, int]


class VerifyCase(NamedTuple):
    """Arguments of `verify_attention` but the tile height, and what they stand for."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tiles: Tensor
    views: Tensor
    hidden: Tensor
    kinds: list[tuple[str, int]]
    """What each row is: ("context" | "draft" | "mask" | "padding", rank)."""

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What the operator takes in front of the tile height."""
        return tuple(self[:-1])


def sees(row: tuple[str, int], key: tuple[str, int]) -> bool:
    """The table of section 11.2, entry by entry."""
    (row_kind, i), (key_kind, j) = row, key
    if "padding" in (row_kind, key_kind):
        return False
    if key_kind == "context":
        return True
    if row_kind == "context":
        return key_kind == "mask"
    if row_kind == "draft":
        return j <= i if key_kind == "draft" else j > i
    return j < i if key_kind == "draft" else j >= i


def verify_case(
    samples: list[Sample],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gap: int = 3,
) -> VerifyCase:
    """Samples end to end; their cached keys too, `gap` rows between them that belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    kinds: list[tuple[str, int]] = []
    views: list[tuple[int, int, int]] = []
    tiles: list[tuple[int, int, int, int]] = []
    hidden: list[Tensor] = []
    key = 0
    for context, candidates, padding, keys, hides in samples:
        first = len(kinds)
        top = candidates + 1
        kinds += [("context", 0)] * context + [("padding", 0)] * padding
        views += [(0, 0, top)] * context + [(-1, 0, 0)] * padding
        kinds += [("draft", j) for j in range(candidates)] + [("mask", j) for j in range(candidates)]
        views += [(j + 1, j + 1, top) for j in range(candidates)] + [(j, 0, j + 1) for j in range(candidates)]
        tiles.append((first, len(kinds), key, key + keys))
        flags = torch.zeros(keys + gap, dtype=torch.bool)
        flags[torch.randperm(keys, generator=generator)[:hides]] = True
        hidden.append(flags)
        key += keys + gap
    rows, width, kv_width = len(kinds), heads * head_dim, kv_heads * head_dim
    packed = torch.randn(rows, width + 2 * kv_width, generator=generator).to(dtype)
    q, k, v = packed.split([width, kv_width, kv_width], 1)
    k_cache, v_cache = torch.randn(2, key, kv_heads, head_dim, generator=generator).to(dtype)
    return VerifyCase(
        q.unflatten(1, (heads, head_dim)),
        k.unflatten(1, (kv_heads, head_dim)),
        v.unflatten(1, (kv_heads, head_dim)),
        k_cache,
        v_cache,
        torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4),
        torch.tensor(views, dtype=torch.int32).reshape(-1, 3),
        torch.cat(hidden) if hidden else torch.zeros(0, dtype=torch.bool),
        kinds,
    )


def dense_verify(case: VerifyCase) -> Tensor:
    """A row, a head and a key at a time, in fp64."""
    rows, heads, head_dim = case.q.shape
    groups = heads // case.k.shape[1]
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64, device=case.q.device)
    hidden = case.hidden.tolist()
    for q_begin, q_end, k_begin, k_end in case.tiles.tolist():
        for row in range(q_begin, q_end):
            if case.kinds[row][0] == "padding":
                continue
            old = [key for key in range(k_begin, k_end) if not hidden[key]]
            new = [key for key in range(q_begin, q_end) if sees(case.kinds[row], case.kinds[key])]
            keys = torch.cat((case.k_cache[old], case.k[new])).double().repeat_interleave(groups, 1)
            values = torch.cat((case.v_cache[old], case.v[new])).double().repeat_interleave(groups, 1)
            scores = torch.einsum("hd,khd->hk", case.q[row].double(), keys) / math.sqrt(head_dim)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out.flatten(1)
