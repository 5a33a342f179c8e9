# SPDX-License-Identifier: Apache-2.0
"""The block that each sample decodes. Tensor operations only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import StepConstants
from .eos import BlockView
from .layout import Layout
from .state import CanvasState


@dataclass(frozen=True)
class Block:
    """The current block of each sample; (S, w) tensors, columns as in the plan.

    Attributes:
        rows: int64, canvas rows; the sample's first row in the padding of short blocks.
        exists: bool, false in that padding.
        positions: int64, canvas positions.
        tokens: int64.
        masked: bool.
    """

    rows: Tensor
    exists: Tensor
    positions: Tensor
    tokens: Tensor
    masked: Tensor


def current_block(layout: Layout, state: CanvasState, block: Tensor, mask_token_id: int) -> Block:
    """Gather block (S,) of each sample as it is now."""
    width = layout.plan.shape[-1]
    planned = layout.plan.gather(1, block[:, None, None].expand(-1, 1, width)).squeeze(1)
    exists = planned >= 0
    rows = torch.where(exists, planned, layout.start[:, None])
    tokens = state.tokens[rows]
    return Block(rows, exists, layout.positions[rows], tokens, exists & (tokens == mask_token_id))


def view_of(constants: StepConstants, layout: Layout, state: CanvasState) -> BlockView:
    """The current block with what this step has committed so far."""
    block = current_block(layout, state, state.block, constants.mask_token_id)
    answer = block.exists & (block.positions >= layout.prompt_length[:, None])
    return BlockView(
        positions=block.positions,
        exists=block.exists,
        open=block.masked,
        stop=answer & is_stop(constants, block.tokens),
        end=state.end,
    )


def is_stop(constants: StepConstants, token: Tensor) -> Tensor:
    """Whether each token ends an answer; bool of the same shape."""
    return (token[..., None] == constants.stops).any(-1)
