# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::verify_attention`; imported only where Triton is.

Flash attention in two parts, with one running maximum and sum: the keys of the cache, of which hidden ones count
nothing, and one block of the tile's own keys under the small mask. Few samples do not fill the device with a program a
head, so several programs share the keys of a head, and the last to arrive merges their states in a fixed order.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_compile.kernels import _launch
from dllm_compile.kernels.online_softmax import describe_keys, fold, merge_parts, stream_keys
from dllm_compile.kernels.row_attention_blocks import Blocks

_LOG2_E = 1.4426950408889634
_LONGEST_TILE = 128
_NEG_INF = tl.constexpr(float("-inf"))
# Where a row's maximum begins: finite, since all keys of a block may be hidden.
_LOWEST = tl.constexpr(-3.0e38)


def kernel_takes(q: Tensor, tile_rows: int) -> bool:
    """Whether the Triton kernel handles this dtype, head size (a power of two from 16 to 256) and tile height."""
    # Tall tiles of wide fp32 heads take more shared memory than there is.
    longest = _LONGEST_TILE // 2 if q.dtype == torch.float32 and q.shape[2] > 128 else _LONGEST_TILE
    fits = q.shape[2] in (16, 32, 64, 128, 256) and tile_rows <= longest
    return fits and q.dtype in (torch.bfloat16, torch.float16, torch.float32)


