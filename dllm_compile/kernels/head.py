# SPDX-License-Identifier: Apache-2.0
"""`dllm::head`: the language-model head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def head_reference(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Logits of normed hidden rows.

    Args:
        x: [*, C].
        weight: [V, C].
        scale: factor on the logits, in their dtype (LLaDA's `scale_logits` uses 1 / sqrt(C)); 1.0 leaves them.

    Returns:
        [*, V], x's dtype.
    """
    logits = F.linear(x, weight)
    return logits if scale == 1.0 else logits * scale


@torch.library.custom_op("dllm::head", mutates_args=())
def head(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """See `head_reference`."""
    return head_reference(x, weight, scale)


@head.register_fake
def _(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
