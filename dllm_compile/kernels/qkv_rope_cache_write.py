# SPDX-License-Identifier: Apache-2.0
"""`dllm::qkv_rope_cache_write`: a packed projection becomes rotated queries, and rows of the key and value caches."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.rope import rope_reference


def qkv_rope_cache_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """Rotate queries and keys as `rope_reference` does; write keys and values to `cache_rows` of the caches.

    Args:
        qkv: [R, (heads + 2 * kv_heads) * hd], q, k and v side by side; may be a strided view.
        cos, sin: [T_max, hd] fp32 tables, the half table repeated twice along hd.
        positions: [R] int64 canvas positions.
        cache_rows: [R] int64. Rows of padding point to a spare row of the cache; what a row holds that is named more
            than once is undefined.
        k_cache, v_cache: [K, kv_heads, hd], qkv's dtype, written at `cache_rows` only. Keys are stored rotated.
        heads: number of query heads.
        kv_heads: number of key heads.

    Returns:
        q: [R, heads, hd], qkv's dtype, contiguous.
    """
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    k_cache.index_copy_(0, cache_rows, rope_reference(k, cos, sin, positions, kv_heads))
    v_cache.index_copy_(0, cache_rows, v.unflatten(1, (kv_heads, head_dim)))
    return rope_reference(q, cos, sin, positions, heads).contiguous()


def _check(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    name = "qkv_rope_cache_write"
    if qkv.ndim != 2 or qkv.shape[1] % (2 * (heads + 2 * kv_heads)) != 0:
        raise ValueError(f"{name}: qkv {[*qkv.shape]} is not {heads} + 2 * {kv_heads} heads of an even size")
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    if any(cache.ndim != 3 or cache.shape[1:] != (kv_heads, head_dim) for cache in (k_cache, v_cache)):
        raise ValueError(
            f"{name}: the caches must be [K, {kv_heads}, {head_dim}], got {[*k_cache.shape]}, {[*v_cache.shape]}"
        )
    if k_cache.stride(2) != 1 or v_cache.stride(2) != 1:
        raise ValueError(f"{name}: the last dimension of the caches must have stride 1")
    if k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype:
        raise TypeError(
            f"{name}: qkv and the caches must share a dtype, got {qkv.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if any(table.ndim != 2 or table.shape[1] != head_dim or table.dtype != torch.float32 for table in (cos, sin)):
        raise ValueError(f"{name}: cos and sin must be [T, {head_dim}] fp32, got {[*cos.shape]}, {[*sin.shape]}")
    if any(rows.shape != qkv.shape[:1] or rows.dtype != torch.int64 for rows in (positions, cache_rows)):
        raise ValueError(f"{name}: positions and cache_rows must be ({qkv.shape[0]},) int64")


@torch.library.custom_op("dllm::qkv_rope_cache_write", mutates_args=("k_cache", "v_cache"))
def qkv_rope_cache_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """See `qkv_rope_cache_write_reference`."""
    _check(qkv, cos, sin, positions, cache_rows, k_cache, v_cache, heads, kv_heads)
    return qkv_rope_cache_write_reference(qkv, cos, sin, positions, cache_rows, k_cache, v_cache, heads, kv_heads)


@qkv_rope_cache_write.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[1] // (heads + 2 * kv_heads)))


@qkv_rope_cache_write.register_kernel("cuda")
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    _check(qkv, cos, sin, positions, cache_rows, k_cache, v_cache, heads, kv_heads)
    arguments = (qkv, cos, sin, positions, cache_rows, k_cache, v_cache, heads, kv_heads)
    if has_triton() and qkv.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from dllm_compile.kernels.qkv_rope_cache_write_triton import qkv_rope_cache_write_triton

        with torch.cuda.device(qkv.device):  # Triton launches on the current device
            return qkv_rope_cache_write_triton(*arguments)
    return qkv_rope_cache_write_reference(*arguments)
