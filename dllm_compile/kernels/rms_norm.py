# SPDX-License-Identifier: Apache-2.0
"""`dllm::rms_norm`: root-mean-square norm with LLaDA's cast order."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension.

    Statistics and scaling in fp32, cast back to x's dtype, and only then multiplied by the weight in that dtype.
    The order matters for bit equality with LLaDA's own layer.

    Args:
        x: [*, C].
        weight: [C], x's dtype.
        eps: added to the mean square.

    Returns:
        [*, C], x's dtype.
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


@torch.library.custom_op("dllm::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm_reference`."""
    return rms_norm_reference(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Pointwise results are dense in x's order of dimensions; a strided view of a packed projection becomes contiguous.
    return torch.empty_like(x * weight)
