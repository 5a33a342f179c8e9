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


@triton.jit
def _weights(raw, scale, row_max, row_sum):
    """Weights of one block of raw scores, the new maximum and sum, and what older results are to be multiplied with."""
    new_max = tl.maximum(row_max, tl.max(raw, 1) * scale)
    weights = tl.exp2(raw * scale - new_max[:, None])  # one fused multiply-add a score
    correction = tl.exp2(row_max - new_max)
    return weights, new_max, row_sum * correction + tl.sum(weights, 1), correction


@triton.jit
def _add(products, tracked, key_rows, tracked_end):
    """Add the sum of each key's products [keys, 16], of which the last 8 are zeros, to `tracked`.

    Reductions in memory, although each number has one writer: a branch, or a store of a number a key, makes ptxas
    run the wgmma instructions of the loop one after the other. Each half of the products lies in one warp.
    """
    halves = tl.sum(products.reshape(products.shape[0], 2, products.shape[1] // 2), 2)
    first_half = (tl.arange(0, 2) == 0)[None, :]
    numbers = tl.broadcast_to(tracked + key_rows[:, None], halves.shape)
    tl.atomic_add(numbers, halves, mask=(key_rows < tracked_end)[:, None] & first_half, sem="relaxed")


@triton.jit
def _block(pointers, blocks, start, column, row, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """Rows [start, start + BLOCK) of one head."""
    if DESCRIBED:
        block = blocks.load([start, column])
    else:
        block = tl.load(pointers + (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None] * row)
    return block


@triton.jit
def _block_or_zeros(pointers, blocks, start, column, row, wanted, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """`_block` if `wanted`, else zeros."""
    if DESCRIBED:
        block = blocks.load([tl.where(wanted, start, -BLOCK), column])  # what lies in front of row 0 is read as zeros
    else:
        rows = start + tl.arange(0, BLOCK)
        block = tl.load(pointers + rows.to(tl.int64)[:, None] * row, mask=(wanted & (rows >= 0))[:, None], other=0.0)
    return block


@triton.jit
def stream_keys_behind(
    query,
    k_pointers,
    v_pointers,
    k_blocks,
    v_blocks,
    column,
    k_row,
    v_row,
    k_begin,
    k_end,
    scale,
    row_max,
    row_sum,
    acc,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    TRACKED: tl.constexpr = False,
    probe=None,
    tracked=None,
    tracked_end=0,
):
    """`online_softmax.stream_keys`, values one block behind: the same arguments and results. `scale` is positive."""
    block_keys = tl.arange(0, BLOCK_KEYS)
    whole_blocks = tl.maximum(k_end - k_begin, 0) // BLOCK_KEYS
    # Rounded when they are multiplied: a rounded number that a loop carries would go through shared memory.
    weights = tl.zeros((query.shape[0], BLOCK_KEYS), tl.float32)
    correction = tl.full((query.shape[0],), 1.0, tl.float32)
    if TRACKED:
        probe_columns = probe.T  # out here, since what a loop transposes is multiplied at once
        products = tl.zeros((BLOCK_KEYS, probe.shape[0]), tl.float32)
    for block in tl.range(0, whole_blocks, num_stages=STAGES):
        start = k_begin + block * BLOCK_KEYS
        keys = _block(k_pointers, k_blocks, start, column, k_row, BLOCK_KEYS, DESCRIBED)
        raw = tl.dot(query, keys.T, input_precision=PRECISION)
        # Now the products of the block before are there too.
        acc = acc * correction[:, None]
        before = start - BLOCK_KEYS
        # There is nothing before the first block; its weights are 0, but what they are multiplied with may be NaN.
        values = _block_or_zeros(v_pointers, v_blocks, before, column, v_row, block > 0, BLOCK_KEYS, DESCRIBED)
        acc = tl.dot(weights.to(query.dtype), values, acc, input_precision=PRECISION)
        if TRACKED:
            _add(products, tracked, before + block_keys, tl.where(block > 0, tracked_end, 0))
            products = tl.dot(keys, probe_columns, input_precision=PRECISION)
        weights, row_max, row_sum, correction = _weights(raw, scale, row_max, row_sum)

    start = k_begin + whole_blocks * BLOCK_KEYS
    if whole_blocks > 0:
        before = start - BLOCK_KEYS
        values = _block(v_pointers, v_blocks, before, column, v_row, BLOCK_KEYS, DESCRIBED)
        acc = tl.dot(weights.to(query.dtype), values, acc * correction[:, None], input_precision=PRECISION)
        if TRACKED:
            _add(products, tracked, before + block_keys, tracked_end)
    if start < k_end:
        key_rows = start + block_keys
        in_range = key_rows < k_end
        if DESCRIBED:
            keys = k_blocks.load([start, column])
        else:
            keys = tl.load(k_pointers + key_rows.to(tl.int64)[:, None] * k_row, mask=in_range[:, None], other=0.0)
        raw = tl.dot(query, keys.T, input_precision=PRECISION)
        raw = tl.where(in_range[None, :], raw, -float("inf"))
        if TRACKED:
            products = tl.dot(keys, probe_columns, input_precision=PRECISION)
            _add(products, tracked, key_rows, tl.minimum(tracked_end, k_end))
        if DESCRIBED:
            values = tl.where(in_range[:, None], v_blocks.load([start, column]), 0.0)
        else:
            values = tl.load(v_pointers + key_rows.to(tl.int64)[:, None] * v_row, mask=in_range[:, None], other=0.0)
        exact, row_max, row_sum, correction = _weights(raw, scale, row_max, row_sum)
        acc = tl.dot(exact.to(query.dtype), values, acc * correction[:, None], input_precision=PRECISION)
    return row_max, row_sum, acc
