# SPDX-License-Identifier: Apache-2.0
"""`dllm::add_rms_norm_quant`: residual add, root-mean-square norm, quantization to FP8, in one pass over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.fp8_format import FP8, GROUP, check_group, empty_scales, quantize_activation
from dllm_compile.kernels.rms_norm import rms_norm_reference


def add_rms_norm_quant_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`sum = residual + x`; `codes, scales = quantize(rms_norm(sum, weight, eps))`.

    Every step rounds to the rows' dtype as the separate operators do: sum, norm before the weight, norm times weight.

    Args:
        x: [M, C], any floating dtype; may be a strided view.
        residual: [M, C], x's dtype.
        weight: [C], x's dtype.
        eps: added to the mean square.
        group: 128 (C must be a multiple), 0 or -1; see `fp8_format`.

    Returns:
        sum [M, C], x's dtype; codes [M, C] float8_e4m3fn; scales fp32 as `fp8_format` says ([M, C/128] with strides
        (1, M) for 128). Rows are contiguous.
    """
    total = (residual + x).contiguous()
    codes, scales = quantize_activation(rms_norm_reference(total, weight, eps), group)
    return total, codes, scales


def check_add_rms_norm(op: str, x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raise ValueError or TypeError unless rows, residual and norm weight belong together."""
    if x.ndim != 2 or residual.shape != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(
            f"{op}: x and residual must be [M, C] and the norm's weight [C], got {[*x.shape]}, {[*residual.shape]}, "
            f"{[*weight.shape]}"
        )
    if residual.dtype != x.dtype or weight.dtype != x.dtype:
        raise TypeError(f"{op}: all must share a dtype, got {x.dtype}, {residual.dtype}, {weight.dtype}")


@torch.library.custom_op("dllm::add_rms_norm_quant", mutates_args=())
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `add_rms_norm_quant_reference`."""
    check_add_rms_norm("add_rms_norm_quant", x, residual, weight)
    check_group("add_rms_norm_quant", group, C=x.shape[1])
    return add_rms_norm_quant_reference(x, residual, weight, eps, group)


@add_rms_norm_quant.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor, Tensor]:
    check_group("add_rms_norm_quant", group, C=x.shape[1])
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=FP8), empty_scales(x, group)


@add_rms_norm_quant.register_kernel("cuda")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor, Tensor]:
    check_add_rms_norm("add_rms_norm_quant", x, residual, weight)
    check_group("add_rms_norm_quant", group, C=x.shape[1])
    if group == GROUP and has_triton():
        from dllm_compile.kernels import add_rms_norm_triton as triton_version

        if triton_version.kernel_takes(residual, quantize=True):
            with torch.cuda.device(x.device):  # Triton launches on the current device
                return triton_version.add_rms_norm_quant_triton(x, residual, weight, eps)
    return add_rms_norm_quant_reference(x, residual, weight, eps, group)
