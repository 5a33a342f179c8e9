# SPDX-License-Identifier: Apache-2.0
"""What changes while samples are decoded: device tensors, written in place so that a captured step can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .layout import Layout

# Canvas position "end" of a sample that has met no stop id: larger than any canvas.
NO_END = 2**62

# Fields with an entry for each row of the canvas (`tokens` and `fresh` have a spare place besides).
_BY_ROW = ("tokens", "fresh", "keep", "rank")


@dataclass(frozen=True)
class CanvasState:
    """The canvas of S samples and how far each one is.

    Attributes:
        tokens: (R + 1,) int64. The last entry is a spare place: what is not committed is written there, which keeps
            the scatter free of data-dependent shapes.
        fresh: (R + 1,) bool, tokens that were committed in the sample's last step and must be computed in the next.
        keep: (R,) bool, rows that are seen and computed at all while the current block is decoded (suffix policies).
        rank: (R,) int64, count of kept rows of the sample in front of a row: where it lies among what is computed.
        kept: (S,) int64, kept rows of each sample.
        block: (S,) int64, current block.
        masks_at_start: (S,) int64, masks in the current block when it was begun.
        step_in_block: (S,) int64.
        steps: (S,) int64, steps in which the sample was active.
        verified: (S,) int64, verify passes that had a draft of the sample to check.
        age: (S,) int64, steps since all rows of the sample were computed, that one included.
        end: (S,) int64, canvas position at which the answer ends, `NO_END` while none is known.
        due: (S,) bool, samples whose next step must compute all their rows. They wait for a step that does.
        done: (S,) bool.
    """

    tokens: Tensor
    fresh: Tensor
    keep: Tensor
    rank: Tensor
    kept: Tensor
    block: Tensor
    masks_at_start: Tensor
    step_in_block: Tensor
    steps: Tensor
    verified: Tensor
    age: Tensor
    end: Tensor
    due: Tensor
    done: Tensor

    @classmethod
    def begin(cls, layout: Layout, tokens: Tensor) -> CanvasState:
        """The state before the first step; `tokens` (R,) int64."""
        zeros = torch.zeros_like(layout.start)
        tokens = torch.cat([tokens, tokens.new_zeros(1)])
        return cls(
            tokens=tokens,
            fresh=torch.zeros_like(tokens, dtype=torch.bool),
            keep=layout.exists[layout.sample_of_row],
            rank=layout.positions.clone(),
            kept=layout.lengths * layout.exists,
            block=zeros.clone(),
            masks_at_start=(layout.plan[:, 0] >= 0).sum(-1),
            step_in_block=zeros.clone(),
            steps=zeros.clone(),
            verified=zeros.clone(),
            age=zeros.clone(),
            end=torch.full_like(zeros, NO_END),
            due=layout.exists.clone(),
            done=~layout.exists,
        )

    def carried(self, layout: Layout, keep: Sequence[int], to: Layout, tokens: Tensor) -> CanvasState:
        """The state on a new layout whose first samples are `keep` of this one; the others have not begun.

        Args:
            layout: the layout of this state.
            keep: samples that go on, in the order of `to`.
            to: the new layout.
            tokens: (R',) int64, the canvas at the beginning, as `to.initial_tokens` gives it.
        """
        state = CanvasState.begin(to, tokens)
        if not keep:
            return state
        rows = [torch.arange(layout.offsets[i], layout.offsets[i] + layout.samples[i].length) for i in keep]
        by_row = torch.cat(rows).to(self.tokens.device)
        by_sample = torch.tensor(list(keep), device=self.tokens.device)
        for field in fields(self):
            index = by_row if field.name in _BY_ROW else by_sample
            getattr(state, field.name)[: len(index)] = getattr(self, field.name)[index]
        return state
