# SPDX-License-Identifier: Apache-2.0
"""Online softmax that works while the tensor cores multiply; imported only where Triton is.

`online_softmax.stream_keys` waits for a block's product with the values only when the next block's scores are there,
but has nothing else to do meanwhile: softmax and products take turns. Here a block's weights are multiplied with their
values one block later, at the same time as the softmax of the next block. (FlashAttention-3, Section 3.2, overlaps them
in this order within a warp group.)
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dllm_compile.kernels.online_softmax import load_block, load_last_keys, load_last_values


@triton.jit
def _weights(raw, scale, row_max, row_sum):
    """Weights of one block of raw scores, the new maximum and sum, and what older results are to be multiplied with."""
    new_max = tl.maximum(row_max, tl.max(raw, 1) * scale)
    weights = tl.exp2(raw * scale - new_max[:, None])  # one fused multiply-add a score
    correction = tl.exp2(row_max - new_max)
    return weights, new_max, row_sum * correction + tl.sum(weights, 1), correction


@triton.jit
def _block_or_zeros(pointers, blocks, start, column, row, wanted, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """`load_block` if `wanted`, else zeros."""
    if DESCRIBED:
        block = blocks.load([tl.where(wanted, start, -BLOCK), column])  # what lies in front of row 0 is read as zeros
    else:
        rows = start + tl.arange(0, BLOCK)
        block = tl.load(pointers + rows.to(tl.int64)[:, None] * row, mask=(wanted & (rows >= 0))[:, None], other=0.0)
    return block


@triton.jit
def stream_keys_behind(
    query,
    cache,
    k_begin,
    k_end,
    scale,
    state,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """`online_softmax.stream_keys`, values one block behind: the same arguments and results. `scale` is positive.

    There are no scores: with them it was slower than the other (H200, 32 samples of 128 rows: 290 us against 278).
    """
    k_pointers, v_pointers, k_blocks, v_blocks, column, k_row, v_row = cache
    row_max, row_sum, acc = state
    whole_blocks = tl.maximum(k_end - k_begin, 0) // BLOCK_KEYS
    # Rounded when they are multiplied: a rounded number that a loop carries would go through shared memory.
    weights = tl.zeros((query.shape[0], BLOCK_KEYS), tl.float32)
    correction = tl.full((query.shape[0],), 1.0, tl.float32)
    for block in tl.range(0, whole_blocks, num_stages=STAGES):
        start = k_begin + block * BLOCK_KEYS
        keys = load_block(k_pointers, k_blocks, start, column, k_row, BLOCK_KEYS, DESCRIBED)
        raw = tl.dot(query, keys.T, input_precision=PRECISION)
        # Now the products of the block before are there too.
        acc = acc * correction[:, None]
        before = start - BLOCK_KEYS
        # There is nothing before the first block; its weights are 0, but what they are multiplied with may be NaN.
        values = _block_or_zeros(v_pointers, v_blocks, before, column, v_row, block > 0, BLOCK_KEYS, DESCRIBED)
        acc = tl.dot(weights.to(query.dtype), values, acc, input_precision=PRECISION)
        weights, row_max, row_sum, correction = _weights(raw, scale, row_max, row_sum)

    start = k_begin + whole_blocks * BLOCK_KEYS
    if whole_blocks > 0:
        before = start - BLOCK_KEYS
        values = load_block(v_pointers, v_blocks, before, column, v_row, BLOCK_KEYS, DESCRIBED)
        acc = tl.dot(weights.to(query.dtype), values, acc * correction[:, None], input_precision=PRECISION)
    if start < k_end:
        in_range = start + tl.arange(0, BLOCK_KEYS) < k_end
        keys = load_last_keys(k_pointers, k_blocks, start, k_end, column, k_row, BLOCK_KEYS, DESCRIBED)
        raw = tl.dot(query, keys.T, input_precision=PRECISION)
        raw = tl.where(in_range[None, :], raw, -float("inf"))
        values = load_last_values(v_pointers, v_blocks, start, k_end, column, v_row, BLOCK_KEYS, DESCRIBED)
        exact, row_max, row_sum, correction = _weights(raw, scale, row_max, row_sum)
        acc = tl.dot(exact.to(query.dtype), values, acc * correction[:, None], input_precision=PRECISION)
    return row_max, row_sum, acc
