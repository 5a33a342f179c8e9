# SPDX-License-Identifier: Apache-2.0
"""End-of-sequence rules: where an answer ends, decided on the device after each commit.

A rule only moves the end of a sample. Masked positions behind the end are filled with the eos id (at once where
there are blocks, when the sample is done where a window slides), and the sample is done when no masked position is
left before it: a stop id decoded while earlier positions are still masked ends nothing by itself. Stop ids decoded
inside the prompt (infilling) never end an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DecodingConfig
from .state import NO_END


@dataclass(frozen=True)
class BlockView:
    """Each sample's current block after the commit of a step; columns as in the plan.

    Attributes:
        positions: (S, w) int64, canvas positions.
        exists: (S, w) bool, false in the padding of short blocks.
        open: (S, w) bool, still masked.
        stop: (S, w) bool, holds a stop id of the answer.
        end: (S,) int64, end known before this step.
    """

    positions: Tensor
    exists: Tensor
    open: Tensor
    stop: Tensor
    end: Tensor


EosRule = Callable[[BlockView], Tensor]


def end_never(view: BlockView) -> Tensor:
    """`eos="none"`: every block is decoded."""
    return view.end


def end_after_block(view: BlockView) -> Tensor:
    """`eos="block"`: a finished block that holds a stop id anywhere ends the answer behind the block."""
    ends = ~view.open.any(-1) & view.stop.any(-1)
    last = torch.where(view.exists, view.positions, -1).amax(-1)
    return torch.where(ends, torch.minimum(view.end, last + 1), view.end)


def end_at_first(view: BlockView) -> Tensor:
    """`eos="first"`: the leftmost stop id of the step in which one first appears ends the answer behind itself.

    While no end is known the answer held no stop id before this step, so all that are seen are of this step.
    """
    leftmost = torch.where(view.stop, view.positions, NO_END - 1).amin(-1) + 1
    return torch.where(view.end == NO_END, leftmost, view.end)


def end_at_rightmost(view: BlockView) -> Tensor:
    """`eos="rightmost"`: the rightmost stop id of the step in which one first appears (Flash-dLLM's released code)."""
    rightmost = torch.where(view.stop, view.positions, -1).amax(-1) + 1
    return torch.where((view.end == NO_END) & (rightmost > 0), rightmost, view.end)


def eos_rule(config: DecodingConfig) -> EosRule:
    """The rule in force under `config`."""
    rules = {"block": end_after_block, "first": end_at_first, "rightmost": end_at_rightmost, "none": end_never}
    return rules[config.eos_rule]
