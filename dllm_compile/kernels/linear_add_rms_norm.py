# SPDX-License-Identifier: Apache-2.0
"""`dllm::linear_add_rms_norm`: product, residual add and the norm that follows, in the model's dtype.

One operator for the reason given in `fp8_linear_add_rms_norm`: for few rows K is cut and the kernel of the add sums the
parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.add_rms_norm_quant import check_add_rms_norm
from dllm_compile.kernels.rms_norm import rms_norm_reference


def linear_add_rms_norm_reference(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`sum = residual + x @ weight.T`; `normed = rms_norm(sum, norm_weight, eps)`.

    Every step rounds to the rows' dtype as the separate operators do. Where K is cut, the sum of the parts is rounded
    to that dtype before the residual is added: only the order of the fp32 sums differs.

    Args:
        x: [M, K], any floating dtype; may be a strided view.
        weight: [N, K], x's dtype.
        residual: [M, N], x's dtype.
        norm_weight: [N], x's dtype.
        eps: added to the mean square.

    Returns:
        sum and normed, [M, N], x's dtype, contiguous.
    """
    total = (residual + F.linear(x, weight)).contiguous()
    return total, rms_norm_reference(total, norm_weight, eps)


def check_linear_add_rms_norm(op: str, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor) -> None:
    """Raise ValueError or TypeError unless the factors, the residual and the norm's weight belong together."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{op}: x must be [M, K] and weight [N, K], got {[*x.shape]} and {[*weight.shape]}")
    if residual.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(f"{op}: residual must be [{x.shape[0]}, {weight.shape[0]}], got {[*residual.shape]}")
    if x.dtype != residual.dtype or weight.dtype != residual.dtype:
        raise TypeError(f"{op}: all must share a dtype, got {x.dtype}, {weight.dtype}, {residual.dtype}")
    check_add_rms_norm(op, residual, residual, norm_weight)


@torch.library.custom_op("dllm::linear_add_rms_norm", mutates_args=())
def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `linear_add_rms_norm_reference`."""
    check_linear_add_rms_norm("linear_add_rms_norm", x, weight, residual, norm_weight)
    return linear_add_rms_norm_reference(x, weight, residual, norm_weight, eps)


@linear_add_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@linear_add_rms_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_linear_add_rms_norm("linear_add_rms_norm", x, weight, residual, norm_weight)
    if has_triton():
        from dllm_compile.kernels import add_rms_norm_triton, linear_triton

        if add_rms_norm_triton.kernel_takes(residual, quantize=False):
            with torch.cuda.device(x.device):  # Triton launches on the current device
                product = linear_triton.linear_or_parts(x, weight)
                return add_rms_norm_triton.add_rms_norm_triton(product, residual, norm_weight, eps)
    return linear_add_rms_norm_reference(x, weight, residual, norm_weight, eps)
