# SPDX-License-Identifier: Apache-2.0
"""`dllm::embed`: token embedding, scaled where the model scales it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embed_reference(ids: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Rows of the embedding table.

    Args:
        ids: [*] int64.
        weight: [V, C].
        scale: factor on the rows, in the table's dtype (LLaDA's `input_emb_norm` uses sqrt(C)); 1.0 leaves them.

    Returns:
        [*, C], weight's dtype.
    """
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale


@torch.library.custom_op("dllm::embed", mutates_args=())
def embed(ids: Tensor, weight: Tensor, scale: float) -> Tensor:
    """See `embed_reference`."""
    return embed_reference(ids, weight, scale)


@embed.register_fake
def _(ids: Tensor, weight: Tensor, scale: float) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))
