# SPDX-License-Identifier: Apache-2.0
"""`dllm::fp8_linear_add_rms_norm`: FP8 product, residual add and the norm that follows.

One operator, because the best kernel for few rows leaves partial sums, whose number depends on the row count, for the
kernel of the add to sum: a graph that holds for all row counts cannot name them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.add_rms_norm_quant import check_add_rms_norm
from dllm_compile.kernels.fp8_linear import check_fp8_linear, fp8_linear_cuda, fp8_linear_reference
from dllm_compile.kernels.fp8_support import has_fp8
from dllm_compile.kernels.rms_norm import rms_norm_reference


def fp8_linear_add_rms_norm_reference(
    codes: Tensor,
    scales: Tensor,
    weight_codes: Tensor,
    weight_scales: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`sum = residual + fp8_linear(...)`; `normed = rms_norm(sum, norm_weight, eps)`.

    Every step rounds to residual's dtype as the separate operators do. Where K is cut, the sum of the parts is rounded
    to that dtype before the residual is added: only the order of the fp32 sums differs.

    Args:
        codes, scales, weight_codes, weight_scales: as in `fp8_linear_reference`.
        residual: [M, N], any floating dtype.
        norm_weight: [N], residual's dtype.
        eps: added to the mean square.

    Returns:
        sum and normed, [M, N], residual's dtype, contiguous.
    """
    product = fp8_linear_reference(codes, scales, weight_codes, weight_scales, residual.dtype)
    total = (residual + product).contiguous()
    return total, rms_norm_reference(total, norm_weight, eps)


def _check(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, residual: Tensor, norm_weight: Tensor
) -> bool:
    name = "fp8_linear_add_rms_norm"
    grouped = check_fp8_linear(name, codes, scales, weight_codes, weight_scales)
    if residual.shape != (codes.shape[0], weight_codes.shape[0]):
        raise ValueError(
            f"{name}: residual must be [{codes.shape[0]}, {weight_codes.shape[0]}], got {[*residual.shape]}"
        )
    check_add_rms_norm(name, residual, residual, norm_weight)
    return grouped


@torch.library.custom_op("dllm::fp8_linear_add_rms_norm", mutates_args=())
def fp8_linear_add_rms_norm(
    codes: Tensor,
    scales: Tensor,
    weight_codes: Tensor,
    weight_scales: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `fp8_linear_add_rms_norm_reference`."""
    _check(codes, scales, weight_codes, weight_scales, residual, norm_weight)
    return fp8_linear_add_rms_norm_reference(codes, scales, weight_codes, weight_scales, residual, norm_weight, eps)


@fp8_linear_add_rms_norm.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    weight_codes: Tensor,
    weight_scales: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@fp8_linear_add_rms_norm.register_kernel("cuda")
def _(
    codes: Tensor,
    scales: Tensor,
    weight_codes: Tensor,
    weight_scales: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    grouped = _check(codes, scales, weight_codes, weight_scales, residual, norm_weight)
    arguments = (codes, scales, weight_codes, weight_scales)
    if not has_triton() or not has_fp8(codes.device):
        return fp8_linear_add_rms_norm_reference(*arguments, residual, norm_weight, eps)
    from dllm_compile.kernels import add_rms_norm_triton, fp8_linear_triton

    takes = add_rms_norm_triton.kernel_takes(residual, quantize=False)
    tiling = fp8_linear_triton.choose_tiling(codes.shape[0], *weight_codes.shape) if grouped and takes else None
    with torch.cuda.device(codes.device):  # Triton launches on the current device
        if tiling is not None and tiling.parts > 1 and codes.shape[0] > 0:
            product = fp8_linear_triton.fp8_linear_parts(*arguments, tiling)
        else:
            product = fp8_linear_cuda(*arguments, residual.dtype)
        if takes:
            return add_rms_norm_triton.add_rms_norm_triton(product, residual, norm_weight, eps)
    total = (residual + product).contiguous()
    return total, rms_norm_reference(total, norm_weight, eps)
