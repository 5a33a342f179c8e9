# SPDX-License-Identifier: Apache-2.0
"""`dllm::linear_add_rms_norm_quant`: product, residual add, the norm that follows, quantization to FP8.

One operator for the reason given in `fp8_linear_add_rms_norm`: for few rows K is cut and the kernel of the add sums the
parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.add_rms_norm_quant import add_rms_norm_quant_reference
from dllm_compile.kernels.fp8_format import FP8, GROUP, check_group, empty_scales
from dllm_compile.kernels.linear_add_rms_norm import check_linear_add_rms_norm


def linear_add_rms_norm_quant_reference(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`sum = residual + x @ weight.T`; `codes, scales = quantize(rms_norm(sum, norm_weight, eps))`.

    Roundings as in `linear_add_rms_norm_reference` and `add_rms_norm_quant_reference`.

    Args:
        x: [M, K], any floating dtype; may be a strided view.
        weight: [N, K], x's dtype.
        residual: [M, N], x's dtype.
        norm_weight: [N], x's dtype.
        eps: added to the mean square.
        group: 128 (N must be a multiple), 0 or -1; see `fp8_format`.

    Returns:
        sum [M, N], x's dtype; codes [M, N] float8_e4m3fn; scales fp32 as `fp8_format` says ([M, N/128] with strides
        (1, M) for 128). Rows are contiguous.
    """
    return add_rms_norm_quant_reference(F.linear(x, weight), residual, norm_weight, eps, group)


def _check(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, group: int) -> None:
    check_linear_add_rms_norm("linear_add_rms_norm_quant", x, weight, residual, norm_weight)
    check_group("linear_add_rms_norm_quant", group, N=weight.shape[0])


@torch.library.custom_op("dllm::linear_add_rms_norm_quant", mutates_args=())
def linear_add_rms_norm_quant(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `linear_add_rms_norm_quant_reference`."""
    _check(x, weight, residual, norm_weight, group)
    return linear_add_rms_norm_quant_reference(x, weight, residual, norm_weight, eps, group)


@linear_add_rms_norm_quant.register_fake
def _(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_group("linear_add_rms_norm_quant", group, N=weight.shape[0])
    scales = empty_scales(residual, group)
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape, dtype=FP8), scales


@linear_add_rms_norm_quant.register_kernel("cuda")
def _(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, residual, norm_weight, group)
    if group == GROUP and has_triton():
        from dllm_compile.kernels import add_rms_norm_triton, linear_triton

        if add_rms_norm_triton.kernel_takes(residual, quantize=True):
            with torch.cuda.device(x.device):  # Triton launches on the current device
                product = linear_triton.linear_or_parts(x, weight)
                return add_rms_norm_triton.add_rms_norm_quant_triton(product, residual, norm_weight, eps)
    return linear_add_rms_norm_quant_reference(x, weight, residual, norm_weight, eps, group)
