# SPDX-License-Identifier: Apache-2.0
"""Suffix policies, one a file: which masks behind the block exist while it is decoded.

A row that is dropped is neither computed nor seen. The choice is made when a sample enters a block and stands until it
enters the next one; kept rows keep their canvas positions. Known tokens and everything in front of the block's end are
always kept, so that a prompt with holes loses nothing that was given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...config import DecodingConfig
from ..layout import Layout
from ..rows import rank_in_sample
from ..state import CanvasState
from .dpad import GaussianDecay
from .window import NearestMasks

__all__ = ["SuffixRule", "choose_rows", "suffix_rule"]

SuffixRule = Callable[[Layout, CanvasState, Tensor], Tensor]
"""(layout, state, distance (R,) int64 behind the block's end, >= 0 where it matters) -> (R,) bool, kept."""


def suffix_rule(config: DecodingConfig) -> SuffixRule | None:
    """The rule in force under `config`; None keeps everything."""
    if config.suffix == "dpad":
        return GaussianDecay(config.k_sigma, config.scale, config.suffix_window, config.seed & 0xFFFFFFFF)
    return NearestMasks(config.suffix_window) if config.suffix == "window" else None


def choose_rows(rule: SuffixRule, layout: Layout, state: CanvasState, mask_token_id: int) -> None:
    """Choose the rows of every sample that stands at the beginning of a block. Tensor operations, in place."""
    of_row = layout.sample_of_row
    _, end = layout.span_of(state.block)
    distance = layout.positions - end[of_row]
    droppable = (state.tokens[: layout.rows] == mask_token_id) & (distance >= 0)
    keep = ~droppable | rule(layout, state, distance)
    begins = (state.step_in_block == 0) & ~state.done
    state.keep.copy_(torch.where(begins[of_row], keep, state.keep))
    state.rank.copy_(rank_in_sample(state.keep, layout.start, of_row))
    state.kept.zero_().scatter_add_(0, of_row, state.keep.long())
