# SPDX-License-Identifier: Apache-2.0
"""Second half of the head's Triton kernels: what the tiles of a row have left becomes a token and its probability."""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NO_ID = tl.constexpr(2147483647)
_NEG_INF = tl.constexpr(float("-inf"))
_FINITE_MIN = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def merge_kernel(
    best,
    best_id,
    best_logit,
    peak,
    total,
    given_logit,
    token,
    confidence,
    probability,
    vocabulary,
    id_tiles,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: fold its tiles' numbers, BLOCK lanes at a time, then the lanes."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), _NEG_INF, tl.float32)
    top_id = tl.full((BLOCK,), _NO_ID, tl.int32)
    top_logit = tl.full((BLOCK,), _NEG_INF, tl.float32)
    largest = tl.full((BLOCK,), _FINITE_MIN, tl.float32)
    exponentials = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, id_tiles, BLOCK):
        place = row * id_tiles + start + lane
        inside = start + lane < id_tiles
        tile_top = tl.load(best + place, mask=inside, other=_NEG_INF)
        better = tile_top > top  # strict: an earlier tile has the lower ids
        top_id = tl.where(better, tl.load(best_id + place, mask=inside, other=_NO_ID), top_id)
        top_logit = tl.where(better, tl.load(best_logit + place, mask=inside, other=_NEG_INF), top_logit)
        top = tl.maximum(top, tile_top)
        tile_peak = tl.load(peak + place, mask=inside, other=_NEG_INF)
        tile_total = tl.load(total + place, mask=inside, other=0.0)
        new_largest = tl.maximum(largest, tile_peak)
        exponentials = exponentials * tl.exp(largest - new_largest) + tile_total * tl.exp(tile_peak - new_largest)
        largest = new_largest
    row_best = tl.max(top, 0)
    row_id = tl.min(tl.where(top == row_best, top_id, _NO_ID), 0)
    row_logit = tl.max(tl.where(top_id == row_id, top_logit, _NEG_INF), 0)
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(exponentials * tl.exp(largest - row_largest), 0)
    tl.store(token + row, tl.minimum(row_id, vocabulary - 1).to(tl.int64))  # without a candidate: still an id
    tl.store(confidence + row, tl.exp(row_logit - row_largest) / row_total)
    if GIVEN:
        tl.store(probability + row, tl.exp(tl.load(given_logit + row) - row_largest) / row_total)
