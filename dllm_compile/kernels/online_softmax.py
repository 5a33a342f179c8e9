# SPDX-License-Identifier: Apache-2.0
"""Online softmax over a range of keys, shared by the Triton attention kernels; imported only where Triton is."""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fold(scores, values, row_max, row_sum, acc, PRECISION: tl.constexpr):
    """Fold one block of scores (fp32, in units of log2) and its values into the running state."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = acc * correction[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit
def stream_keys(
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
):
    """The state (row_max in units of log2, row_sum, acc) of `query`'s rows after the keys [k_begin, k_end).

    Blocks that lie wholly inside the range need no mask and are pipelined; what is left over is one masked block. A
    key outside the range is never part of a product, so a NaN there reaches nobody.

    `k_pointers` and `v_pointers` point to key row 0 of one head, [1, hd]; `k_blocks` and `v_blocks` are tensor
    descriptors with blocks [BLOCK_KEYS, hd] if DESCRIBED, else None, in which the head begins at `column`. `scale`
    includes log2(e).
    """
    block_keys = tl.arange(0, BLOCK_KEYS)
    whole_blocks = tl.maximum(k_end - k_begin, 0) // BLOCK_KEYS
    for block in tl.range(0, whole_blocks, num_stages=STAGES):
        start = k_begin + block * BLOCK_KEYS
        if DESCRIBED:
            keys = k_blocks.load([start, column])
        else:
            keys = tl.load(k_pointers + (start + block_keys).to(tl.int64)[:, None] * k_row)
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
        if DESCRIBED:
            values = v_blocks.load([start, column])
        else:
            values = tl.load(v_pointers + (start + block_keys).to(tl.int64)[:, None] * v_row)
        row_max, row_sum, acc = _fold(scores, values, row_max, row_sum, acc, PRECISION)

    start = k_begin + whole_blocks * BLOCK_KEYS
    if start < k_end:
        key_rows = start + block_keys
        in_range = key_rows < k_end
        keys = tl.load(k_pointers + key_rows.to(tl.int64)[:, None] * k_row, mask=in_range[:, None], other=0.0)
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
        scores = tl.where(in_range[None, :], scores, -float("inf"))
        values = tl.load(v_pointers + key_rows.to(tl.int64)[:, None] * v_row, mask=in_range[:, None], other=0.0)
        row_max, row_sum, acc = _fold(scores, values, row_max, row_sum, acc, PRECISION)
    return row_max, row_sum, acc
