# SPDX-License-Identifier: Apache-2.0
"""Flash-Cache: which rows a step computes, and which layers score (see `flash`). Tensor operations only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...config import DecodingConfig
from ...kernels.upper_bound import upper_bound
from ..layout import Layout
from ..rows import PickedRows, counted, rank_in_sample
from ..state import CanvasState
from .base import Request
from .row_plan import RowPlan
from .row_subset import RowRule
from .score_order import order_by_score, rank_from_end


def scored_layers(config: DecodingConfig, layers: int) -> tuple[int, ...]:
    """Layers that add to the score: from the third up as in the released code, or all as in the paper.

    A model of one or two layers has no third: there all layers count.
    """
    first = 2 if config.score_layers == "upper" and layers > 2 else 0
    return tuple(range(first, layers))


@dataclass(frozen=True, kw_only=True)
class FlashRule(RowRule):
    """Window, look-ahead and tracked rows.

    Attributes:
        window: most masks of a sample that are candidates.
        near: most masks of a sample that are computed.
        track: decoded rows of a sample that are computed, where no more of them are fresh.
        mask_token_id: id of a masked position.
        pads: there are rows behind the canvas. They are masks to the selection, which refreshes them as the last of the
            look-ahead, and eos ids to the model; they are in no window.
        pins_drafts: tokens of a step's first forward are tracked in the next one like those of its second.
    """

    tracks_commits: ClassVar[bool] = True

    window: int
    near: int
    track: int
    mask_token_id: int
    pads: bool = False
    pins_drafts: bool = True

    @property
    def most_columns(self) -> int:
        """See `CacheRule.most_columns`."""
        return self.window

    def columns(self, masked: Tensor) -> Tensor | None:
        """The leftmost masks, as many as the window takes. Where there are fewer, a column without a mask is named."""
        width = masked.shape[-1]
        wanted = torch.arange(min(self.window, width), device=masked.device).repeat(masked.shape[0], 1)
        found = upper_bound(masked.cumsum(-1), wanted)
        return torch.where(found < width, found, masked.int().argmin(-1, keepdim=True))

    def fresh(self, drafted: Tensor, accepted: Tensor) -> Tensor:
        """See `CacheRule.fresh`."""
        return drafted | accepted if self.pins_drafts else accepted

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """Never again: there is no periodic refresh."""
        return torch.zeros_like(moves)

    def rows(self, layout: Layout, state: CanvasState, scores: Tensor | None) -> Tensor:
        """See `RowRule.rows`."""
        assert scores is not None
        masked, of_row, fresh = self.masked(layout, state), layout.sample_of_row, state.fresh[: layout.rows]
        near = masked & (rank_in_sample(masked, layout.start, of_row) < self.near)
        # The last rows in ascending order of score, fresh tokens last of all: bands, so that no score can lie beyond a
        # fresh token or below a mask.
        from_end = rank_from_end(
            layout, order_by_score(layout, torch.where(masked, 0, torch.where(fresh, 2, 1)), scores)
        )
        running = counted(fresh)
        pinned = running[layout.start + layout.lengths] - running[layout.start]
        tracked = ~masked & (from_end <= pinned.clamp(min=self.track)[of_row])
        return near | tracked

    def masked(self, layout: Layout, state: CanvasState) -> Tensor:
        """(R,) bool, behind the canvas too."""
        return (state.tokens == self.mask_token_id)[: layout.rows]

    def open(self, layout: Layout, state: CanvasState) -> Tensor:
        """(R,) bool, masks of the canvas."""
        masked = self.masked(layout, state)
        return masked & (layout.positions < _canvas_end(layout)[layout.sample_of_row]) if self.pads else masked

    def shown(self, plan: RowPlan, request: Request, layout: Layout, picked: PickedRows) -> RowPlan:
        """The plan with the tokens that the model sees."""
        if not self.pads:
            return plan
        end = _canvas_end(layout)[layout.sample_of_row[picked.rows]]
        behind = plan.positions >= (torch.cat((end, end)) if layout.guided else end)
        return replace(plan, ids=torch.where(behind, request.fill_id, plan.ids))


def _canvas_end(layout: Layout) -> Tensor:
    """(S,) int64, canvas position behind each sample's only block; 0 where there is no sample."""
    return layout.spans[:, 0, 1]
