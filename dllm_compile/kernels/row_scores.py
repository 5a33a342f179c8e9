# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_scores`: how much the rows of a window attend to each key, without a (rows x heads x keys) array.

The sum of raw logits q . k over window rows and heads is linear in q: one summed query a key head and sample does it
(Flash-Cache's tracking; the factor 1 / (rows * heads) of a mean is left to the caller, a ranking needs none).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton


def summed_queries(q: Tensor, window: Tensor, kv_heads: int) -> Tensor:
    """Sum of the window rows' queries and of the heads of a group, [S, kv_heads * hd] fp32; rows < 0 count nothing."""
    (_, heads, head_dim), samples = q.shape, window.shape[0]
    chosen = q[window.clamp(min=0)].float().masked_fill((window < 0)[:, :, None, None], 0.0)
    return chosen.sum(1).view(samples, kv_heads, heads // kv_heads, head_dim).sum(2).flatten(1)


def row_scores_reference(q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor) -> None:
    """`scores[j] += sum over window rows r and heads h of q[r, h] . k_cache[j, h // group]` for j in a sample's span.

    Raw logits, before the factor 1 / sqrt(hd). Called once a layer, it sums over layers.

    Args:
        q: [R, H, hd], rotated; may be a strided view.
        window: [S, w] int64 rows of q; entries < 0 are skipped.
        k_cache: [K, H_kv, hd], q's dtype, rotated keys.
        spans: [S, 2] int32, first and end key row of each sample. Spans do not overlap; one may be empty.
        scores: [K] fp32, contiguous; added to inside the spans, left alone outside.
    """
    if q.shape[0] == 0:
        return
    queries = summed_queries(q, window, k_cache.shape[1])
    key_row = torch.arange(k_cache.shape[0], device=q.device).unsqueeze(1)
    member = (key_row >= spans[:, 0]) & (key_row < spans[:, 1])  # (K, S)
    logits = k_cache.flatten(1).float() @ queries.T
    # `where`, so that what is not finite in one sample stays there; `add_` of 0 leaves the rest.
    scores.add_(torch.where(member, logits, 0.0).sum(1))


def check_row_scores(q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor) -> None:
    """Raise `ValueError` or `TypeError` where shapes or dtypes are not those of `row_scores_reference`."""
    if q.ndim != 3 or k_cache.ndim != 3 or q.shape[2] != k_cache.shape[2] or q.shape[1] % k_cache.shape[1] != 0:
        raise ValueError(
            f"row_scores: q must be [R, H, hd] and k_cache [K, H_kv, hd], got {[*q.shape]}, {[*k_cache.shape]}"
        )
    if q.dtype != k_cache.dtype:
        raise TypeError(f"row_scores: q and k_cache must share a dtype, got {q.dtype}, {k_cache.dtype}")
    if window.ndim != 2 or window.dtype != torch.int64:
        raise ValueError(f"row_scores: window must be [S, w] int64, got {[*window.shape]} {window.dtype}")
    if spans.shape != (window.shape[0], 2) or spans.dtype != torch.int32:
        raise ValueError(f"row_scores: spans must be ({window.shape[0]}, 2) int32, got {[*spans.shape]} {spans.dtype}")
    if scores.shape != k_cache.shape[:1] or scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError(
            f"row_scores: scores must be contiguous ({k_cache.shape[0]},) fp32, got {[*scores.shape]} {scores.dtype}"
        )


@torch.library.custom_op("dllm::row_scores", mutates_args=("scores",))
def row_scores(q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor) -> None:
    """See `row_scores_reference`."""
    check_row_scores(q, window, k_cache, spans, scores)
    row_scores_reference(q, window, k_cache, spans, scores)


@row_scores.register_fake
def _(q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor) -> None:
    return None


@row_scores.register_kernel("cuda")
def _(q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor) -> None:
    check_row_scores(q, window, k_cache, spans, scores)
    if has_triton() and q.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from dllm_compile.kernels.row_scores_triton import row_scores_triton

        with torch.cuda.device(q.device):  # Triton launches on the current device
            row_scores_triton(q, window, k_cache, spans, scores)
    else:
        row_scores_reference(q, window, k_cache, spans, scores)
