# SPDX-License-Identifier: Apache-2.0
"""dKV-Cache, decode variant (arXiv 2505.15781): a token is cached one step after it was committed.

In the step of its commit a token's row still stood for a mask, so it is computed once more before it is only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layout import Layout, Sample
from ..state import CanvasState
from .row_subset import RowRule, RowSubset


@dataclass(frozen=True, kw_only=True)
class DelayedRule(RowRule):
    """Steps 0, 1 and every multiple of `steps` of a block compute all rows, the others all masks and the fresh tokens.

    Fresh are the tokens of the step before. Step 1 computes everything too since the tokens of the block before, whose
    cache was dropped, were last seen in step 0.
    """

    tracks_commits: ClassVar[bool] = True

    steps: int
    mask_token_id: int

    @property
    def always(self) -> bool:
        """Every step computes every row."""
        return self.steps == 1

    def rows(self, layout: Layout, state: CanvasState, scores: Tensor | None) -> Tensor:
        """See `RowRule.rows`."""
        return (state.tokens == self.mask_token_id)[: layout.rows] | state.fresh[: layout.rows]

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """Before steps 0, 1 and the multiples of a block."""
        due = super().due(moves, ended, state)
        if self.always:
            return due
        step = state.step_in_block
        return due | (step == 1) | (torch.remainder(step, self.steps) == 0)


class DelayedCache(RowSubset):
    """The policy."""

    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """See `RowSubset.most`. Masks turn into fresh tokens, fresh tokens into cached ones, never back."""
        return masks + fresh
