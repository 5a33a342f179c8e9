# SPDX-License-Identifier: Apache-2.0
"""`dllm::quantized_linear`: a linear layer in FP8 that quantizes its own input; the canonical form of one.

Passes look for it and put `fp8_linear` behind the operator that makes the input (`passes/fuse_quantization.py`). It
runs as it is where they do not come: on rectangular batches, and while errors are measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile.kernels.fp8_format import FP8, check_group, quantize_activation


@torch.library.custom_op("dllm::quantized_linear", mutates_args=())
def quantized_linear(x: Tensor, weight_codes: Tensor, weight_scales: Tensor, group: int) -> Tensor:
    """`fp8_linear(quantize(x), weight)`.

    Args:
        x: [*, K] in fp32, bf16 or fp16.
        weight_codes: [N, K] float8_e4m3fn.
        weight_scales: fp32, [N/128, K/128], [N, 1] or [1, 1] as `group` says.
        group: 128, 0 or -1 (see `fp8_format`). With -1 the scale of the input is one number for all rows together.

    Returns:
        [*, N], x's dtype, contiguous.
    """
    _check(x, weight_codes, group)
    codes, scales = quantize_activation(x.reshape(-1, x.shape[-1]), group)
    rows = torch.ops.dllm.fp8_linear(codes, scales, weight_codes, weight_scales, x.dtype)
    return rows.view(*x.shape[:-1], weight_codes.shape[0])


@quantized_linear.register_fake
def _(x: Tensor, weight_codes: Tensor, weight_scales: Tensor, group: int) -> Tensor:
    _check(x, weight_codes, group)
    return x.new_empty((*x.shape[:-1], weight_codes.shape[0]))


def _check(x: Tensor, weight_codes: Tensor, group: int) -> None:
    if weight_codes.ndim != 2 or weight_codes.dtype != FP8 or x.shape[-1] != weight_codes.shape[1]:
        raise ValueError(
            f"quantized_linear: x must be [*, K] and the weight's codes [N, K] {FP8}, got {[*x.shape]} and "
            f"{[*weight_codes.shape]} {weight_codes.dtype}"
        )
    check_group("quantized_linear", group, K=x.shape[-1], N=weight_codes.shape[0])
