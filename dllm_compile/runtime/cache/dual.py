# SPDX-License-Identifier: Apache-2.0
"""DualCache (Fast-dLLM, arXiv 2505.22618) and its wider form, vicinity refresh (dInfer, arXiv 2510.08666)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layout import Layout, Sample
from ..state import CanvasState
from .row_subset import RowSubset


class DualCache(RowSubset):
    """A block begins with all N rows; its other steps compute [s, e), the block alone."""

    before = 0
    """Rows in front of the block that are computed as well."""
    behind = 0
    """Rows behind it."""

    def rows(self, layout: Layout, state: CanvasState) -> Tensor:
        """See `RowSubset.rows`."""
        first, end = layout.span_of(state.block)
        of_row = layout.sample_of_row
        return (layout.positions >= (first - self.before)[of_row]) & (layout.positions < (end + self.behind)[of_row])

    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """See `RowSubset.most`."""
        first, end = sample.span(block)
        return min(end + self.behind, sample.length) - max(first - self.before, 0)


class VicinityCache(DualCache):
    """DualCache whose steps compute [s - `before`, e + `behind`), after `warmup` forwards over all rows.

    The forward that computes all rows commits like any other. What dInfer calls one iteration is two forwards where
    it refreshes, so its `cache_update_freq` of f iterations is an interval of f + 1 here.
    """

    def __init__(self, *args: Any, before: int, behind: int, warmup: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before, self.behind, self._warmup = before, behind, warmup

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """As at `RowSubset.due`, and while the sample is young."""
        due = super().due(moves, ended, state)
        return due if self.always or self._warmup == 0 else due | (state.steps < self._warmup)
