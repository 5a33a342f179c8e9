# SPDX-License-Identifier: Apache-2.0
"""`dllm::swiglu_quant`: the gated activation of the feed-forward layer, quantized to FP8; the product is not stored."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.fp8_format import FP8, GROUP, check_group, empty_scales, quantize_activation
from dllm_compile.kernels.swiglu import swiglu_reference


def swiglu_quant_reference(gate: Tensor, up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """`quantize(silu(gate) * up)`, with silu and product rounded to the inputs' dtype as `dllm::swiglu` rounds them.

    Args:
        gate, up: [M, F], same floating dtype; may be the two halves (strided views) of a packed projection.
        group: 128 (F must be a multiple), 0 or -1; see `fp8_format`.

    Returns:
        codes [M, F] float8_e4m3fn, contiguous; scales fp32 as `fp8_format` says ([M, F/128] with strides (1, M) for
        128).
    """
    return quantize_activation(swiglu_reference(gate, up), group)


def _check(gate: Tensor, up: Tensor, group: int) -> None:
    if gate.ndim != 2 or gate.shape != up.shape:
        raise ValueError(f"swiglu_quant: gate and up must be [M, F], got {[*gate.shape]} and {[*up.shape]}")
    if gate.dtype != up.dtype:
        raise TypeError(f"swiglu_quant: gate and up must share a dtype, got {gate.dtype} and {up.dtype}")
    check_group("swiglu_quant", group, F=gate.shape[1])


@torch.library.custom_op("dllm::swiglu_quant", mutates_args=())
def swiglu_quant(gate: Tensor, up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """See `swiglu_quant_reference`."""
    _check(gate, up, group)
    return swiglu_quant_reference(gate, up, group)


@swiglu_quant.register_fake
def _(gate: Tensor, up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    check_group("swiglu_quant", group, F=gate.shape[1])
    return gate.new_empty(gate.shape, dtype=FP8), empty_scales(gate, group)


@swiglu_quant.register_kernel("cuda")
def _(gate: Tensor, up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    _check(gate, up, group)
    if group == GROUP and has_triton():
        from dllm_compile.kernels import swiglu_quant_triton as triton_version

        if triton_version.kernel_takes(gate):
            with torch.cuda.device(gate.device):  # Triton launches on the current device
                return triton_version.swiglu_quant_triton(gate, up)
    return swiglu_quant_reference(gate, up, group)
