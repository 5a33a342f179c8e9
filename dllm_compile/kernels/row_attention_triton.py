# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::row_attention`; imported only where Triton is.

An online-softmax kernel in the manner of flash attention: key blocks are streamed, scores stay in fp32 registers, a
row's maximum and sum are corrected as they grow. Key blocks that lie wholly inside a tile's range need no mask and are
pipelined; what is left over is one masked block after the loop. Keys outside a tile's range are never part of a
product, so a NaN in one sample cannot reach another.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from dllm_compile.kernels import _launch
from dllm_compile.kernels.online_softmax import stream_keys

_LOG2_E = 1.4426950408889634


def kernel_takes(q: Tensor) -> bool:
    """Whether the Triton kernel handles this dtype and head size (a power of two from 16 to 256)."""
    head_dim = q.shape[2]
    return q.dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in (16, 32, 64, 128, 256)


class Blocks(NamedTuple):
    """Launch configuration: rows and keys a program holds at once, pipeline stages, warps."""

    rows: int
    keys: int
    stages: int
    warps: int


def choose_blocks(dtype: torch.dtype, head_dim: int, tile_rows: int, programs: int, processors: int) -> Blocks:
    """Launch configuration by shape, from H200 measurements of 16-bit heads of 128.

    Args:
        dtype: of q, k, v.
        head_dim: size of a head.
        tile_rows: largest number of rows in a tile.
        programs: tiles times heads.
        processors: multiprocessors of the device.

    Returns:
        The blocks. `rows` may be less than `tile_rows`; a tile is then shared by several programs.
    """
    rows = max(16, 1 << (tile_rows - 1).bit_length())
    if dtype == torch.float32:
        # True fp32 products run outside the tensor cores, on operands held in registers: larger blocks spill.
        return Blocks(min(rows, 32), 32, 2, 8) if head_dim <= 128 else Blocks(16, 16, 2, 8)
    if head_dim > 128:
        return Blocks(min(rows, 64), 32, 3, 4)
    if rows >= 128:
        return Blocks(128, 128, 3, 8)
    # One wave: the longest chain of blocks decides, so take the wide block that fills an SM's shared memory.
    # Several waves: half of it, so that two programs share an SM.
    return Blocks(rows, 128 if programs <= processors else 64, 3, 4)


@triton.jit
def row_attention_kernel(
    q,
    k,
    v,
    k_blocks,
    v_blocks,
    tiles,
    out,
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
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One head of (a part of) one tile. Grid: (H, n, parts); `scale` includes log2(e).

    `k_blocks` and `v_blocks` are tensor descriptors with blocks [BLOCK_KEYS, HEAD_DIM] if DESCRIBED, else None.
    """
    head = tl.program_id(0)  # fastest, so that neighbouring programs read neighbouring pieces of the same key rows
    kv_head = head // GROUPS
    tile = tiles + tl.program_id(1) * 4
    first_row = tl.load(tile) + tl.program_id(2) * BLOCK_ROWS
    end_row = tl.load(tile + 1)
    k_begin = tl.load(tile + 2)
    # A part beyond the tile's last row sees no keys and stores nothing.
    k_end = tl.where(first_row < end_row, tl.load(tile + 3), k_begin)

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    in_tile = (rows < end_row)[:, None]
    query = tl.load(q + rows.to(tl.int64)[:, None] * q_row + head * q_head + dims[None, :], mask=in_tile, other=0.0)
    k_pointers = k + kv_head * k_head + dims[None, :]
    v_pointers = v + kv_head * v_head + dims[None, :]

    row_max = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
    row_max, row_sum, acc = stream_keys(
        query,
        k_pointers,
        v_pointers,
        k_blocks,
        v_blocks,
        kv_head * HEAD_DIM,
        k_row,
        v_row,
        k_begin,
        k_end,
        scale,
        row_max,
        row_sum,
        acc,
        BLOCK_KEYS,
        STAGES,
        PRECISION,
        DESCRIBED,
    )
    attended = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # no keys: 0 / 1
    out_pointers = out + rows.to(tl.int64)[:, None] * out_row + head * HEAD_DIM + dims[None, :]
    tl.store(out_pointers, attended.to(out.dtype.element_ty), mask=in_tile)


def describe_keys(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Tensor descriptors of the keys and values with blocks [blocks.keys, hd], or None where they cannot be had.

    16-bit inputs only: fp32 products are not bound by loads.
    """
    described = q.element_size() == 2 and _launch.describable(k) and _launch.describable(v)
    if not described or not _launch.has_tensor_descriptors(q.device):
        return None, None
    width, block_shape = k.shape[1] * k.shape[2], [blocks.keys, k.shape[2]]
    k_blocks, v_blocks = (TensorDescriptor(x, [x.shape[0], width], [x.stride(0), 1], block_shape) for x in (k, v))
    return k_blocks, v_blocks


def plan_row_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int, out: Tensor, blocks: Blocks
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`row_attention_kernel[grid](...)`)."""
    (_, heads, head_dim), kv_heads = q.shape, k.shape[1]
    k_blocks, v_blocks = describe_keys(q, k, v, blocks)
    grid = (heads, tiles.shape[0], -(-tile_rows // blocks.rows))
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0))
    arguments = (q, k, v, k_blocks, v_blocks, tiles, out, *strides, _LOG2_E / math.sqrt(head_dim))
    constants = {
        "GROUPS": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "STAGES": blocks.stages,
        "PRECISION": "ieee",  # of fp32 operands; 16-bit products are exact in any case
        "DESCRIBED": k_blocks is not None,
        "num_warps": blocks.warps,
    }
    return grid, arguments, constants


def row_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int, blocks: Blocks | None = None
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        q, k, v, tiles, tile_rows: as in `row_attention_reference`, with `kernel_takes(q)`; no tile has more than
            `tile_rows` rows.
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
        blocks = choose_blocks(q.dtype, head_dim, tile_rows, heads * tiles.shape[0], _launch.processors(q.device))
    grid, arguments, constants = plan_row_attention(q, k, v, tiles.contiguous(), tile_rows, out, blocks)
    row_attention_kernel[grid](*arguments, **constants)
    return out
