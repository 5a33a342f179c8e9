# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::row_attention` and `dllm::row_attention_scored`; imported only where Triton is.

An online-softmax kernel in the manner of flash attention: key blocks are streamed, scores stay in fp32 registers, a
row's maximum and sum are corrected as they grow. Key blocks that lie wholly inside a tile's range need no mask and are
pipelined; what is left over is one masked block after the loop. Keys outside a tile's range are never part of a
product, so a NaN in one sample cannot reach another.

Few tiles: several programs share a tile's keys, and the last to arrive merges their states in a fixed order, so that
runs are bit-equal.
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
from dllm_compile.kernels.online_softmax import describe_keys, merge_parts, stream_keys
from dllm_compile.kernels.row_attention_blocks import Blocks, Work, choose_blocks
from dllm_compile.kernels.row_attention_stream import stream_keys_behind
from dllm_compile.kernels.summed_query import Tracking, summed_query

_LOG2_E = 1.4426950408889634


def kernel_takes(q: Tensor) -> bool:
    """Whether the Triton kernel handles this dtype and head size (a power of two from 16 to 256)."""
    head_dim = q.shape[2]
    return q.dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in (16, 32, 64, 128, 256)


@triton.jit
def row_attention_kernel(
    q,
    k,
    v,
    k_blocks,
    v_blocks,
    tiles,
    out,
    maxima,
    sums,
    accs,
    arrived,
    window,
    spans,
    scores,
    rows_in_all,
    parts,
    samples,
    window_rows,
    score_row,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    scale,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    TRACKED: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BEHIND: tl.constexpr,
):
    """One head of one of the `parts` of a tile, and its share of the keys. Grid: (H, n * parts * SPLITS).

    `scale` includes log2(e). `k_blocks` and `v_blocks` are tensor descriptors with blocks [BLOCK_KEYS, HEAD_DIM] if
    DESCRIBED, else None. If SPLITS > 1, `maxima` and `sums` [SPLITS, R, H] and `accs` [SPLITS, R, H * HEAD_DIM] hold
    the states in between, and `arrived`, a counter for each part of a tile and head, is zero before and after. If
    TRACKED, a row of `scores` belongs to each head. If BEHIND, which excludes
    TRACKED, products with the values run beside the softmax.
    """
    head = tl.program_id(0)  # fastest, so that neighbouring programs read neighbouring pieces of the same key rows
    heads = tl.num_programs(0)
    kv_head = head // GROUPS
    split = tl.program_id(1) % SPLITS
    part = tl.program_id(1) // SPLITS
    tile = tiles + (part // parts) * 4
    first_row = tl.load(tile) + (part % parts) * BLOCK_ROWS
    end_row = tl.load(tile + 1)
    if first_row >= end_row:  # a part beyond the tile's last row, or of a spare tile: nothing is computed or counted
        return
    k_begin = tl.load(tile + 2)
    k_end = tl.load(tile + 3)
    dims = tl.arange(0, HEAD_DIM)
    q += head * q_head + dims[None, :]
    k_pointers = k + kv_head * k_head + dims[None, :]
    v_pointers = v + kv_head * v_head + dims[None, :]
    cache = (k_pointers, v_pointers, k_blocks, v_blocks, kv_head * HEAD_DIM, k_row, v_row)
    first_key, last_key = k_begin, k_end
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(k_end - k_begin, BLOCK_KEYS), SPLITS) * BLOCK_KEYS
        first_key = tl.minimum(k_begin + split * share, k_end)
        last_key = tl.minimum(first_key + share, k_end)

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    in_tile = rows < end_row
    query = tl.load(q + rows.to(tl.int64)[:, None] * q_row, mask=in_tile[:, None], other=0.0)
    probe, tracked, tracked_end = None, None, 0
    if TRACKED:
        probe, here = summed_query(
            q,
            window,
            spans,
            samples,
            window_rows,
            q_row,
            k_begin,
            first_row,
            tl.minimum(first_row + BLOCK_ROWS, end_row),
            HEAD_DIM,
            BLOCK_SAMPLES,
            WINDOW,
        )
        tracked = scores + head * score_row
        tracked_end = tl.where(here, k_end, 0)
    row_max = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
    if BEHIND:
        row_max, row_sum, acc = stream_keys_behind(
            query, cache, first_key, last_key, scale, (row_max, row_sum, acc), BLOCK_KEYS, STAGES, PRECISION, DESCRIBED
        )
    else:
        row_max, row_sum, acc = stream_keys(
            query,
            cache,
            first_key,
            last_key,
            scale,
            (row_max, row_sum, acc),
            BLOCK_KEYS,
            STAGES,
            PRECISION,
            DESCRIBED,
            TRACKED,
            probe,
            tracked,
            tracked_end,
        )
    is_last = True
    if SPLITS > 1:
        place = rows.to(tl.int64) * heads + head
        step = heads.to(tl.int64) * rows_in_all
        acc_pointers = accs + place[:, None] * HEAD_DIM + dims[None, :]
        tl.store(maxima + split * step + place, row_max, mask=in_tile)
        tl.store(sums + split * step + place, row_sum, mask=in_tile)
        tl.store(acc_pointers + split * step * HEAD_DIM, acc, mask=in_tile[:, None])
        tl.debug_barrier()  # all threads of this program have stored before it is counted
        counter = arrived + part * heads + head
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            row_sum, acc = merge_parts(
                maxima + place,
                sums + place,
                acc_pointers,
                step,
                step * HEAD_DIM,
                in_tile,
                SPLITS,
                BLOCK_ROWS,
                HEAD_DIM,
            )
            tl.store(counter, 0)
    if is_last:
        attended = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # no keys: 0 / 1
        out_pointers = out + rows.to(tl.int64)[:, None] * out_row + head * HEAD_DIM + dims[None, :]
        tl.store(out_pointers, attended.to(out.dtype.element_ty), mask=in_tile[:, None])


