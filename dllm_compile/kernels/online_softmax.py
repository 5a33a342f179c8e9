# SPDX-License-Identifier: Apache-2.0
"""Online softmax over a range of keys, shared by the Triton attention kernels; imported only where Triton is."""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dllm_compile.kernels import _launch


def describe_keys(k: Tensor, v: Tensor, keys: int) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Tensor descriptors of `k` and `v` [K, KH, hd] with blocks [keys, hd], or None where they cannot be had.

    16-bit inputs only: fp32 products are not bound by loads.
    """
    described = k.element_size() == 2 and _launch.describable(k) and _launch.describable(v)
    if not described or not _launch.has_tensor_descriptors(k.device):
        return None, None
    width, block_shape = k.shape[1] * k.shape[2], [keys, k.shape[2]]
    k_blocks, v_blocks = (TensorDescriptor(x, [x.shape[0], width], [x.stride(0), 1], block_shape) for x in (k, v))
    return k_blocks, v_blocks


@triton.jit
def fold(scores, values, row_max, row_sum, acc, PRECISION: tl.constexpr):
    """Fold one block of scores (fp32, in units of log2) and its values into the running state."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = acc * correction[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit
def _track(probe, keys, tracked, key_rows, tracked_end, PRECISION: tl.constexpr):
    """Add the product of the probe's rows, summed, with each key to `tracked`; see `stream_keys`.

    Reductions in memory, although each number has one writer: a branch, or a store of a number a key, makes ptxas
    run the wgmma instructions of the loop one after the other.
    """
    products = tl.sum(tl.dot(probe, keys.T, input_precision=PRECISION), 0)
    tl.atomic_add(tracked + key_rows, products, mask=key_rows < tracked_end, sem="relaxed")


@triton.jit
def load_block(pointers, blocks, start, column, row, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """Rows [start, start + BLOCK) of one head of the keys or values; arguments as of `stream_keys`."""
    if DESCRIBED:
        block = blocks.load([start, column])
    else:
        block = tl.load(pointers + (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None] * row)
    return block


@triton.jit
def load_last_keys(pointers, blocks, start, end, column, row, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """`load_block` where rows from `end` on may not exist: what stands there is to be masked."""
    rows = start + tl.arange(0, BLOCK)
    if DESCRIBED:
        block = blocks.load([start, column])
    else:
        block = tl.load(pointers + rows.to(tl.int64)[:, None] * row, mask=(rows < end)[:, None], other=0.0)
    return block


@triton.jit
def load_last_values(pointers, blocks, start, end, column, row, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """`load_last_keys` with zeros from row `end` on: a weight of zero does not hide a NaN."""
    rows = start + tl.arange(0, BLOCK)
    block = load_last_keys(pointers, blocks, start, end, column, row, BLOCK, DESCRIBED)
    if DESCRIBED:
        block = tl.where((rows < end)[:, None], block, 0.0)
    return block


@triton.jit
def stream_keys(
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
    TRACKED: tl.constexpr = False,
    probe=None,
    tracked=None,
    tracked_end=0,
    HIDDEN: tl.constexpr = False,
    hidden=None,
):
    """`state` (row_max in units of log2, row_sum, acc) of `query`'s rows after the keys [k_begin, k_end) as well.

    Blocks that lie wholly inside the range need no mask and are pipelined; what is left over is one masked block. A
    key outside the range is never part of a product, so a NaN there reaches nobody.

    `cache` is (k_pointers, v_pointers, k_blocks, v_blocks, column, k_row, v_row): pointers to key row 0 of one head,
    [1, hd]; tensor descriptors with blocks [BLOCK_KEYS, hd] if DESCRIBED, else None, in which the head begins at
    `column`; and the strides of a row. `scale` includes log2(e).

    If TRACKED, `tracked[j] += sum over the rows of probe [16, hd] of probe . k[j]` for the keys in front of
    `tracked_end`; 0 tracks none.

    If HIDDEN, keys whose byte of `hidden` is not 0 are left out. All keys of a block may be: then `row_max` must be
    finite from the start.
    """
    k_pointers, v_pointers, k_blocks, v_blocks, column, k_row, v_row = cache
    row_max, row_sum, acc = state
    block_keys = tl.arange(0, BLOCK_KEYS)
    whole_blocks = tl.maximum(k_end - k_begin, 0) // BLOCK_KEYS
    if HIDDEN:  # a block ahead: so short a load is not pipelined
        unseen = tl.load(hidden + k_begin + block_keys, mask=k_begin + block_keys < k_end, other=1)
    for block in tl.range(0, whole_blocks, num_stages=STAGES):
        start = k_begin + block * BLOCK_KEYS
        keys = load_block(k_pointers, k_blocks, start, column, k_row, BLOCK_KEYS, DESCRIBED)
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
        if TRACKED:
            _track(probe, keys, tracked, start + block_keys, tracked_end, PRECISION)
        if HIDDEN:
            scores = tl.where((unseen == 0)[None, :], scores, -float("inf"))
            ahead = start + BLOCK_KEYS + block_keys
            unseen = tl.load(hidden + ahead, mask=ahead < k_end, other=1)
        values = load_block(v_pointers, v_blocks, start, column, v_row, BLOCK_KEYS, DESCRIBED)
        row_max, row_sum, acc = fold(scores, values, row_max, row_sum, acc, PRECISION)

    start = k_begin + whole_blocks * BLOCK_KEYS
    if start < k_end:
        key_rows = start + block_keys
        in_range = key_rows < k_end
        if HIDDEN:
            in_range &= unseen == 0
        keys = load_last_keys(k_pointers, k_blocks, start, k_end, column, k_row, BLOCK_KEYS, DESCRIBED)
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
        scores = tl.where(in_range[None, :], scores, -float("inf"))
        if TRACKED:
            _track(probe, keys, tracked, key_rows, tl.minimum(tracked_end, k_end), PRECISION)
        values = load_last_values(v_pointers, v_blocks, start, k_end, column, v_row, BLOCK_KEYS, DESCRIBED)
        row_max, row_sum, acc = fold(scores, values, row_max, row_sum, acc, PRECISION)
    return row_max, row_sum, acc


@triton.jit
def merge_parts(
    maxima, sums, accs, step, acc_step, in_tile, PARTS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """The state of ROWS rows over all keys, from their states over PARTS ranges of keys, in ascending order.

    `maxima`, `sums` [ROWS] and `accs` [ROWS, DIM] point into part 0; other parts lie `step` and `acc_step` behind.
    Loads bypass the L1 cache: other programs wrote what they read.
    """
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        row_max = tl.maximum(
            row_max, tl.load(maxima + part * step, mask=in_tile, other=-float("inf"), cache_modifier=".cg")
        )
    base = tl.where(row_max == -float("inf"), 0.0, row_max)  # a row that sees no key
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    # Four loads of few rows are in flight at once; of more rows the registers hold one.
    for part in tl.range(0, PARTS, loop_unroll_factor=4 if ROWS <= 32 else 1):
        part_max = tl.load(maxima + part * step, mask=in_tile, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(part_max - base)
        row_sum += weight * tl.load(sums + part * step, mask=in_tile, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(accs + part * acc_step, mask=in_tile[:, None], other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * part_acc
    return row_sum, acc
