# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dllm::swiglu_quant`; imported only where Triton is.

A program takes a rectangle of rows and whole groups of columns: it reads gate and up once and writes codes and scales.
Without `up` it quantizes `gate` as it is (`dllm::quantize`).
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_compile.kernels.fp8_format import FP8, GROUP, empty_scales
from dllm_compile.kernels.fp8_support import has_fp8
from dllm_compile.kernels.group_scale import GROUP_SIZE, scale_groups


class Rectangle(NamedTuple):
    """Launch configuration: rows and columns (a power of two times 128) of a program, warps."""

    rows: int
    columns: int
    warps: int


def kernel_takes(gate: Tensor) -> bool:
    """Whether the kernel handles this dtype, and the device its codes."""
    return gate.dtype in (torch.bfloat16, torch.float16, torch.float32) and has_fp8(gate.device)


def choose_rectangle(rows: int) -> Rectangle:
    """Launch configuration by shape, from H200 measurements of bf16 rows of 12,288."""
    return Rectangle(8, 128, 4) if rows <= 1024 else Rectangle(8, 512, 8)


@triton.jit(do_not_specialize=["rows"])
def swiglu_quant_kernel(
    gate,
    up,
    codes,
    scales,
    rows,
    width,
    gate_row,
    up_row,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
):
    """One rectangle. Grid: (row tiles * column tiles,). `codes` [rows, width], `scales` [width / 128, rows]."""
    GROUPS: tl.constexpr = COLUMNS // GROUP_SIZE
    row_tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(gate + row[:, None] * gate_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        dtype = gate.dtype.element_ty
        factor = tl.load(up + row[:, None] * up_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        silu = (value / (1.0 + tl.exp(-value))).to(dtype).to(tl.float32)
        value = (silu * factor).to(dtype).to(tl.float32)
    scaled, scale = scale_groups(tl.reshape(value, (ROWS * GROUPS, GROUP_SIZE)))
    scaled = tl.reshape(scaled, (ROWS, COLUMNS))
    tl.store(codes + row[:, None] * width + column[None, :], scaled.to(codes.dtype.element_ty), mask=inside)
    group = column_tile * GROUPS + tl.arange(0, GROUPS)
    known = (row < rows)[:, None] & (group < width // GROUP_SIZE)[None, :]
    place = scales + group.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(place, tl.reshape(scale, (ROWS, GROUPS)), mask=known)


def plan_swiglu_quant(
    gate: Tensor, up: Tensor | None, codes: Tensor, scales: Tensor, rectangle: Rectangle
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`swiglu_quant_kernel[grid](...)`).

    Args:
        gate, up: [M, F], rows with stride 1; `up` None for `gate` as it is.
        codes: [M, F] contiguous.
        scales: [M, F/128] fp32 with strides (1, M).
        rectangle: launch configuration.
    """
    rows, width = gate.shape
    columns = min(rectangle.columns, triton.next_power_of_2(width))
    row_tiles, column_tiles = -(-rows // rectangle.rows), -(-width // columns)
    strides = (gate.stride(0), gate.stride(0) if up is None else up.stride(0))
    constants = {
        "ROWS": rectangle.rows,
        "COLUMNS": columns,
        "GATED": up is not None,
        "num_warps": rectangle.warps,
    }
    arguments = (gate, up, codes, scales, rows, width, *strides, column_tiles)
    return (row_tiles * column_tiles,), arguments, constants


def swiglu_quant_triton(gate: Tensor, up: Tensor | None, config: Rectangle | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        gate, up: as in `swiglu_quant_reference`, F a multiple of 128; `up` None quantizes `gate`.
        config: launch configuration; chosen by shape if None.

    Returns:
        codes [M, F] and scales [M, F/128] with strides (1, M).
    """
    codes = gate.new_empty(gate.shape, dtype=FP8)
    scales = empty_scales(gate, GROUP)
    if gate.numel() == 0:
        return codes, scales
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    up = up if up is None or up.stride(1) == 1 else up.contiguous()
    rectangle = config or choose_rectangle(gate.shape[0])
    grid, arguments, constants = plan_swiglu_quant(gate, up, codes, scales, rectangle)
    swiglu_quant_kernel[grid](*arguments, **constants)
    return codes, scales
