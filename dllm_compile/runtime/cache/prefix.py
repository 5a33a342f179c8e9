# SPDX-License-Identifier: Apache-2.0
"""PrefixCache (Fast-dLLM, arXiv 2505.22618): rows in front of the block are those of the block's first forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..layout import Layout, Sample
from ..state import CanvasState
from .row_subset import RowRule, RowSubset


@dataclass(frozen=True, kw_only=True)
class PrefixRule(RowRule):
    """A block begins with all N rows; its other steps compute [s, N): the block and the whole suffix."""

    def rows(self, layout: Layout, state: CanvasState, scores: Tensor | None) -> Tensor:
        """See `RowRule.rows`."""
        first, _ = layout.span_of(state.block)
        return layout.positions >= first[layout.sample_of_row]


class PrefixCache(RowSubset):
    """The policy."""

    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """See `RowSubset.most`."""
        return sample.length - sample.span(block)[0]
