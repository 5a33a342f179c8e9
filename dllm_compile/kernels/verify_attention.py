# SPDX-License-Identifier: Apache-2.0
"""`dllm::verify_attention`: rows that see each other through a small mask, and a cache that is read and never written.

A verify pass holds some positions of a sample twice, once with a drafted token and once as a mask (Flash-Verify,
section 11 of the method). Who sees whom follows from how many drafts a row sees, its depth: context rows and the first
mask row see none, draft row i sees drafts 0..i, mask row i sees drafts 0..i-1. A position that was drafted as number j
is seen as a draft from depth j + 1 on, and as a mask up to depth j; context is seen at any depth. So three small
integers a row hold the mask:

    row            depth   seen at depths
    context        0       [0, n + 1)
    draft j        j + 1   [j + 1, n + 1)
    mask j         j       [0, j + 1)
    padding        -1      [0, 0)           sees nothing, is seen by nobody
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.cached_attention import check_arrived


def verify_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    tile_rows: int,
) -> Tensor:
    """Attention of each tile's rows to the tile's keys in the cache and to the rows of the tile, scale 1 / sqrt(hd).

    Args:
        q: [R, H, hd], any floating dtype; may be a strided view.
        k: [R, H_kv, hd], q's dtype, keys of the same rows; may be strided. Query head h reads key head h // (H / H_kv).
        v: like k.
        k_cache: [K, H_kv, hd], q's dtype, may be strided.
        v_cache: like k_cache. What rows hold that no tile names or that are hidden must be finite.
        tiles: (n, 4) int32: [q_begin, q_end, k_begin, k_end). A tile holds all the rows of one sample, and its keys are
            rows of the cache. Every row lies in exactly one tile.
        views: (R, 3) int32: [depth, from, until). Row i sees row j of its tile when from_j <= depth_i < until_j. A row
            of negative depth sees nothing, the cache included, and is zero.
        hidden: (K,) bool, rows of the cache that are not seen: their positions are among the rows of the pass.
        tile_rows: the largest number of rows in a tile where the kernel's launch depends on it; not read here.

    Returns:
        [R, H * hd], q's dtype, contiguous. What a row holds that lies in no tile is undefined.
    """
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    out = q.new_zeros((rows, heads, head_dim))
    for q_begin, q_end, k_begin, k_end in tiles.tolist():
        if q_begin >= q_end:
            continue
        depth, begin, end = views[q_begin:q_end].unbind(1)
        fresh = (begin <= depth[:, None]) & (depth[:, None] < end)
        cached = (depth >= 0)[:, None] & ~hidden[k_begin : max(k_begin, k_end)]
        visible = torch.cat((cached, fresh), 1)
        keys, values = (
            torch.cat((old[k_begin : max(k_begin, k_end)], new[q_begin:q_end])).transpose(0, 1).unsqueeze(0)
            for old, new in ((k_cache, k), (v_cache, v))
        )
        if groups > 1:
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        query = q[q_begin:q_end].transpose(0, 1).unsqueeze(0)
        sees = visible.any(1, keepdim=True)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible | ~sees)[0].transpose(0, 1)
        out[q_begin:q_end] = attended.masked_fill(~sees.unsqueeze(2), 0.0)
    return out.view(rows, heads * head_dim)


def verify_attention_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    tile_rows: int,
) -> Tensor:
    """`verify_attention_reference` without a host read: one dense call under a mask built on the device.

    For CUDA without Triton, and for head sizes or dtypes the kernel does not take. All R x (K + R) scores are computed.

    Args:
        q, k, v, k_cache, v_cache, tiles, views, hidden, tile_rows: as in `verify_attention_reference`.

    Returns:
        As `verify_attention_reference`; rows in no tile are zero.
    """
    rows, heads, head_dim = q.shape
    row = torch.arange(rows, device=q.device)
    member = (row[:, None] >= tiles[:, 0]) & (row[:, None] < tiles[:, 1])  # (R, n); at most one tile holds a row
    tile = torch.where(member.any(1), member.int().argmax(1), -1)
    k_begin, k_end = ((member * tiles[:, i]).sum(1, keepdim=True) for i in (2, 3))
    key_row = torch.arange(k_cache.shape[0], device=q.device)
    depth, begin, end = views.unbind(1)
    cached = (key_row >= k_begin) & (key_row < k_end) & ~hidden & (depth >= 0)[:, None]
    fresh = (tile[:, None] == tile) & (tile >= 0) & (begin <= depth[:, None]) & (depth[:, None] < end)
    visible = torch.cat((cached, fresh), 1)
    blind = ~visible.any(1, keepdim=True)
    keys, values = (torch.cat(pair).transpose(0, 1).unsqueeze(0) for pair in ((k_cache, k), (v_cache, v)))
    groups = heads // k.shape[1]
    if groups > 1:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    query = q.transpose(0, 1).unsqueeze(0)
    # A row that sees nothing would be NaN in some back ends: let it see everything and blank it afterwards.
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible | blind)[0].transpose(0, 1)
    return attended.masked_fill(blind.unsqueeze(2), 0.0).reshape(rows, heads * head_dim)


def _check(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, views: Tensor, hidden: Tensor
) -> None:
    name = "verify_attention"
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"{name}: q must be [R, H, hd] and k, v [R, H_kv, hd], got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if k_cache.ndim != 3 or k_cache.shape != v_cache.shape or k_cache.shape[1:] != k.shape[1:]:
        raise ValueError(
            f"{name}: the caches must be [K, {k.shape[1]}, {k.shape[2]}], got {[*k_cache.shape]}, {[*v_cache.shape]}"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{name}: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if any(x.dtype != q.dtype for x in (k, v, k_cache, v_cache)):
        raise TypeError(f"{name}: q, k, v and the caches must share a dtype")
    if tiles.ndim != 2 or tiles.shape[1] != 4 or tiles.dtype != torch.int32:
        raise ValueError(f"{name}: tiles must be (n, 4) int32, got {[*tiles.shape]} {tiles.dtype}")
    if views.shape != (q.shape[0], 3) or views.dtype != torch.int32:
        raise ValueError(f"{name}: views must be ({q.shape[0]}, 3) int32, got {[*views.shape]} {views.dtype}")
    if hidden.shape != k_cache.shape[:1] or hidden.dtype != torch.bool:
        raise ValueError(f"{name}: hidden must be ({k_cache.shape[0]},) bool, got {[*hidden.shape]} {hidden.dtype}")


@torch.library.custom_op(
    "dllm::verify_attention",
    mutates_args=("arrived",),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor tiles, Tensor views, Tensor hidden, "
        "SymInt tile_rows, Tensor(a!) arrived) -> Tensor"
    ),
)
def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    tile_rows: int,
    arrived: Tensor,
) -> Tensor:
    """See `verify_attention_reference`. On CUDA no tile may have more than `tile_rows` rows.

    Args:
        q, k, v, k_cache, v_cache, tiles, views, hidden, tile_rows: as there.
        arrived: as in `cached_attention`: int32 zeros that are zeros again afterwards.

    Returns:
        As there.
    """
    _check(q, k, v, k_cache, v_cache, tiles, views, hidden)
    check_arrived(arrived)
    return verify_attention_reference(q, k, v, k_cache, v_cache, tiles, views, hidden, tile_rows)


@verify_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    tile_rows: int,
    arrived: Tensor,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@verify_attention.register_kernel("cuda")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    views: Tensor,
    hidden: Tensor,
    tile_rows: int,
    arrived: Tensor,
) -> Tensor:
    _check(q, k, v, k_cache, v_cache, tiles, views, hidden)
    check_arrived(arrived)
    arguments = (q, k, v, k_cache, v_cache, tiles, views, hidden, tile_rows)
    if has_triton():
        from dllm_compile.kernels.verify_attention_triton import kernel_takes, verify_attention_triton

        if kernel_takes(q, tile_rows):
            with torch.cuda.device(q.device):  # Triton launches on the current device
                return verify_attention_triton(*arguments, arrived=arrived)
    return verify_attention_masked(*arguments)
