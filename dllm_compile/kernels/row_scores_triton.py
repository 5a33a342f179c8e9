# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `dllm::row_scores`; imported only where Triton is.

One kernel sums queries, one multiplies them with keys. Each number is written by one program in a fixed order of sums,
so runs are bit-equal. Bound by reading the keys: products are plain fp32 multiplications, not tensor-core ones.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_compile.kernels import _launch


class Cut(NamedTuple):
    """Launch configuration: keys of a program, numbers of a key taken at once, warps."""

    keys: int
    width: int
    warps: int


def choose_cut(keys: int, processors: int) -> Cut:
    """Launch configuration by shape: enough programs for every multiprocessor, then fewer reads of the queries."""
    return Cut(8, 512, 4) if keys <= 32 * processors else Cut(32, 256, 8)


@triton.jit
def sum_queries_kernel(
    q,
    window,
    queries,
    window_rows,
    width,
    q_row,
    q_head,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH numbers of one sample's summed queries. Grid: (S, ceil(width / WIDTH)); `window` is contiguous."""
    sample = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    offset = (column // HEAD_DIM) * GROUPS * q_head + column % HEAD_DIM  # of the group's first head
    acc = tl.zeros((WIDTH,), tl.float32)
    for index in range(window_rows):
        row = tl.load(window + sample.to(tl.int64) * window_rows + index)
        for member in tl.static_range(GROUPS):
            pointers = q + row * q_row + member * q_head + offset
            acc += tl.load(pointers, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(queries + sample.to(tl.int64) * width + column, acc, mask=inside)


@triton.jit
def score_keys_kernel(
    queries,
    k_cache,
    spans,
    scores,
    keys,
    samples,
    width,
    k_row,
    k_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Scores of BLOCK_KEYS keys. Grid: (ceil(K / BLOCK_KEYS),); `spans`, `queries` and `scores` are contiguous."""
    block_begin = tl.program_id(0) * BLOCK_KEYS
    key = block_begin + tl.arange(0, BLOCK_KEYS)
    # Which samples have keys in this block? Mostly one, two where a span ends.
    sample = tl.arange(0, BLOCK_SAMPLES)
    exists = sample < samples
    begins = tl.load(spans + sample * 2, mask=exists, other=0)
    ends = tl.load(spans + sample * 2 + 1, mask=exists, other=0)
    meets = exists & (begins < ends) & (begins < block_begin + BLOCK_KEYS) & (ends > block_begin)
    first = tl.min(tl.where(meets, sample, BLOCK_SAMPLES), 0)
    last = tl.max(tl.where(meets, sample, -1), 0)
    for chosen in range(first, last + 1):
        begin = tl.load(spans + chosen * 2)
        end = tl.load(spans + chosen * 2 + 1)
        if (begin < block_begin + BLOCK_KEYS) & (end > block_begin):
            in_span = (key >= begin) & (key < end) & (key < keys)
            acc = tl.zeros((BLOCK_KEYS, WIDTH), tl.float32)
            for start in range(0, width, WIDTH):
                column = start + tl.arange(0, WIDTH)
                inside = column < width
                query = tl.load(queries + chosen * width + column, mask=inside, other=0.0)
                offset = (column // HEAD_DIM) * k_head + column % HEAD_DIM
                pointers = k_cache + key.to(tl.int64)[:, None] * k_row + offset[None, :]
                block = tl.load(pointers, mask=in_span[:, None] & inside[None, :], other=0.0)
                acc += block.to(tl.float32) * query[None, :]
            before = tl.load(scores + key, mask=in_span, other=0.0)
            tl.store(scores + key, before + tl.sum(acc, 1), mask=in_span)


def plan_scores(
    q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor, queries: Tensor, cut: Cut
) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """The two launches: kernel, grid, positional arguments, compile-time arguments."""
    samples, width = queries.shape
    (keys, _, head_dim), groups = k_cache.shape, q.shape[1] // k_cache.shape[1]
    piece = min(256, triton.next_power_of_2(width))
    summing = (q, window, queries, window.shape[1], width, q.stride(0), q.stride(1))
    scoring = (queries, k_cache, spans, scores, keys, samples, width, k_cache.stride(0), k_cache.stride(1))
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_SAMPLES": triton.next_power_of_2(samples),
        "BLOCK_KEYS": cut.keys,
        "WIDTH": min(cut.width, triton.next_power_of_2(width)),
        "num_warps": cut.warps,
    }
    summing_constants = {"GROUPS": groups, "HEAD_DIM": head_dim, "WIDTH": piece, "num_warps": 2}
    return [
        (sum_queries_kernel, (samples, -(-width // piece)), summing, summing_constants),
        (score_keys_kernel, (-(-keys // cut.keys),), scoring, constants),
    ]


def row_scores_triton(
    q: Tensor, window: Tensor, k_cache: Tensor, spans: Tensor, scores: Tensor, cut: Cut | None = None
) -> None:
    """Launch both kernels (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        q, window, k_cache, spans, scores: as in `row_scores_reference`; 16- or 32-bit.
        cut: launch configuration; chosen by shape if None.
    """
    samples, keys = window.shape[0], k_cache.shape[0]
    if q.shape[0] == 0 or samples == 0 or keys == 0:
        return
    q, k_cache = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k_cache))
    width = k_cache.shape[1] * k_cache.shape[2]
    queries = torch.empty((samples, width), dtype=torch.float32, device=q.device)
    cut = cut or choose_cut(keys, _launch.processors(q.device))
    plan = plan_scores(q, window.contiguous(), k_cache, spans.contiguous(), scores, queries, cut)
    for kernel, grid, arguments, constants in plan:
        kernel[grid](*arguments, **constants)
