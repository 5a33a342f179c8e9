# SPDX-License-Identifier: Apache-2.0
"""`dllm::swiglu`: the gated activation of the feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, each rounded to the inputs' dtype.

    Args:
        gate, up: [*, F], same dtype; may be the two halves (strided views) of a packed projection.

    Returns:
        [*, F], the inputs' dtype, contiguous.
    """
    return F.silu(gate) * up


@torch.library.custom_op("dllm::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `swiglu_reference`."""
    return swiglu_reference(gate, up).contiguous()


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)
