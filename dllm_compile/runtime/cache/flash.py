# SPDX-License-Identifier: Apache-2.0
"""Flash-Cache (arXiv 2609.26796): a window slides over the masks, and a fixed number of rows is computed in a step.

The first step of a sample computes all rows. A later one computes, in each sample,

* the window: the leftmost masked positions, the only candidates;
* the look-ahead: the masks behind them, which are refreshed and never committed;
* tracked rows: the tokens of the step before, whose cached rows are still those of masks, and then the decoded rows
  with the best score up to the budget, prompt included.

The score of a decoded position is the sum of the raw logits between the window's queries and its key, over heads and
the scored layers, in the step's own forward. Of equal scores the later position ranks higher.

A verify pass (`commit="flash_verify"`) reads the cache that the step's forward has left and writes nothing to it. Its
context is tracked rows' order once more: tokens of the step's forward, then of the step before, then by score.

Differences to the released code, each with its reason: all tokens of the step before are tracked (the code loses those
of its draft stage); keys end at P + G exactly and nothing is committed behind it; an answer ends at the leftmost stop
id. Masks behind a known end stay masks until the sample is done, as there: they are seen, but no candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import DecodingConfig
from ..layout import Layout, Sample
from ..row_programs import CacheInputs, RowPrograms, StepInputs, VerifyInputs
from ..rows import PickedRows, rank_in_sample
from ..state import CanvasState
from .row_subset import RowSubset
from .verify_rows import Drafts, verify_rows


def scored_layers(config: DecodingConfig, layers: int) -> tuple[int, ...]:
    """Layers that add to the score: from the third up as in the released code, or all as in the paper.

    A model of one or two layers has no third: there all layers count.
    """
    first = 2 if config.score_layers == "upper" and layers > 2 else 0
    return tuple(range(first, layers))


class FlashCache(RowSubset):
    """The policy. A negative budget computes every row in every step, which is a sliding window without a cache."""

    tracks_commits = True

    def __init__(self, programs: RowPrograms, cache_rows: int, *, config: DecodingConfig, mask_token_id: int) -> None:
        super().__init__(programs, cache_rows, interval=1 if config.track < 0 else None)
        self._window = config.window_length
        self._near = config.window_length + config.lookahead
        self._track = config.track
        self._mask_token_id = mask_token_id
        self._layers = scored_layers(config, programs.shape.layers)
        self._scores: Tensor | None = None
        self._verifies = config.rule == "flash_verify"
        self._verify_size = config.verify_size
        self._verify_context = config.verify_context
        self._own: tuple[Tensor, Tensor] | None = None

    def columns(self, masked: Tensor) -> Tensor | None:
        """The leftmost masks, as many as the window takes."""
        return torch.sort(~masked, dim=-1, stable=True).indices[:, : self._window]

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """Never again: there is no periodic refresh."""
        return torch.zeros_like(moves)

    def rows(self, layout: Layout, state: CanvasState) -> Tensor:
        """See `RowSubset.rows`."""
        masked = self._masked(layout, state)
        near = masked & (rank_in_sample(masked, layout.start, layout.sample_of_row) < self._near)
        return near | self._tracked(layout, state, masked)

    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """See `RowSubset.most`."""
        return min(self._near, masks) + max(self._track, self._window)

    def _scores_of(self, guided: bool) -> Tensor:
        """(K,) fp32, the scores of the last step by cache row; only those of the conditional half are ever written."""
        if self._scores is None:
            self._scores = torch.zeros(self._spare(guided) + 1, dtype=torch.float32, device=self._programs.device)
        return self._scores

    def _masked(self, layout: Layout, state: CanvasState) -> Tensor:
        return (state.tokens == self._mask_token_id)[: layout.rows]

    def _tracked(self, layout: Layout, state: CanvasState, masked: Tensor) -> Tensor:
        """(R,) bool: the last rows in ascending order of score, fresh tokens last of all."""
        of_row, fresh = layout.sample_of_row, state.fresh[: layout.rows]
        # Bands, so that no score can lie beyond a fresh token or below a mask.
        from_end = self._from_end(layout, torch.where(masked, 0, torch.where(fresh, 2, 1)))
        pinned = torch.zeros_like(layout.start).scatter_add_(0, of_row, fresh.long())
        budget = pinned.clamp(min=self._track)[of_row]
        return ~masked & (from_end <= budget)

    def _from_end(self, layout: Layout, band: Tensor) -> Tensor:
        """(R,) int64: rank of each row in its sample by band (R,) and then by score, 1 for the highest."""
        of_row = layout.sample_of_row
        score = self._scores_of(layout.guided)[layout.base[of_row] + layout.positions]
        by_score = torch.sort(score, stable=True).indices
        by_band = by_score[torch.sort(band[by_score], stable=True).indices]
        order = by_band[torch.sort(of_row[by_band], stable=True).indices]
        # Samples are sorted and have as many rows as before: the end of a sample's part is the end of its rows.
        from_end = torch.empty_like(order)
        from_end[order] = (layout.start + layout.lengths)[of_row] - torch.arange(layout.rows, device=order.device)
        return from_end

    def verify(self, drafts: Drafts, layout: Layout, state: CanvasState) -> tuple[Tensor, Tensor, Tensor]:
        """See `CachePolicy.verify`."""
        masked, fresh = self._masked(layout, state), state.fresh[: layout.rows]
        band = torch.where(masked, 0, torch.where(drafts.committed, 3, torch.where(fresh, 2, 1)))
        plan = verify_rows(
            drafts,
            self._from_end(layout, band),
            state.tokens[: layout.rows],
            layout,
            size=self._verify_size,
            context=self._verify_context,
            mask_token_id=self._mask_token_id,
        )
        self._computed.add_(plan.real.sum())
        spare = self._spare(layout.guided)
        positions = layout.positions[plan.rows]
        cache_rows = torch.where(plan.real, layout.base[layout.sample_of_row[plan.rows]] + positions, spare)
        hidden = torch.zeros(spare + 1, dtype=torch.bool, device=positions.device).index_fill_(0, cache_rows, True)
        inputs = StepInputs(
            ids=plan.ids, positions=positions, tiles=plan.tiles, wanted=plan.masks.flatten(), banned=drafts.banned
        )
        verify = VerifyInputs(
            caches=self.caches(layout.guided),
            views=plan.views,
            hidden=hidden,
            given=drafts.tokens[: layout.seats].flatten(),
            own_rows=torch.arange(len(plan.rows), device=positions.device),
            own=self._own_buffers(len(plan.rows)),
            tile_rows=self._verify_size,
        )
        found = self._programs.verify_step(inputs, verify)
        left_over = (0, 0, 0, layout.places - layout.seats)
        token, confidence, probability = (F.pad(value.view(plan.masks.shape), left_over) for value in found)
        return token, confidence, probability

    def _own_buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where a verify pass puts its own keys and values; allocated when first asked for."""
        if self._own is None or len(self._own[0]) < rows:
            size = (rows, self._shape.kv_heads, self._shape.head_dim)
            made = (torch.zeros(size, dtype=self._shape.dtype, device=self._programs.device) for _ in range(2))
            self._own = next(made), next(made)
        keys, values = self._own
        return keys[:rows], values[:rows]

    def _forward(
        self, inputs: StepInputs, cache_rows: Tensor, picked: PickedRows, layout: Layout, state: CanvasState
    ) -> tuple[Tensor, Tensor]:
        caches = self.caches(layout.guided)
        if self.always and not self._verifies:
            return self._programs.cached_step(inputs, CacheInputs(caches, cache_rows))
        scores = self._scores_of(layout.guided).zero_()
        scored = CacheInputs(
            caches,
            cache_rows,
            scored=self._layers,
            window=self._window_rows(picked, layout, state),
            spans=F.pad(torch.stack((layout.base, layout.base + state.kept), 1), (0, 0, 0, 1)).to(torch.int32),
            scores=scores,
        )
        return self._programs.cached_step(inputs, scored)

    def _window_rows(self, picked: PickedRows, layout: Layout, state: CanvasState) -> Tensor:
        """(S + 1, max(m, 2)) int64: rows of the forward in each sample's window, -1 where there are fewer.

        What lies in no window goes to the sample behind the last one, which is empty. It also keeps both sizes at two
        or more, as compiled programs want them.
        """
        masked, of_row = self._masked(layout, state), layout.sample_of_row
        rank = rank_in_sample(masked, layout.start, of_row)
        inside = masked & (rank < self._window) & (picked.counts > 0)[of_row]
        samples, width = layout.places, max(min(self._window, layout.rows), 2)
        spare = samples * width
        window = torch.full((spare + width,), -1, dtype=torch.int64, device=rank.device)
        window.scatter_(0, torch.where(inside, of_row * width + rank, spare), torch.where(inside, picked.place, -1))
        return window.view(samples + 1, width)