def choose_verify_blocks(dtype: torch.dtype, head_dim: int, tile_rows: int, programs: int, processors: int) -> Blocks:
    """Launch configuration by shape, from measurements of 16-bit heads of 128 (32 rows, 1,280 keys) on an H200.

    Args:
        dtype: of q, k, v.
        head_dim: size of a head.
        tile_rows: largest number of rows in a tile.
        programs: tiles times heads.
        processors: multiprocessors of the device.
    """
    rows = max(16, 1 << (tile_rows - 1).bit_length())
    splits = max(1, min(4 if rows <= 64 else 2, processors // programs))  # merging takes registers, of tall tiles most
    if dtype == torch.float32:
        # True fp32 products run outside the tensor cores, on operands held in registers: larger blocks spill.
        return Blocks(rows, 32 if head_dim <= 128 and rows <= 64 else 16, 2, 8, splits)
    if head_dim > 128:
        return Blocks(rows, 32, 2, 8, splits)
    return Blocks(rows, 64, 3, 4 if rows <= 64 else 8, splits)


@triton.jit
def verify_attention_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    k_blocks,
    v_blocks,
    tiles,
    views,
    hidden,
    out,
    maxima,
    sums,
    accs,
    arrived,
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
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One share of the keys of one head of one tile. Grid: (H, n, SPLITS); `scale` includes log2(e).

    `k_blocks` and `v_blocks` are tensor descriptors of the caches with blocks [BLOCK_KEYS, HEAD_DIM] if DESCRIBED, else
    None.

    If SPLITS > 1, `maxima` and `sums` [SPLITS, R, H] and `accs` [SPLITS, R, H * HEAD_DIM] hold the states in between,
    and `arrived`, a counter for each tile and head, is zero before and after; else they are None.
    """
    head = tl.program_id(0)  # fastest, so that neighbouring programs read neighbouring pieces of the same key rows
    split = tl.program_id(2)
    heads = tl.num_programs(0)
    kv_head = head // GROUPS
    tile = tiles + tl.program_id(1) * 4
    first_row = tl.load(tile)
    end_row = tl.load(tile + 1)
    if first_row >= end_row:
        return
    k_begin = tl.load(tile + 2)
    k_end = tl.load(tile + 3)

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    in_tile = rows < end_row
    wide = rows.to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    query = tl.load(q + wide[:, None] * q_row + head * q_head + dims[None, :], mask=in_tile[:, None], other=0.0)
    depth = tl.load(views + wide * 3, mask=in_tile, other=-1)

    row_max = tl.full((BLOCK_ROWS,), _LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)

    share = tl.cdiv(tl.cdiv(tl.maximum(k_end - k_begin, 0), BLOCK_KEYS), SPLITS) * BLOCK_KEYS
    begin = k_begin + split * share
    k_pointers = k_cache + kv_head * k_cache_head + dims[None, :]
    v_pointers = v_cache + kv_head * v_cache_head + dims[None, :]
    cache = (k_pointers, v_pointers, k_blocks, v_blocks, kv_head * HEAD_DIM, k_cache_row, v_cache_row)
    row_max, row_sum, acc = stream_keys(
        query,
        cache,
        begin,
        tl.minimum(begin + share, k_end),
        scale,
        (row_max, row_sum, acc),
        BLOCK_KEYS,
        STAGES,
        PRECISION,
        DESCRIBED,
        HIDDEN=True,
        hidden=hidden,
    )

    if split == SPLITS - 1:
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
        row_max, row_sum, acc = fold(scores, values, row_max, row_sum, acc, PRECISION)

    place = wide * heads + head  # of a row's head among the results
    pointers = place[:, None] * HEAD_DIM + dims[None, :]
    if SPLITS > 1:
        step = rows_in_all.to(tl.int64) * heads
        tl.store(maxima + split * step + place, row_max, mask=in_tile)
        tl.store(sums + split * step + place, row_sum, mask=in_tile)
        tl.store(accs + split * step * HEAD_DIM + pointers, acc, mask=in_tile[:, None])
        tl.debug_barrier()  # all threads of this program have stored before it is counted
        counter = arrived + tl.program_id(1) * heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            row_sum, acc = merge_parts(
                maxima + place,
                sums + place,
                accs + pointers,
                step,
                step * HEAD_DIM,
                in_tile,
                SPLITS,
                BLOCK_ROWS,
                HEAD_DIM,
            )
            _store(out + pointers, acc, row_sum, depth, in_tile)
            tl.store(counter, 0)
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
    arrived: Tensor | None = None,
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`verify_attention_kernel[grid](...)`)."""
    rows, heads, head_dim = q.shape
    states: tuple[Tensor | None, ...] = (None,) * 4
    if blocks.splits > 1:
        numbers = torch.empty((2, blocks.splits, rows, heads), dtype=torch.float32, device=q.device)
        accs = torch.empty((blocks.splits, rows, heads, head_dim), dtype=torch.float32, device=q.device)
        counters = heads * tiles.shape[0]
        if arrived is None or arrived.shape[0] < counters:
            arrived = torch.zeros(counters, dtype=torch.int32, device=q.device)
        states = (numbers[0], numbers[1], accs, arrived)
    strides = [stride for x in (q, k, v, k_cache, v_cache) for stride in x.stride()[:2]]
    k_blocks, v_blocks = describe_keys(k_cache, v_cache, blocks.keys)
    caches = (k_cache, v_cache, k_blocks, v_blocks)
    tensors = (q, k, v, *caches, tiles, views, hidden.view(torch.uint8), out, *states)
    constants = {
        "GROUPS": heads // k.shape[1],
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "SPLITS": blocks.splits,
        "STAGES": blocks.stages,
        "PRECISION": "ieee",  # of fp32 operands; 16-bit products are exact in any case
        "DESCRIBED": k_blocks is not None,
        "num_warps": blocks.warps,
    }
    return (heads, tiles.shape[0], blocks.splits), (*tensors, rows, *strides, _LOG2_E / math.sqrt(head_dim)), constants


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
    *,
    arrived: Tensor | None = None,
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        q, k, v, k_cache, v_cache, tiles, views, hidden, tile_rows: as in `verify_attention_reference`, with
            `kernel_takes(q, tile_rows)`; no tile has more than `tile_rows` rows.
        blocks: launch configuration; chosen by shape if None.
        arrived: contiguous int32 zeros, which are zeros again afterwards; made here if None or too few.

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
        programs = heads * tiles.shape[0]
        blocks = choose_verify_blocks(q.dtype, head_dim, tile_rows, programs, _launch.processors(q.device))
    plan = plan_verify_attention(q, k, v, k_cache, v_cache, tiles, views, hidden, out, blocks, arrived)
    grid, arguments, constants = plan
    verify_attention_kernel[grid](*arguments, **constants)
    return out
