# SPDX-License-Identifier: Apache-2.0
"""Triton kernel for 16-bit products of few rows with K cut into parts; imported only where Triton is.

The partial sums are left in fp32 for the kernel that adds the residual (`add_rms_norm_triton`). Pays where the weight
has few rows, so that its tiles alone do not fill the processors: the output projection and the down projection.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dllm_compile.kernels import _launch
from dllm_compile.kernels.fp8_linear_triton import limit_parts

_NARROW = 8192  # outputs below which tiles alone do not fill the processors
_LEAST_COLUMNS = 512  # of K a program should at least walk over


class PartTiling(NamedTuple):
    """Launch configuration.

    rows of x, outs (rows of the weight) and width (columns of both) of a step; parts K is cut into; pipeline stages;
    warps; whether the weight is the first operand.
    """

    rows: int
    outs: int
    width: int
    parts: int
    stages: int
    warps: int
    swap: bool


def choose_part_tiling(dtype: torch.dtype, rows: int, outs: int, width: int) -> PartTiling | None:
    """Launch configuration by shape, or None where the library product is faster; measured on an H200, 4096 -> 4096.

    Args:
        dtype: of x and the weight.
        rows: M.
        outs: N.
        width: K.
    """
    if dtype not in (torch.bfloat16, torch.float16) or outs >= _NARROW or rows > 128:
        return None
    if rows <= 32:
        tiling = PartTiling(16 if rows <= 16 else 32, 64, 128, 4, 3, 4, True)
    elif rows <= 64:
        tiling = PartTiling(64, 64, 128, 2, 6, 4, True)
    else:
        tiling = PartTiling(128, 64, 64, 2, 8, 4, False)
    parts = limit_parts(tiling.parts, width, _LEAST_COLUMNS)
    return tiling._replace(parts=parts) if parts > 1 else None


@triton.jit(do_not_specialize=["rows"])
def linear_parts_kernel(
    x,
    weight,
    x_blocks,
    weight_blocks,
    out,
    rows,
    outs,
    width,
    x_row,
    weight_row,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One tile of one part. Grid: (out tiles * PARTS * row tiles,), row tiles fastest.

    `out` is [PARTS, rows, outs] fp32. `x_blocks` and `weight_blocks` are tensor descriptors with
    blocks [ROWS, WIDTH] and [OUTS, WIDTH] if DESCRIBED, else None.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    part = (tl.program_id(0) // row_tiles) % PARTS
    out_tile = tl.program_id(0) // (row_tiles * PARTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = out_tile * OUTS + tl.arange(0, OUTS)
    steps = tl.cdiv(width, WIDTH)
    first, end = steps * part // PARTS, steps * (part + 1) // PARTS
    if SWAP:
        acc = tl.zeros((OUTS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, OUTS), tl.float32)
    for step in tl.range(first, end, num_stages=STAGES):
        start = step * WIDTH
        if DESCRIBED:
            xs = x_blocks.load([row_tile * ROWS, start])
            w = weight_blocks.load([out_tile * OUTS, start])
        else:
            inner = start + tl.arange(0, WIDTH)[None, :]
            x_pointers = x + row.to(tl.int64)[:, None] * x_row + inner
            w_pointers = weight + column.to(tl.int64)[:, None] * weight_row + inner
            xs = tl.load(x_pointers, mask=(row < rows)[:, None] & (inner < width), other=0.0)
            w = tl.load(w_pointers, mask=(column < outs)[:, None] & (inner < width), other=0.0)
        if SWAP:
            acc = tl.dot(w, xs.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(xs, w.T, acc, input_precision="ieee")

    out += part * rows * outs
    if SWAP:
        inside = (row < rows)[None, :] & (column < outs)[:, None]
        tl.store(out + row.to(tl.int64)[None, :] * outs + column[:, None], acc, mask=inside)
    else:
        inside = (row < rows)[:, None] & (column < outs)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * outs + column[None, :], acc, mask=inside)


def plan_linear_parts(
    x: Tensor, weight: Tensor, out: Tensor, tiling: PartTiling
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`linear_parts_kernel[grid](...)`).

    Args:
        x, weight: [M, K] and [N, K], rows with stride 1.
        out: [parts, M, N] fp32, contiguous.
        tiling: launch configuration.
    """
    (rows, width), outs = x.shape, weight.shape[0]
    described = x.element_size() == 2 and _launch.describable(x) and _launch.describable(weight)
    described = described and _launch.has_tensor_descriptors(x.device)
    blocks = tuple(
        TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [block, tiling.width]) if described else None
        for matrix, block in ((x, tiling.rows), (weight, tiling.outs))
    )
    constants = {
        "ROWS": tiling.rows,
        "OUTS": tiling.outs,
        "WIDTH": tiling.width,
        "PARTS": tiling.parts,
        "STAGES": tiling.stages,
        "SWAP": tiling.swap,
        "DESCRIBED": described,
        "num_warps": tiling.warps,
    }
    programs = -(-outs // tiling.outs) * tiling.parts * -(-rows // tiling.rows)
    return (programs,), (x, weight, *blocks, out, rows, outs, width, x.stride(0), weight.stride(0)), constants


def linear_parts_triton(x: Tensor, weight: Tensor, tiling: PartTiling) -> Tensor:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        x: [M, K].
        weight: [N, K], x's dtype.
        tiling: launch configuration; `parts` a power of two, at most ceil(K / `width`).

    Returns:
        [parts, M, N] fp32 partial sums.
    """
    parts = x.new_empty((tiling.parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    if parts.numel() == 0:
        return parts
    x, weight = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (x, weight))
    stage = (tiling.rows + tiling.outs) * tiling.width * x.element_size()
    tiling = tiling._replace(stages=_launch.stages_that_fit(tiling.stages, stage, x.device))
    grid, arguments, constants = plan_linear_parts(x, weight, parts, tiling)
    linear_parts_kernel[grid](*arguments, **constants)
    return parts


def linear_or_parts(x: Tensor, weight: Tensor, config: PartTiling | None = None) -> Tensor:
    """`x @ weight.T` by the route that is fastest for its shape.

    Args:
        x: [M, K].
        weight: [N, K].
        config: launch configuration of the kernel; chosen by shape if None.

    Returns:
        [M, N] in x's dtype, or [parts, M, N] fp32 for `add_rms_norm_triton` to sum.
    """
    tiling = config or choose_part_tiling(x.dtype, x.shape[0], *weight.shape)
    return F.linear(x, weight) if tiling is None else linear_parts_triton(x, weight, tiling)