def plan_row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    tile_rows: int,
    out: Tensor,
    blocks: Blocks,
    tracking: Tracking | None = None,
    arrived: Tensor | None = None,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`row_attention_kernel[grid](...)`)."""
    (rows, heads, head_dim), kv_heads = q.shape, k.shape[1]
    k_blocks, v_blocks = describe_keys(k, v, blocks.keys)
    parts = -(-min(tile_rows, rows) // blocks.rows)
    grid = (heads, tiles.shape[0] * parts * blocks.splits)
    states: tuple[Tensor | None, ...] = (None, None, None, None)
    if blocks.splits > 1:
        numbers = torch.empty((2, blocks.splits, rows, heads), dtype=torch.float32, device=q.device)
        accs = torch.empty((blocks.splits, rows, heads, head_dim), dtype=torch.float32, device=q.device)
        counters = grid[0] * grid[1] // blocks.splits
        if arrived is None or arrived.shape[0] < counters:
            arrived = torch.zeros(counters, dtype=torch.int32, device=q.device)
        states = (numbers[0], numbers[1], accs, arrived)
    sizes = (rows, parts)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0))
    tracked = (0, 0, 0) if tracking is None else (*tracking.window.shape, tracking.scores.stride(0))
    arguments = (
        *(q, k, v, k_blocks, v_blocks, tiles, out, *states),
        *(tracking or (None, None, None)),
        *(*sizes, *tracked, *strides, _LOG2_E / math.sqrt(head_dim)),
    )
    constants = {
        "GROUPS": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "STAGES": blocks.stages,
        "SPLITS": blocks.splits,
        "TRACKED": tracking is not None,
        "BLOCK_SAMPLES": 1 if tracking is None else max(16, triton.next_power_of_2(tracked[0])),
        "WINDOW": 1 if tracking is None else triton.next_power_of_2(tracked[1]),
        "PRECISION": "ieee",  # of fp32 operands; 16-bit products are exact in any case
        "DESCRIBED": k_blocks is not None,
        "BEHIND": blocks.rows >= 64 and tracking is None,
        "num_warps": blocks.warps,
    }
    return grid, arguments, constants


def row_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    tile_rows: int,
    blocks: Blocks | None = None,
    *,
    tracking: Tracking | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        q, k, v, tiles, tile_rows: as in `row_attention_reference`, with `kernel_takes(q)`; no tile has more than
            `tile_rows` rows.
        blocks: launch configuration; chosen by shape if None.
        tracking: what `row_attention_scored` adds to, with `kernel_tracks(...)`.
        arrived: contiguous int32 zeros, which are zeros again afterwards; made here if None or too few.

    Returns:
        [R, H * hd], q's dtype, contiguous. Rows in no tile are not written.
    """
    rows, heads, head_dim = q.shape
    out = q.new_empty((rows, heads * head_dim))
    if rows == 0 or tiles.shape[0] == 0:
        return out
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    if blocks is None:
        work = Work(rows, tiles.shape[0], tile_rows, heads, k.shape[0])
        blocks = choose_blocks(q.dtype, head_dim, work, _launch.processors(q.device))
    if tracking is not None:
        window, spans, scores = tracking
        tracking = Tracking(window.contiguous(), spans.contiguous(), scores)
    plan = plan_row_attention(q, k, v, tiles.contiguous(), tile_rows, out, blocks, tracking, arrived)
    grid, arguments, constants = plan
    row_attention_kernel[grid](*arguments, **constants)
    return out
