# SPDX-License-Identifier: Apache-2.0
"""DualCache (Fast-dLLM, arXiv 2505.22618) and its wider form, vicinity refresh (dInfer, arXiv 2510.08666)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..layout import Layout, Sample
from ..state import CanvasState
from .row_subset import RowRule, RowSubset


@dataclass(frozen=True, kw_only=True)
class BlockRule(RowRule):
    """A block begins with all N rows, and so do the first forwards; other steps compute the block and what is near.

    The forward that computes all rows commits like any other. What dInfer calls one iteration is two forwards where
    it refreshes, so its `cache_update_freq` of f iterations is an interval of f + 1 here.

    Attributes:
        before: rows in front of the block that are computed as well; 0 for DualCache.
        behind: rows behind it; 0 for DualCache.
        warmup: a sample's first forwards that compute all rows.
    """

    before: int = 0
    behind: int = 0
    warmup: int = 0

    def rows(self, layout: Layout, state: CanvasState, scores: Tensor | None) -> Tensor:
        """See `RowRule.rows`."""
        first, end = layout.span_of(state.block)
        of_row = layout.sample_of_row
        return (layout.positions >= (first - self.before)[of_row]) & (layout.positions < (end + self.behind)[of_row])

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """As at `RowRule.due`, and while the sample is young."""
        due = super().due(moves, ended, state)
        return due if self.always or self.warmup == 0 else due | (state.steps < self.warmup)


class BlockCache(RowSubset):
    """The policy."""

    rule: BlockRule

    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """See `RowSubset.most`."""
        first, end = sample.span(block)
        return min(end + self.rule.behind, sample.length) - max(first - self.rule.before, 0)
