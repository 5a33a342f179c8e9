# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a training row are masked, and what each counts in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile.models.small.tokenizer import EOS_ID, MASK_ID

# Drawn from for the block-by-block kind; 32, what decoding uses by default, three times.
BLOCK_LENGTHS = (8, 16, 32, 32, 32, 64)


def noised(rows: Tensor, starts: Tensor, generator: torch.Generator, block_share: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mask answers: as LLaDA does, and a share of the rows as decoding block by block meets them.

    In the first kind every answer token is masked with probability t. In the second, everything before a random block
    is known, everything after it masked, and only the block's own tokens are masked with probability t. The first kind
    nearly always shows some end tokens, from which the answer's length can be read; decoding never does.

    Args:
        rows: [B, T] int64 tokens.
        starts: [B] where each answer begins.
        generator: on the device of `rows`.
        block_share: expected share of the second kind.

    Returns:
        The ids with masks, and each token's weight in the loss: 1/t over the number of tokens that could have been
        masked so, where it was, else 0. The weights of a row add up to 1/B on average.
    """
    batch, length = rows.shape
    device = rows.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    # Stratified: one t in each of `batch` equal intervals, so that every batch holds the whole range.
    t = ((torch.arange(batch, device=device) + uniform(batch)) / batch * 0.999 + 0.001)[:, None]
    place = torch.arange(length, device=device)[None] - starts[:, None]
    answer = place >= 0
    drawn = answer & (uniform(batch, length) < t)
    sizes = torch.tensor(BLOCK_LENGTHS, device=device)
    size = sizes[(uniform(batch, 1) * len(BLOCK_LENGTHS)).long()]
    content = (answer & (rows != EOS_ID)).sum(1, keepdim=True)
    # Any block up to the one with the first end token.
    begin = (uniform(batch, 1) * (content // size + 1)).long() * size
    blockwise = uniform(batch, 1) < block_share
    inside = (place >= begin) & (place < begin + size)
    counted = torch.where(blockwise, inside & answer, answer)
    weights = (drawn & counted) / t / counted.sum(1, keepdim=True) / batch
    hidden = torch.where(blockwise, (drawn & inside) | (place >= begin + size), drawn)
    return rows.masked_fill(hidden, MASK_ID), weights
