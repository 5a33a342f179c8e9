# SPDX-License-Identifier: Apache-2.0
"""`dllm::guide`: classifier-free guidance on normed hidden rows."""

from __future__ import annotations

import torch
from torch import Tensor


def guide_reference(conditional: Tensor, unconditional: Tensor, guidance: Tensor) -> Tensor:
    """`u + (guidance + 1)(c - u)`, in fp32, rounded to the rows' dtype.

    The head is linear, so combining hidden rows before it equals combining logits after it, at half the head's cost
    and without two [rows, V] arrays.

    Args:
        conditional, unconditional: [W, C] rows behind the last norm.
        guidance: 0-dim fp32, LLaDA's `cfg_scale`.

    Returns:
        [W, C], the rows' dtype.
    """
    c, u = conditional.to(torch.float32), unconditional.to(torch.float32)
    return (u + (guidance + 1.0) * (c - u)).to(conditional.dtype)


@torch.library.custom_op("dllm::guide", mutates_args=())
def guide(conditional: Tensor, unconditional: Tensor, guidance: Tensor) -> Tensor:
    """See `guide_reference`."""
    return guide_reference(conditional, unconditional, guidance)


@guide.register_fake
def _(conditional: Tensor, unconditional: Tensor, guidance: Tensor) -> Tensor:
    return conditional.new_empty(conditional.shape)
