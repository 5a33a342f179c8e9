# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of residual add and norm, with or without quantization; imported only where Triton is.

One row a program. What is added to the residual is a finished product in the rows' dtype, or fp32 partial sums of one
(of a matrix product whose K was split): the kernel that reads them adds them up, in a fixed order, and none of its own
is launched for that. Used by `add_rms_norm_quant`, `linear_add_rms_norm(_quant)` and `fp8_linear_add_rms_norm`.
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

_MOST_COLUMNS = 32768  # of a row held in registers


class RowConfig(NamedTuple):
    """Launch configuration: warps of a row."""

    warps: int


def kernel_takes(rows: Tensor, quantize: bool) -> bool:
    """Whether the kernel handles rows of this width and dtype, and the device its codes."""
    known = rows.dtype in (torch.bfloat16, torch.float16, torch.float32) and 0 < rows.shape[1] <= _MOST_COLUMNS
    return known and (not quantize or has_fp8(rows.device))


def choose_row_config(rows: int, width: int) -> RowConfig:
    """Launch configuration by shape, from H200 measurements of bf16 rows of 4,096.

    Few rows leave processors idle: a row is then spread over many threads. Many rows hide each other's latency.
    """
    warps = 16 if rows <= 256 else 4
    return RowConfig(max(1, min(warps, triton.next_power_of_2(width) // 256)))


@triton.jit
def _load_row(pointers, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A row as fp32, zero beyond its width."""
    if WIDTH == BLOCK:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _store_row(pointers, value, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if WIDTH == BLOCK:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    product,
    residual,
    weight,
    total,
    normed,
    scales,
    eps,
    rows,
    product_row,
    residual_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """One row. Grid: (M,).

    `product` is [M, WIDTH] if PARTS is 0, else [PARTS, M, WIDTH] fp32, contiguous. `normed` holds codes if QUANTIZE.
    `scales` is [WIDTH / 128, M], contiguous, or None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    dtype = total.dtype.element_ty
    if PARTS == 0:
        added = _load_row(product + row * product_row + column, column, WIDTH, BLOCK)
    else:
        part = product + row * WIDTH + column
        added = _load_row(part, column, WIDTH, BLOCK)
        for index in tl.static_range(1, PARTS):
            added += _load_row(part + index * WIDTH * rows, column, WIDTH, BLOCK)
        added = added.to(dtype).to(tl.float32)  # as a finished product is rounded
    summed = _load_row(residual + row * residual_row + column, column, WIDTH, BLOCK) + added
    summed = summed.to(dtype)
    _store_row(total + row * WIDTH + column, summed, column, WIDTH, BLOCK)

    wide = summed.to(tl.float32)
    mean_square = tl.div_rn(tl.sum(wide * wide, 0), WIDTH * 1.0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    gain = _load_row(weight + column, column, WIDTH, BLOCK)
    value = ((wide * factor).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
    if QUANTIZE:
        GROUPS: tl.constexpr = BLOCK // GROUP_SIZE
        scaled, scale = scale_groups(tl.reshape(value, (GROUPS, GROUP_SIZE)))
        group = tl.arange(0, GROUPS)
        place = scales + group.to(tl.int64) * rows + row
        tl.store(place, scale, mask=group < WIDTH // GROUP_SIZE)
        value = tl.reshape(scaled, (BLOCK,))
    _store_row(normed + row * WIDTH + column, value, column, WIDTH, BLOCK)


def plan_add_rms_norm(
    product: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor,
    normed: Tensor,
    scales: Tensor | None,
    config: RowConfig,
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments and compile-time arguments of one launch (`add_rms_norm_kernel[grid](...)`).

    Args:
        product: [M, C], or [P, M, C] fp32 contiguous partial sums with P a power of two.
        residual: [M, C].
        weight: [C], contiguous.
        eps: added to the mean square.
        total, normed: [M, C] contiguous; `normed` takes the codes if `scales` is given.
        scales: [M, C/128] fp32 with strides (1, M), or None.
        config: launch configuration.
    """
    rows, width = residual.shape
    parts = 0 if product.ndim == 2 else product.shape[0]
    sizes = (rows, product.stride(-2), residual.stride(0))
    arguments = (product, residual, weight, total, normed, scales, eps, *sizes)
    constants = {
        "WIDTH": width,
        "BLOCK": triton.next_power_of_2(width),
        "PARTS": parts,
        "QUANTIZE": scales is not None,
        "num_warps": config.warps,
        # The product and the square are rounded before they are added, as the reference's are.
        "enable_fp_fusion": False,
    }
    return (rows,), arguments, constants


def add_rms_norm_triton(
    product: Tensor, residual: Tensor, weight: Tensor, eps: float, config: RowConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Launch without quantization (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        product: [M, C], or [P, M, C] fp32 contiguous partial sums.
        residual, weight, eps: as in `add_rms_norm_quant_reference`.
        config: launch configuration; chosen by shape if None.

    Returns:
        sum and normed, [M, C], residual's dtype, contiguous.
    """
    total, normed = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(product, residual, weight, eps, total, normed, None, config)
    return total, normed


def add_rms_norm_quant_triton(
    product: Tensor, residual: Tensor, weight: Tensor, eps: float, config: RowConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch with quantization in groups of 128; arguments as in `add_rms_norm_triton`.

    Returns:
        sum [M, C], codes [M, C], scales [M, C/128] with strides (1, M).
    """
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    codes = torch.empty_like(total, dtype=FP8)
    scales = empty_scales(residual, GROUP)
    _launch(product, residual, weight, eps, total, codes, scales, config)
    return total, codes, scales


def _launch(
    product: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor,
    normed: Tensor,
    scales: Tensor | None,
    config: RowConfig | None,
) -> None:
    if residual.shape[0] == 0:
        return
    product, residual = (x if x.stride(-1) == 1 else x.contiguous() for x in (product, residual))
    config = config or choose_row_config(*residual.shape)
    plan = plan_add_rms_norm(product, residual, weight.contiguous(), eps, total, normed, scales, config)
    grid, arguments, constants = plan
    add_rms_norm_kernel[grid](*arguments, **constants)
