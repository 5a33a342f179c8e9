# SPDX-License-Identifier: Apache-2.0
"""`dllm::facache_first` and `dllm::facache_step`: attention that keeps what does not change within a block.

While one block is decoded only its tokens change. For a query row outside the block the online-softmax state over the
*keys outside the block* is therefore constant: `first` computes and keeps it, `step` attends to the block's keys alone
and merges (LaCache, section 3.3.3). Rows inside the block attend to all keys every time.

The state of a query row and head, fp32, over the keys j outside the block, with scores s_j = q . k_j / sqrt(hd):

    m = max_j s_j        den = sum_j exp(s_j - m)        num = sum_j exp(s_j - m) v_j

(m, l and O in the paper.)
A tile is [q_begin, q_end, k_begin, k_end, c_begin, c_end): its query rows, its sample's key rows, and the block's rows
among them. Query rows of one tile lie all inside or all outside the block; nothing is assumed about where a block
begins or how long it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllm_compile._compat import has_triton

Partial = tuple[Tensor, Tensor, Tensor]


def partial_attention(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Online-softmax state of query rows over a set of keys.

    Args:
        q: [R, H, hd].
        k, v: [K, H_kv, hd], K may be 0.

    Returns:
        (m [H, R], den [H, R], num [H, R, hd]) in fp32; no keys give (-inf, 0, 0).
    """
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    query = q.transpose(0, 1).float() / math.sqrt(head_dim)
    if k.shape[0] == 0:
        zeros = query.new_zeros(heads, rows)
        return torch.full_like(zeros, -math.inf), zeros, query.new_zeros(heads, rows, head_dim)
    key, value = (x.transpose(0, 1).float().repeat_interleave(groups, dim=0) for x in (k, v))
    scores = query @ key.transpose(1, 2)
    m = scores.amax(-1)
    weights = torch.exp(scores - m[..., None])
    return m, weights.sum(-1), weights @ value


def merge_partials(left: Partial, right: Partial) -> Partial:
    """State over the union of two disjoint sets of keys. Associative and commutative; (-inf, 0, 0) is neutral."""
    m = torch.maximum(left[0], right[0])
    # Both empty: -inf - (-inf) must count as a weight of 0.
    scales = [torch.where(part[0] == -math.inf, 0.0, torch.exp(part[0] - m)) for part in (left, right)]
    den = scales[0] * left[1] + scales[1] * right[1]
    num = scales[0][..., None] * left[2] + scales[1][..., None] * right[2]
    return m, den, num


def normalised(part: Partial) -> Tensor:
    """Attention output [R, H, hd] of a state; zero where there were no keys."""
    _, den, num = part
    return (num / torch.where(den == 0, 1.0, den)[..., None]).transpose(0, 1)


def facache_first_reference(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int
) -> Tensor:
    """Attention of all rows; the state of rows outside the block is written on the way.

    Args:
        q: [R, H, hd], rotated; may be a strided view.
        k, v: [R, H_kv, hd].
        m, den: [R, H] fp32, written for rows outside their block, left alone inside.
        num: [R, H, hd] fp32, likewise.
        tiles: (n, 6) int32, see the module. Every row is in exactly one tile; an empty row range does nothing.
        tile_rows: largest number of rows in a tile where the kernel's launch depends on it; not read here.

    Returns:
        [R, H * hd], q's dtype, contiguous.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for q0, q1, k0, k1, c0, c1 in tiles.tolist():
        if q0 >= q1:
            continue
        query = q[q0:q1]
        before, behind = (partial_attention(query, k[a:b], v[a:b]) for a, b in ((k0, c0), (c1, k1)))
        outside = merge_partials(before, behind)
        inside = partial_attention(query, k[c0:c1], v[c0:c1])
        out[q0:q1] = normalised(merge_partials(outside, inside)).to(q.dtype)
        if not c0 <= q0 < c1:
            m[q0:q1], den[q0:q1], num[q0:q1] = (x.transpose(0, 1) for x in outside)
    return out.flatten(1)


def facache_step_reference(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int
) -> Tensor:
    """Attention of all rows from the state of `facache_first`.

    Rows outside the block stream the block's keys only and merge; rows inside stream all keys. Per sample of N rows
    with a block of b: (N - b) * b + b * N scores instead of N * N.

    Args:
        q, k, v: as in `facache_first_reference`; rows of the block are fresh, the others those of `first`.
        m, den, num: the state, read only.
        tiles: the table `first` was called with.
        tile_rows: as there.

    Returns:
        [R, H * hd], q's dtype, contiguous.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for q0, q1, k0, k1, c0, c1 in tiles.tolist():
        if q0 >= q1:
            continue
        query = q[q0:q1]
        if c0 <= q0 < c1:
            result = partial_attention(query, k[k0:k1], v[k0:k1])
        else:
            state = tuple(x[q0:q1].transpose(0, 1) for x in (m, den, num))
            result = merge_partials(state, partial_attention(query, k[c0:c1], v[c0:c1]))  # type: ignore[arg-type]
        out[q0:q1] = normalised(result).to(q.dtype)
    return out.flatten(1)


def _check(q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"facache: q must be [R, H, hd] and k, v [R, H_kv, hd], got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"facache: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(f"facache: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if m.shape != q.shape[:2] or den.shape != q.shape[:2] or num.shape != q.shape:
        raise ValueError(
            f"facache: the state of q {[*q.shape]} cannot be m {[*m.shape]}, den {[*den.shape]}, num {[*num.shape]}"
        )
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in (m, den, num)):
        raise TypeError("facache: the state must be contiguous fp32")
    if tiles.ndim != 2 or tiles.shape[1] != 6 or tiles.dtype != torch.int32:
        raise ValueError(f"facache: tiles must be (n, 6) int32, got {[*tiles.shape]} {tiles.dtype}")


@torch.library.custom_op("dllm::facache_first", mutates_args=("m", "den", "num"))
def facache_first(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int
) -> Tensor:
    """See `facache_first_reference`. On CUDA no tile may have more than `tile_rows` rows."""
    _check(q, k, v, m, den, num, tiles)
    return facache_first_reference(q, k, v, m, den, num, tiles, tile_rows)


@torch.library.custom_op("dllm::facache_step", mutates_args=())
def facache_step(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int
) -> Tensor:
    """See `facache_step_reference`. On CUDA no tile may have more than `tile_rows` rows."""
    _check(q, k, v, m, den, num, tiles)
    return facache_step_reference(q, k, v, m, den, num, tiles, tile_rows)


@facache_first.register_fake
@facache_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


# Without Triton, or where the kernel does not take q, the references run on CUDA too. They read the tile table on the
# host, so such a program cannot be captured into a CUDA graph: LaCache is there to be fast and is of no use then.


@facache_first.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    _check(q, k, v, m, den, num, tiles)
    if has_triton():
        from dllm_compile.kernels import facache_triton as triton_version

        if triton_version.kernel_takes(q):
            with torch.cuda.device(q.device):  # Triton launches on the current device
                return triton_version.facache_triton(q, k, v, m, den, num, tiles, tile_rows, step=False)
    return facache_first_reference(q, k, v, m, den, num, tiles, tile_rows)


@facache_step.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, m: Tensor, den: Tensor, num: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
    _check(q, k, v, m, den, num, tiles)
    if has_triton():
        from dllm_compile.kernels import facache_triton as triton_version

        if triton_version.kernel_takes(q):
            with torch.cuda.device(q.device):
                return triton_version.facache_triton(q, k, v, m, den, num, tiles, tile_rows, step=True)
    return facache_step_reference(q, k, v, m, den, num, tiles, tile_rows)
