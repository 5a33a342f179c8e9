# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::qkv_rope_cache_write`; imported only where Triton is.

A program takes one row and a few heads: the same heads of q, k and v, so that it reads the row's angles once. The two
halves of a head are read apart, each in one piece, so that no number changes its thread.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Share(NamedTuple):
    """Launch configuration: heads of a program, warps."""

    heads: int
    warps: int


def choose_share(rows: int, heads: int) -> Share:
    """Launch configuration by shape, from H200 measurements of 32 bf16 heads of 128."""
    if rows <= 64:
        share = Share(4, 8)
    elif rows <= 256:
        share = Share(16, 8)
    elif rows <= 2048:
        share = Share(16, 4)
    else:
        share = Share(4, 4)
    return share._replace(heads=min(share.heads, triton.next_power_of_2(heads)))


@triton.jit
def _rotate(source, target, half, mask, cos, sin):
    """Rotate the half pairs at `source` and `source + half` and store them at `target` and `target + half`."""
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(target + half, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def rope_write_kernel(
    qkv,
    cos,
    sin,
    positions,
    cache_rows,
    k_cache,
    v_cache,
    q,
    heads,
    kv_heads,
    qkv_row,
    cos_row,
    sin_row,
    k_row,
    k_head,
    v_row,
    v_head,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """BLOCK_HEADS heads of one row. Grid: (R * SHARES,); BLOCK_HALF is HALF or the power of two above.

    The shares of a row are neighbours, so that what is read and written at a time lies together. Only the first half
    of the tables is read: the second is the same.
    """
    row = (tl.program_id(0) // SHARES).to(tl.int64)
    head = (tl.program_id(0) % SHARES * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    position = tl.load(positions + row)
    cache_row = tl.load(cache_rows + row)
    in_half = dim < HALF
    cos_half = tl.load(cos + position * cos_row + dim, mask=in_half, other=0.0)
    sin_half = tl.load(sin + position * sin_row + dim, mask=in_half, other=0.0)

    source = qkv + row * qkv_row + head * (2 * HALF) + dim
    q += row * (heads * 2 * HALF) + head * (2 * HALF) + dim
    _rotate(source, q, HALF, in_half & (head < heads), cos_half, sin_half)

    has_key = in_half & (head < kv_heads)  # fewer key heads than query heads: the last programs have none
    source += heads * (2 * HALF)
    k_cache += cache_row * k_row + head * k_head + dim
    _rotate(source, k_cache, HALF, has_key, cos_half, sin_half)

    source += kv_heads * (2 * HALF)
    v_cache += cache_row * v_row + head * v_head + dim
    tl.store(v_cache, tl.load(source, mask=has_key, other=0.0), mask=has_key)
    tl.store(v_cache + HALF, tl.load(source + HALF, mask=has_key, other=0.0), mask=has_key)


def plan_rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor,
    share: Share,
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`rope_write_kernel[grid](...)`)."""
    (rows, heads, head_dim), kv_heads = q.shape, k_cache.shape[1]
    caches = (k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1))
    strides = (qkv.stride(0), cos.stride(0), sin.stride(0), *caches)
    arguments = (qkv, cos, sin, positions, cache_rows, k_cache, v_cache, q, heads, kv_heads, *strides)
    shares = -(-max(heads, kv_heads) // share.heads)
    constants = {
        "HALF": head_dim // 2,
        "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
        "BLOCK_HEADS": share.heads,
        "SHARES": shares,
        "num_warps": share.warps,
        # Products are rounded before they are added, as the reference's are: results are bit-equal.
        "enable_fp_fusion": False,
    }
    return (rows * shares,), arguments, constants


def qkv_rope_cache_write_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
    share: Share | None = None,
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        qkv, cos, sin, positions, cache_rows, k_cache, v_cache, heads, kv_heads: as in
            `qkv_rope_cache_write_reference`; the last dimension of the caches has stride 1.
        share: launch configuration; chosen by shape if None.

    Returns:
        q: [R, heads, hd], qkv's dtype, contiguous.
    """
    rows = qkv.shape[0]
    q = qkv.new_empty((rows, heads, qkv.shape[1] // (heads + 2 * kv_heads)))
    if rows == 0:
        return q
    qkv, cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (qkv, cos, sin))
    positions, cache_rows = positions.contiguous(), cache_rows.contiguous()
    share = share or choose_share(rows, heads)
    plan = plan_rope_write(qkv, cos, sin, positions, cache_rows, k_cache, v_cache, q, share)
    grid, arguments, constants = plan
    rope_write_kernel[grid](*arguments, **constants)
    return q
