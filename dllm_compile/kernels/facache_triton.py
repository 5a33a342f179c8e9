# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::facache_first` and `dllm::facache_step`; imported only where Triton is.

One kernel serves both. The difference is where a row outside the block starts: `first` streams the keys outside the
block and stores the state on the way, `step` loads that state; both then stream the block's keys. A row inside the
block streams its sample's keys in one go. Scores are kept in units of log2; the stored maximum is in natural units.
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

from dllm_compile.kernels.online_softmax import describe_keys, stream_keys
from dllm_compile.kernels.row_attention_blocks import Blocks, blocks_of
from dllm_compile.kernels.row_attention_triton import kernel_takes

__all__ = ["choose_facache_blocks", "facache_kernel", "facache_triton", "kernel_takes", "plan_facache"]

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def facache_kernel(
    q,
    k,
    v,
    k_blocks,
    v_blocks,
    m,
    den,
    num,
    tiles,
    out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    heads,
    scale,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    STEP: tl.constexpr,
):
    """One head of (a part of) one tile. Grid: (H, n, parts); `scale` includes log2(e).

    `m`, `den`, `num` and `out` are contiguous. `k_blocks` and `v_blocks` are tensor descriptors with blocks
    [BLOCK_KEYS, HEAD_DIM] if DESCRIBED, else None.
    """
    head = tl.program_id(0)  # fastest, so that neighbouring programs read neighbouring pieces of the same key rows
    kv_head = head // GROUPS
    tile = tiles + tl.program_id(1) * 6
    tile_row = tl.load(tile)
    end_row = tl.load(tile + 1)
    k_begin = tl.load(tile + 2)
    k_end = tl.load(tile + 3)
    block_begin = tl.load(tile + 4)
    block_end = tl.load(tile + 5)
    first_row = tile_row + tl.program_id(2) * BLOCK_ROWS
    inside = (tile_row >= block_begin) & (tile_row < block_end)
    outside = (tile_row < block_begin) | (tile_row >= block_end)
    # A part beyond the tile's last row sees no keys and stores nothing.
    exists = first_row < end_row

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    in_tile = rows < end_row
    kept = in_tile & outside
    query = tl.load(
        q + rows.to(tl.int64)[:, None] * q_row + head * q_head + dims[None, :], mask=in_tile[:, None], other=0.0
    )
    k_pointers = k + kv_head * k_head + dims[None, :]
    v_pointers = v + kv_head * v_head + dims[None, :]
    place = rows.to(tl.int64) * heads + head
    num_pointers = num + place[:, None] * HEAD_DIM + dims[None, :]
    cache = (k_pointers, v_pointers, k_blocks, v_blocks, kv_head * HEAD_DIM, k_row, v_row)

    if STEP:
        row_max = tl.load(m + place, mask=kept, other=-float("inf")) * _LOG2_E
        row_sum = tl.load(den + place, mask=kept, other=0.0)
        acc = tl.load(num_pointers, mask=kept[:, None], other=0.0)
    else:
        row_max = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
        acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
        # Keys before, then behind the block. For rows inside it both are empty.
        before_end = tl.where(exists & outside, block_begin, k_begin)
        row_max, row_sum, acc = stream_keys(
            query, cache, k_begin, before_end, scale, (row_max, row_sum, acc), BLOCK_KEYS, STAGES, PRECISION, DESCRIBED
        )
        behind_end = tl.where(exists & outside, k_end, block_end)
        row_max, row_sum, acc = stream_keys(
            query,
            cache,
            block_end,
            behind_end,
            scale,
            (row_max, row_sum, acc),
            BLOCK_KEYS,
            STAGES,
            PRECISION,
            DESCRIBED,
        )
        tl.store(m + place, row_max * _LN_2, mask=kept)
        tl.store(den + place, row_sum, mask=kept)
        tl.store(num_pointers, acc, mask=kept[:, None])

    rest_begin = tl.where(inside, k_begin, block_begin)
    rest_end = tl.where(exists, tl.where(inside, k_end, block_end), rest_begin)
    row_max, row_sum, acc = stream_keys(
        query, cache, rest_begin, rest_end, scale, (row_max, row_sum, acc), BLOCK_KEYS, STAGES, PRECISION, DESCRIBED
    )
    attended = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # no keys: 0 / 1
    out_pointers = out + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_pointers, attended.to(out.dtype.element_ty), mask=in_tile[:, None])


def choose_facache_blocks(dtype: torch.dtype, head_dim: int, tile_rows: int) -> Blocks:
    """Launch configuration by shape: that of row attention with many programs, within what the registers hold.

    The three ranges of `first` keep more alive than row attention does: with 128 keys, or heads of 256 on four warps,
    it spills. In `step` most programs read a short block and a state of 4 bytes a number, so what counts is how many
    of them share a multiprocessor, and 64 rows are as many as pay.
    """
    blocks = blocks_of(dtype, head_dim, min(tile_rows, 64))
    return blocks._replace(keys=min(blocks.keys, 64), warps=8 if head_dim > 128 else blocks.warps)


def plan_facache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    tiles: Tensor,
    tile_rows: int,
    out: Tensor,
    blocks: Blocks,
    step: bool,
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`facache_kernel[grid](...)`)."""
    (_, heads, head_dim), kv_heads = q.shape, k.shape[1]
    k_blocks, v_blocks = describe_keys(k, v, blocks.keys)
    grid = (heads, tiles.shape[0], -(-tile_rows // blocks.rows))
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    scale = _LOG2_E.value / math.sqrt(head_dim)
    arguments = (q, k, v, k_blocks, v_blocks, *state, tiles, out, *strides, heads, scale)
    constants = {
        "GROUPS": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "STAGES": blocks.stages,
        "PRECISION": "ieee",  # of fp32 operands; 16-bit products are exact in any case
        "DESCRIBED": k_blocks is not None,
        "STEP": step,
        "num_warps": blocks.warps,
    }
    return grid, arguments, constants


def facache_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor,
    den: Tensor,
    num: Tensor,
    tiles: Tensor,
    tile_rows: int,
    step: bool,
    blocks: Blocks | None = None,
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        q, k, v, tiles, tile_rows: as in `facache_first_reference`, with `kernel_takes(q)`; no tile has more than
            `tile_rows` rows.
        m, den, num: the state, contiguous; written if not `step`, else read.
        step: which of the two operators.
        blocks: launch configuration; chosen by shape if None.

    Returns:
        [R, H * hd], q's dtype, contiguous. Rows in no tile are not written.
    """
    rows, heads, head_dim = q.shape
    out = q.new_empty((rows, heads * head_dim))
    if rows == 0 or tiles.shape[0] == 0:
        return out
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    if blocks is None:
        blocks = choose_facache_blocks(q.dtype, head_dim, tile_rows)
    state = (m, den, num)
    grid, arguments, constants = plan_facache(q, k, v, state, tiles.contiguous(), tile_rows, out, blocks, step)
    facache_kernel[grid](*arguments, **constants)
    return out
