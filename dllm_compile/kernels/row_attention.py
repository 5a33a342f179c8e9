# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_attention`: attention over the flat row axis, one tile of query rows and one range of keys at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile._compat import has_triton


def row_attention_reference(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    """Bidirectional attention of each tile's query rows to that tile's key rows, with scale 1 / sqrt(hd).

    Args:
        q: [R, H, hd], any floating dtype; may be a strided view (a slice of a packed projection).
        k: [K, H_kv, hd], q's dtype, may be strided. Query head h reads key head h // (H / H_kv).
        v: like k.
        tiles: (n, 4) int32: [q_begin, q_end, k_begin, k_end). Every query row lies in exactly one tile. An empty key
            range gives zeros; an empty row range does nothing.
        tile_rows: the largest number of rows in a tile where the kernel's launch depends on it; not read here.

    Returns:
        [R, H * hd], q's dtype, contiguous. What a row holds that lies in no tile is undefined.
    """
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    out = q.new_zeros((rows, heads, head_dim))
    for q_begin, q_end, k_begin, k_end in tiles.tolist():
        if q_begin >= q_end or k_begin >= k_end:
            continue
        query, key, value = (
            x[begin:end].transpose(0, 1).unsqueeze(0)
            for x, begin, end in ((q, q_begin, q_end), (k, k_begin, k_end), (v, k_begin, k_end))
        )
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out[q_begin:q_end] = F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
    return out.view(rows, heads * head_dim)


def row_attention_masked(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    """`row_attention_reference` without a host read: one dense call under a boolean mask built on the device.

    For CUDA without Triton, and for head sizes or dtypes the kernel does not take. All R x K scores are computed, so
    it costs more the more samples there are, and a value that is not finite spreads to the rows of other samples.

    Args:
        q, k, v, tiles, tile_rows: as in `row_attention_reference`.

    Returns:
        As `row_attention_reference`; rows in no tile are zero.
    """
    rows, heads, head_dim = q.shape
    row = torch.arange(rows, device=q.device).unsqueeze(1)
    key_row = torch.arange(k.shape[0], device=q.device)
    member = (row >= tiles[:, 0]) & (row < tiles[:, 1])  # (R, n); at most one tile holds a row, so sums select it
    k_begin = (member * tiles[:, 2]).sum(1, keepdim=True)
    k_end = (member * tiles[:, 3]).sum(1, keepdim=True)
    empty = k_end <= k_begin
    # A row that sees nothing would be NaN in some back ends: let it see everything and blank it afterwards.
    visible = ((key_row >= k_begin) & (key_row < k_end)) | empty
    groups = heads // k.shape[1]
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)[0].transpose(0, 1)
    return attended.masked_fill(empty.unsqueeze(2), 0.0).reshape(rows, heads * head_dim)


def check_row_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor) -> None:
    """Raise `ValueError` or `TypeError` where shapes or dtypes are not those of `row_attention_reference`."""
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"row_attention: q must be [R, H, hd] and k, v [K, H_kv, hd], got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"row_attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(f"row_attention: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if tiles.ndim != 2 or tiles.shape[1] != 4 or tiles.dtype != torch.int32:
        raise ValueError(f"row_attention: tiles must be (n, 4) int32, got {[*tiles.shape]} {tiles.dtype}")


@torch.library.custom_op(
    "dllm::row_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor tiles, SymInt tile_rows) -> Tensor",
)
def row_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    """See `row_attention_reference`. On CUDA no tile may have more than `tile_rows` rows."""
    check_row_attention(q, k, v, tiles)
    return row_attention_reference(q, k, v, tiles, tile_rows)


@row_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@row_attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    check_row_attention(q, k, v, tiles)
    return row_attention_cuda(q, k, v, tiles, tile_rows)


def row_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int, arrived: Tensor | None = None
) -> Tensor:
    """`row_attention_reference` for CUDA: the Triton kernel where it can be had, else the dense call."""
    if has_triton():
        from dllm_compile.kernels import row_attention_triton as triton_version

        if triton_version.kernel_takes(q):
            with torch.cuda.device(q.device):  # Triton launches on the current device
                return triton_version.row_attention_triton(q, k, v, tiles, tile_rows, arrived=arrived)
    return row_attention_masked(q, k, v, tiles, tile_rows)
