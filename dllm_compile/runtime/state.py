# SPDX-License-Identifier: Apache-2.0
"""What changes while samples are decoded: device tensors, written in place so that a captured step can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout

# Canvas position "end" of a sample that has met no stop id: larger than any canvas.
NO_END = 2**62


@dataclass(frozen=True)
class CanvasState:
    """The canvas of S samples and how far each one is.

    Attributes:
        tokens: (R + 1,) int64. The last entry is a spare place: what is not committed is written there, which keeps
            the scatter free of data-dependent shapes.
        block: (S,) int64, current block.
        masks_at_start: (S,) int64, masks in the current block when it was begun.
        step_in_block: (S,) int64.
        steps: (S,) int64, steps in which the sample was active.
        end: (S,) int64, canvas position at which the answer ends, `NO_END` while none is known.
        done: (S,) bool.
    """

    tokens: Tensor
    block: Tensor
    masks_at_start: Tensor
    step_in_block: Tensor
    steps: Tensor
    end: Tensor
    done: Tensor

    @classmethod
    def begin(cls, layout: Layout, tokens: Tensor) -> CanvasState:
        """The state before the first step; `tokens` (R,) int64."""
        zeros = torch.zeros_like(layout.start)
        return cls(
            tokens=torch.cat([tokens, tokens.new_zeros(1)]),
            block=zeros.clone(),
            masks_at_start=(layout.plan[:, 0] >= 0).sum(-1),
            step_in_block=zeros.clone(),
            steps=zeros.clone(),
            end=torch.full_like(zeros, NO_END),
            done=torch.zeros_like(zeros, dtype=torch.bool),
        )

    def select(self, layout: Layout, keep: Sequence[int]) -> CanvasState:
        """The state of the samples `keep` alone (ascending), for a layout rebuilt from them."""
        rows = [torch.arange(layout.offsets[i], layout.offsets[i] + layout.samples[i].length) for i in keep]
        row_index = torch.cat([*rows, torch.tensor([layout.rows])]).to(self.tokens.device)
        sample_index = torch.tensor(list(keep), device=self.tokens.device)
        return CanvasState(
            tokens=self.tokens[row_index],
            block=self.block[sample_index],
            masks_at_start=self.masks_at_start[sample_index],
            step_in_block=self.step_in_block[sample_index],
            steps=self.steps[sample_index],
            end=self.end[sample_index],
            done=self.done[sample_index],
        )
