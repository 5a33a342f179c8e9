# SPDX-License-Identifier: Apache-2.0
"""`dllm::quantize`: rows to FP8 codes and scales, where no operator before them can do it on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.fp8_format import FP8, GROUP, check_group, empty_scales, quantize_activation


def quantize_reference(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows.

    Args:
        x: [M, K], any floating dtype; may be a strided view.
        group: 128 (K must be a multiple), 0 or -1; see `fp8_format`.

    Returns:
        codes [M, K] float8_e4m3fn, contiguous; scales fp32 as `fp8_format` says ([M, K/128] with strides (1, M) for
        128).
    """
    return quantize_activation(x, group)


def _check(x: Tensor, group: int) -> None:
    if x.ndim != 2:
        raise ValueError(f"quantize: x must be [M, K], got {[*x.shape]}")
    check_group("quantize", group, K=x.shape[1])


@torch.library.custom_op("dllm::quantize", mutates_args=())
def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """See `quantize_reference`."""
    _check(x, group)
    return quantize_reference(x, group)


@quantize.register_fake
def _(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    _check(x, group)
    return x.new_empty(x.shape, dtype=FP8), empty_scales(x, group)


@quantize.register_kernel("cuda")
def _(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    _check(x, group)
    if group == GROUP and has_triton():
        from dllm_compile.kernels import swiglu_quant_triton as triton_version

        if triton_version.kernel_takes(x):
            with torch.cuda.device(x.device):  # Triton launches on the current device
                return triton_version.swiglu_quant_triton(x, None)
    return quantize_reference(x, group)
