# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::verify_attention`; imported only where Triton is.

Flash attention in two parts, with one running maximum and sum: the keys of the cache, of which hidden ones count
nothing, and one block of the tile's own keys under the small mask. Few samples do not fill the device with a program a
head, so the keys of a head are cut among several; the last of them to finish merges what all have left, in a fixed
order.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_compile.kernels import _launch

_LOG2_E = 1.4426950408889634
_LONGEST_TILE = 128
_NEG_INF = tl.constexpr(float("-inf"))
# Where a row's maximum begins: finite, since all keys of a block may be hidden.
_LOWEST = tl.constexpr(-3.0e38)


def kernel_takes(q: Tensor, tile_rows: int) -> bool:
    """Whether the Triton kernel handles this dtype, head size (a power of two from 16 to 256) and tile height."""
    fits = q.shape[2] in (16, 32, 64, 128, 256) and tile_rows <= _LONGEST_TILE
    return fits and q.dtype in (torch.bfloat16, torch.float16, torch.float32)


class Blocks(NamedTuple):
    """Launch configuration: rows of a tile, keys held at once, parts a head's keys are cut into, stages, warps."""

    rows: int
    keys: int
    parts: int
    stages: int
    warps: int


def choose_blocks(dtype: torch.dtype, head_dim: int, tile_rows: int, programs: int, processors: int) -> Blocks:
    """Launch configuration by shape, from what attention of 32 rows over 1,280 keys likes best on an H200.

    Args:
        dtype: of q, k, v.
        head_dim: size of a head.
        tile_rows: largest number of rows in a tile.
        programs: tiles times heads.
        processors: multiprocessors of the device.
    """
    rows = max(16, 1 << (tile_rows - 1).bit_length())
    parts = max(1, min(4 if rows <= 64 else 2, processors // programs))  # merging takes registers, of tall tiles most
    if dtype == torch.float32:
        # True fp32 products run outside the tensor cores, on operands held in registers: larger blocks spill.
        return Blocks(rows, 32 if head_dim <= 128 and rows <= 64 else 16, parts, 2, 8)
    if head_dim > 128:
        return Blocks(rows, 32, parts, 2, 8)
    few = rows <= 32 or (rows <= 64 and parts == 1)
    return Blocks(rows, 64, parts, 3, 4 if few else 8)


@triton.jit
def _fold(scores, values, row_max, row_sum, acc, PRECISION: tl.constexpr):
    """Fold one block of scores (fp32, in units of log2, -inf where not seen) and its values into the running state."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = acc * correction[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit
def verify_attention_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    tiles,
    views,
    hidden,
    out,
    part_acc,
    part_max,
    part_sum,
    finished,
    rows_in_all,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    k_cache_row,
    k_cache_head,
    v_cache_row,
    v_cache_head,
    scale,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of the keys of one head of one tile. Grid: (H, n, PARTS); `scale` includes log2(e).

    With several parts: `part_acc` [PARTS, R, H, hd], `part_max` and `part_sum` [PARTS, R, H] fp32, `finished` [n, H]
    zeros; with one they are None.
    """
    head = tl.program_id(0)  # fastest, so that neighbouring programs read neighbouring pieces of the same key rows
    part = tl.program_id(2)
    heads = tl.num_programs(0)
    kv_head = head // GROUPS
    tile = tiles + tl.program_id(1) * 4
    first_row = tl.load(tile)
    end_row = tl.load(tile + 1)
    k_begin = tl.load(tile + 2)
    k_end = tl.where(first_row < end_row, tl.load(tile + 3), k_begin)

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    in_tile = rows < end_row
    wide = rows.to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    query = tl.load(q + wide[:, None] * q_row + head * q_head + dims[None, :], mask=in_tile[:, None], other=0.0)
    depth = tl.load(views + wide * 3, mask=in_tile, other=-1)

    row_max = tl.full((BLOCK_ROWS,), _LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)

    share = tl.cdiv(tl.cdiv(tl.maximum(k_end - k_begin, 0), BLOCK_KEYS), PARTS) * BLOCK_KEYS
    begin = k_begin + part * share
    end = tl.minimum(begin + share, k_end)
    block_keys = tl.arange(0, BLOCK_KEYS)
    k_pointers = k_cache + kv_head * k_cache_head + dims[None, :]
    v_pointers = v_cache + kv_head * v_cache_head + dims[None, :]
    for start in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        key_rows = start + block_keys
        in_range = key_rows < end
        key_wide = key_rows.to(tl.int64)[:, None]
        keys = tl.load(k_pointers + key_wide * k_cache_row, mask=in_range[:, None], other=0.0)
        seen = tl.load(hidden + key_rows, mask=in_range, other=1) == 0
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, _NEG_INF)
        values = tl.load(v_pointers + key_wide * v_cache_row, mask=in_range[:, None], other=0.0)
        row_max, row_sum, acc = _fold(scores, values, row_max, row_sum, acc, PRECISION)

    if part == PARTS - 1:
        # The tile's own keys: who sees whom depends on depths alone.
        own_k = k + wide[:, None] * k_row + kv_head * k_head + dims[None, :]
        own_v = v + wide[:, None] * v_row + kv_head * v_head + dims[None, :]
        from_depth = tl.load(views + wide * 3 + 1, mask=in_tile, other=0)
        until_depth = tl.load(views + wide * 3 + 2, mask=in_tile, other=0)
        own_seen = (from_depth[None, :] <= depth[:, None]) & (depth[:, None] < until_depth[None, :])
        keys = tl.load(own_k, mask=in_tile[:, None], other=0.0)
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
        scores = tl.where(own_seen, scores, _NEG_INF)
        values = tl.load(own_v, mask=in_tile[:, None], other=0.0)
        row_max, row_sum, acc = _fold(scores, values, row_max, row_sum, acc, PRECISION)

    place = wide * heads + head  # of a row's head among the results
    pointers = place[:, None] * HEAD_DIM + dims[None, :]
    if PARTS > 1:
        layer = rows_in_all.to(tl.int64) * heads
        tl.store(part_acc + part * layer * HEAD_DIM + pointers, acc, mask=in_tile[:, None])
        tl.store(part_max + part * layer + place, row_max, mask=in_tile)
        tl.store(part_sum + part * layer + place, row_sum, mask=in_tile)
        tl.debug_barrier()  # all threads have stored before one of them says so
        before = tl.atomic_add(finished + tl.program_id(1) * heads + head, 1, sem="acq_rel")
        if before == PARTS - 1:
            row_max = tl.full((BLOCK_ROWS,), _LOWEST, tl.float32)
            for other in tl.static_range(PARTS):
                left = tl.load(part_max + other * layer + place, mask=in_tile, other=_LOWEST, cache_modifier=".cg")
                row_max = tl.maximum(row_max, left)
            row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
            acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
            for other in tl.static_range(PARTS):
                left = tl.load(part_max + other * layer + place, mask=in_tile, other=_LOWEST, cache_modifier=".cg")
                weight = tl.exp2(left - row_max)
                left_sum = tl.load(part_sum + other * layer + place, mask=in_tile, other=0.0, cache_modifier=".cg")
                left_acc = tl.load(
                    part_acc + other * layer * HEAD_DIM + pointers,
                    mask=in_tile[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                row_sum += weight * left_sum
                acc += weight[:, None] * left_acc
            _store(out + pointers, acc, row_sum, depth, in_tile)
    else:
        _store(out + pointers, acc, row_sum, depth, in_tile)


@triton.jit
def _store(pointers, acc, row_sum, depth, in_tile):
    """Divide and store; rows of negative depth have seen nothing."""
    attended = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    attended = tl.where((depth >= 0)[:, None], attended, 0.0)
    tl.store(pointers, attended.to(pointers.dtype.element_ty), mask=in_tile[:, None])


def plan_verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    out: Tensor,
    blocks: Blocks,
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`verify_attention_kernel[grid](...)`)."""
    rows, heads, head_dim = q.shape
    left: tuple[Tensor | None, ...] = (None,) * 4
    if blocks.parts > 1:
        acc = torch.empty((blocks.parts, rows, heads, head_dim), dtype=torch.float32, device=q.device)
        largest, total = torch.empty((2, blocks.parts, rows, heads), dtype=torch.float32, device=q.device)
        finished = torch.zeros((tiles.shape[0], heads), dtype=torch.int32, device=q.device)
        left = (acc, largest, total, finished)
    strides = [stride for x in (q, k, v, k_cache, v_cache) for stride in x.stride()[:2]]
    tensors = (q, k, v, k_cache, v_cache, tiles, views, hidden.view(torch.uint8), out, *left)
    constants = {
        "GROUPS": heads // k.shape[1],
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "PARTS": blocks.parts,
        "STAGES": blocks.stages,
        "PRECISION": "ieee",  # of fp32 operands; 16-bit products are exact in any case
        "num_warps": blocks.warps,
    }
    return (heads, tiles.shape[0], blocks.parts), (*tensors, rows, *strides, _LOG2_E / math.sqrt(head_dim)), constants


def verify_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    tile_rows: int,
    blocks: Blocks | None = None,
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        q, k, v, k_cache, v_cache, tiles, views, hidden, tile_rows: as in `verify_attention_reference`, with
            `kernel_takes(q, tile_rows)`; no tile has more than `tile_rows` rows.
        blocks: launch configuration; chosen by shape if None.

    Returns:
        [R, H * hd], q's dtype, contiguous. Rows in no tile are not written.
    """
    rows, heads, head_dim = q.shape
    out = q.new_empty((rows, heads * head_dim))
    if rows == 0 or tiles.shape[0] == 0:
        return out
    q, k, v, k_cache, v_cache = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v, k_cache, v_cache))
    tiles, views, hidden = (x.contiguous() for x in (tiles, views, hidden))
    if blocks is None:
        blocks = choose_blocks(q.dtype, head_dim, tile_rows, heads * tiles.shape[0], _launch.processors(q.device))
    grid, arguments, constants = plan_verify_attention(q, k, v, k_cache, v_cache, tiles, views, hidden, out, blocks)
    verify_attention_kernel[grid](*arguments, **constants)
    return out
