# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_attention_scored`: attention of a cached step, and how much a window attends to each key, in one launch.

On CUDA the summed query of a window is one more row of the attention kernel, so that keys are read once. Prototypes
with 32 bf16 heads of 128 and 1,280 keys took 18.2 us for one sample on an H200, and 264 for 32; attention and a kernel
of its own for the scores took 23.7 and 298.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.cached_attention import check_arrived
from dllm_compile.kernels.row_attention import check_row_attention, row_attention_cuda, row_attention_reference
from dllm_compile.kernels.row_scores import check_row_scores, row_scores, row_scores_reference


def row_attention_scored_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    tile_rows: int,
    window: Tensor,
    spans: Tensor,
    scores: Tensor,
) -> Tensor:
    """`row_attention_reference`, and `row_scores_reference` added to `scores[0]`.

    Args:
        q, tiles, tile_rows: as in `row_attention_reference`.
        k_cache, v_cache: [K, H_kv, hd].
        window, spans: as in `row_scores_reference`. The last (largest) window row of a sample lies in a tile whose
            keys are the sample's span.
        scores: [H, K] fp32, contiguous. Only its sum over the first dimension means anything: a kernel may keep the
            sums of heads apart, so that each number has one writer and runs are bit-equal.

    Returns:
        As `row_attention_reference`.
    """
    row_scores_reference(q, window, k_cache, spans, scores[0])
    return row_attention_reference(q, k_cache, v_cache, tiles, tile_rows)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    window: Tensor,
    spans: Tensor,
    scores: Tensor,
    arrived: Tensor,
) -> None:
    check_row_attention(q, k_cache, v_cache, tiles)
    check_arrived(arrived)
    if scores.ndim != 2 or scores.shape[0] != q.shape[1] or not scores.is_contiguous():
        raise ValueError(
            f"row_attention_scored: scores must be contiguous ({q.shape[1]}, {k_cache.shape[0]}), got {[*scores.shape]}"
        )
    check_row_scores(q, window, k_cache, spans, scores[0])


@torch.library.custom_op(
    "dllm::row_attention_scored",
    mutates_args=("scores", "arrived"),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor tiles, SymInt tile_rows, Tensor window, Tensor spans, "
    "Tensor(a!) scores, Tensor(b!) arrived) -> Tensor",
)
def row_attention_scored(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    tile_rows: int,
    window: Tensor,
    spans: Tensor,
    scores: Tensor,
    arrived: Tensor,
) -> Tensor:
    """See `row_attention_scored_reference`; `arrived` as in `cached_attention`."""
    _check(q, k_cache, v_cache, tiles, window, spans, scores, arrived)
    return row_attention_scored_reference(q, k_cache, v_cache, tiles, tile_rows, window, spans, scores)


@row_attention_scored.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    tile_rows: int,
    window: Tensor,
    spans: Tensor,
    scores: Tensor,
    arrived: Tensor,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@row_attention_scored.register_kernel("cuda")
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    tile_rows: int,
    window: Tensor,
    spans: Tensor,
    scores: Tensor,
    arrived: Tensor,
) -> Tensor:
    _check(q, k_cache, v_cache, tiles, window, spans, scores, arrived)
    if has_triton():
        from dllm_compile.kernels.row_attention_triton import kernel_takes, row_attention_triton
        from dllm_compile.kernels.summed_query import Tracking, kernel_tracks

        if kernel_takes(q) and kernel_tracks(q, window):
            with torch.cuda.device(q.device):  # Triton launches on the current device
                tracking = Tracking(window, spans, scores)
                return row_attention_triton(q, k_cache, v_cache, tiles, tile_rows, tracking=tracking, arrived=arrived)
    row_scores(q, window, k_cache, spans, scores[0])
    return row_attention_cuda(q, k_cache, v_cache, tiles, tile_rows, arrived)
