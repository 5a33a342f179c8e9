# SPDX-License-Identifier: Apache-2.0
"""`dllm::attention`: bidirectional attention of a rectangular batch, token-major."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all tokens to all tokens, heads merged.

    Args:
        q: [B, T, H, hd].
        k, v: [B, T, H_kv, hd]; query head h reads key head h // (H / H_kv).

    Returns:
        [B, T, H * hd], q's dtype, contiguous.
    """
    groups = q.shape[2] // k.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value)
    return out.transpose(1, 2).flatten(2)


@torch.library.custom_op("dllm::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See `attention_reference`."""
    return attention_reference(q, k, v).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:2], q.shape[2] * q.shape[3]))
