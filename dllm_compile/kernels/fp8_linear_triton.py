# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `dllm::fp8_linear` for few rows; imported only where Triton is.

Reading the weight bounds these products, so everything serves keeping its reads in flight. With up to 32 rows the
weight is the first operand of the tensor cores' product (its rows are the instruction's 64-row side, however few rows x
has). Neighbouring programs start their walk along K at different groups, so that they do not all read the same columns
at once. A weight with few rows is cut along K too, and the partial sums are left for the next kernel to add.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dllm_compile.kernels import _launch
from dllm_compile.kernels.group_scale import GROUP_SIZE

_NARROW = 8192  # outputs below which tiles alone do not fill the processors
_LEAST_STEPS = 8  # groups of K a program should at least walk over


class Tiling(NamedTuple):
    """Launch configuration.

    rows of x and outs (rows of the weight, 64 or 128) of a tile; parts K is cut into; pipeline stages; warps; whether
    the weight is the first operand; by how many groups the start along K moves from tile to tile.
    """

    rows: int
    outs: int
    parts: int
    stages: int
    warps: int
    swap: bool
    rotate: int


ANY_ROWS = Tiling(128, 128, 1, 4, 8, False, 3)
"""For many rows where no library product is to be had."""


def choose_tiling(rows: int, outs: int, width: int) -> Tiling | None:
    """Launch configuration by shape, or None where a library product is faster, from H200 measurements.

    Measured: 4096 -> 24576 and 12288 -> 4096. Tiles of other shapes follow from the same counts of programs.

    Args:
        rows: M.
        outs: N.
        width: K.
    """
    if outs >= _NARROW:
        # 128 x 128 pieces of the weight, two and a half a processor; smaller ones where those would be too few.
        piece = 128 if outs >= 2 * _NARROW else 64
        if rows <= 32:
            return Tiling(16 if rows <= 16 else 32, piece, 1, 4, 4, True, 3)
        return Tiling(64, piece, 1, 4, 4, False, 3) if rows <= 64 else None
    if rows <= 16:
        tiling = Tiling(16, 128, 8, 4, 4, True, 0)
    elif rows <= 64:
        tiling = Tiling(32 if rows <= 32 else 64, 128, 8, 3, 4, True, 3)
    elif rows <= 128:
        tiling = Tiling(128, 64, 4, 4, 4, False, 3)
    else:
        return None
    return tiling._replace(parts=limit_parts(tiling.parts, width // GROUP_SIZE.value, _LEAST_STEPS))


def limit_parts(parts: int, steps: int, least: int) -> int:
    """The largest power of two up to `parts` that leaves each part `least` of the steps, or 1."""
    while parts > 1 and steps // parts < least:
        parts //= 2
    return parts


# Not one program text for row counts that are multiples of 16 and another for the rest: nothing would come of it.
@triton.jit(do_not_specialize=["rows", "scale_group"])
def fp8_linear_kernel(
    codes,
    weight,
    code_blocks,
    weight_blocks,
    scales,
    weight_scales,
    out,
    rows,
    outs,
    groups,
    codes_row,
    weight_row,
    scale_group,
    weight_scale_row,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    ROTATE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One tile of one part. Grid: (out tiles * PARTS * row tiles,), row tiles fastest: they share a weight tile.

    `out` is [PARTS, rows, outs], fp32 if PARTS > 1. `code_blocks` and `weight_blocks` are tensor descriptors with
    blocks [ROWS, 128] and [OUTS, 128] if DESCRIBED, else None. PARTS <= groups.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    part = (tl.program_id(0) // row_tiles) % PARTS
    out_tile = tl.program_id(0) // (row_tiles * PARTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = out_tile * OUTS + tl.arange(0, OUTS)
    inside = row < rows
    first = groups * part // PARTS
    count = groups * (part + 1) // PARTS - first
    turn = ((out_tile * row_tiles + row_tile) * ROTATE) % count

    # The scales of a step are loaded a step ahead and not touched until then: nothing waits for them.
    row_scales = scales + row
    tile_scales = weight_scales + (out_tile * OUTS // GROUP_SIZE) * weight_scale_row
    row_scale = tl.load(row_scales + (first + turn) * scale_group, mask=inside, other=0.0)
    tile_scale = tl.load(tile_scales + first + turn)
    if SWAP:
        acc = tl.zeros((OUTS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, OUTS), tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        turned = step + turn
        group = first + tl.where(turned >= count, turned - count, turned)
        following = first + tl.where(turned + 1 >= count, turned + 1 - count, turned + 1)
        start = group * GROUP_SIZE
        if DESCRIBED:
            x = code_blocks.load([row_tile * ROWS, start])
            w = weight_blocks.load([out_tile * OUTS, start])
        else:
            inner = start + tl.arange(0, GROUP_SIZE)[None, :]
            x = tl.load(codes + row.to(tl.int64)[:, None] * codes_row + inner, mask=inside[:, None], other=0.0)
            w = tl.load(weight + column.to(tl.int64)[:, None] * weight_row + inner)
        next_row_scale = tl.load(row_scales + following * scale_group, mask=inside, other=0.0)
        next_tile_scale = tl.load(tile_scales + following)
        if SWAP:
            acc += tl.dot(w, x.T) * (row_scale * tile_scale)[None, :]
        else:
            acc += tl.dot(x, w.T) * (row_scale * tile_scale)[:, None]
        row_scale, tile_scale = next_row_scale, next_tile_scale

    out += part * rows * outs
    if SWAP:
        place = out + row.to(tl.int64)[None, :] * outs + column[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=inside[None, :])
    else:
        place = out + row.to(tl.int64)[:, None] * outs + column[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def sum_parts_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """`out[i] = sum over p of parts[p, i]`, in the order of p. Grid: (ceil(size / BLOCK),)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    total = tl.load(parts + index, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + index, mask=inside, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def plan_fp8_linear(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, out: Tensor, tiling: Tiling
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`fp8_linear_kernel[grid](...)`).

    Args:
        codes, weight_codes: [M, K] and [N, K], rows with stride 1; K and N multiples of 128.
        scales: [M, K/128], columns with stride 1.
        weight_scales: [N/128, K/128], rows with stride 1.
        out: [M, N], or [parts, M, N] fp32, contiguous.
        tiling: launch configuration.
    """
    (rows, width), outs = codes.shape, weight_codes.shape[0]
    described = _launch.describable(codes) and _launch.describable(weight_codes)
    described = described and _launch.has_tensor_descriptors(codes.device)
    blocks = tuple(
        TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [block, GROUP_SIZE.value]) if described else None
        for matrix, block in ((codes, tiling.rows), (weight_codes, tiling.outs))
    )
    strides = (codes.stride(0), weight_codes.stride(0), scales.stride(1), weight_scales.stride(0))
    sizes = (rows, outs, width // GROUP_SIZE.value)
    constants = {
        "ROWS": tiling.rows,
        "OUTS": tiling.outs,
        "PARTS": tiling.parts,
        "STAGES": tiling.stages,
        "SWAP": tiling.swap,
        "ROTATE": tiling.rotate,
        "DESCRIBED": described,
        "num_warps": tiling.warps,
    }
    programs = outs // tiling.outs * tiling.parts * -(-rows // tiling.rows)
    return (programs,), (codes, weight_codes, *blocks, scales, weight_scales, out, *sizes, *strides), constants


def fp8_linear_parts(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, tiling: Tiling
) -> Tensor:
    """Partial sums [tiling.parts, M, N] fp32, to be added by the next kernel; arguments as in `fp8_linear_triton`."""
    parts = codes.new_empty((tiling.parts, codes.shape[0], weight_codes.shape[0]), dtype=torch.float32)
    _product(codes, scales, weight_codes, weight_scales, parts, tiling)
    return parts


def fp8_linear_triton(
    codes: Tensor,
    scales: Tensor,
    weight_codes: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    config: Tiling | None = None,
) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter), and a sum if K was cut.

    Args:
        codes, scales, weight_codes, weight_scales, dtype: as in `fp8_linear_reference`, groups of 128.
        config: launch configuration; chosen by shape if None.

    Returns:
        [M, N], `dtype`, contiguous.
    """
    rows, outs = codes.shape[0], weight_codes.shape[0]
    out = codes.new_empty((rows, outs), dtype=dtype)
    if out.numel() == 0:
        return out
    tiling = config or choose_tiling(rows, weight_codes.shape[0], weight_codes.shape[1]) or ANY_ROWS
    if tiling.parts == 1:
        _product(codes, scales, weight_codes, weight_scales, out, tiling)
        return out
    parts = fp8_linear_parts(codes, scales, weight_codes, weight_scales, tiling)
    sum_parts_kernel[(-(-out.numel() // 1024),)](parts, out, out.numel(), PARTS=tiling.parts, BLOCK=1024)
    return out


def _product(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, out: Tensor, tiling: Tiling
) -> None:
    codes, weight_codes, weight_scales = (
        x if x.stride(1) == 1 else x.contiguous() for x in (codes, weight_codes, weight_scales)
    )
    scales = scales if scales.stride(0) == 1 else scales.t().contiguous().t()
    if tiling.parts > codes.shape[1] // GROUP_SIZE.value:
        raise ValueError(f"fp8_linear: K = {codes.shape[1]} has too few groups of 128 for {tiling.parts} parts")
    stage = (tiling.rows + tiling.outs) * GROUP_SIZE.value
    tiling = tiling._replace(stages=_launch.stages_that_fit(tiling.stages, stage, codes.device))
    grid, arguments, constants = plan_fp8_linear(codes, scales, weight_codes, weight_scales, out, tiling)
    fp8_linear_kernel[grid](*arguments, **constants)
