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

Differences to the released code, each with its reason: all tokens of the step before are tracked, while the code loses
those of its draft stage (`pin="released"` does so, too); keys end at P + G exactly, while the code attends to eos ids
up to a multiple of 128 (so does `key_end="released"`); nothing is committed behind the canvas; an answer ends at the
leftmost stop id. Masks behind a known end stay masks until the sample is done, as there: they are seen, but no
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...config import DecodingConfig
from ...kernels.upper_bound import upper_bound
from ..layout import Layout, Sample
from ..row_programs import CacheInputs, RowPrograms, StepInputs, VerifyInputs
from ..rows import PickedRows, counted
from ..stages import RunStage, run_plainly
from ..state import CanvasState
from .base import Request
from .flash_rule import FlashRule, scored_layers
from .row_plan import RowPlan
from .row_subset import CacheRows, RowSubset, planned_rows
from .score_order import order_by_score
from .verify_rows import Drafts, verify_rows


class FlashCache(RowSubset):
    """The policy. A negative budget computes every row in every step, which is a sliding window without a cache."""

    rule: FlashRule

    def __init__(self, programs: RowPrograms, cache_rows: int, *, config: DecodingConfig, mask_token_id: int) -> None:
        rule = FlashRule(
            interval=1 if config.track < 0 else None,
            window=config.window_length,
            near=config.window_length + config.lookahead,
            track=config.track,
            mask_token_id=mask_token_id,
            pads=config.key_end == "released",
            pins_drafts=config.pin == "all",
        )
        super().__init__(programs, cache_rows, rule)
        self._layers = scored_layers(config, programs.shape.layers)
        self._scores: Tensor | None = None
        self._verifies = config.rule == "flash_verify"
        self._verify_size = config.verify_size
        self._verify_context = config.verify_context
        self._own: tuple[Tensor, Tensor] | None = None

    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """See `RowSubset.most`."""
        return min(self.rule.near, masks) + max(self.rule.track, self.rule.window)

    def step(
        self,
        request: Request,
        layout: Layout,
        state: CanvasState,
        *,
        refreshing: bool = True,
        run: RunStage = run_plainly,
    ) -> tuple[Tensor, Tensor]:
        """See `CachePolicy.step`."""
        if self.rule.always and not (self._verifies or self.rule.pads):
            return super().step(request, layout, state, refreshing=refreshing, run=run)
        guided = layout.guided
        cache = self._cache(self.shapes(refreshing=refreshing), guided, self._scores_of(guided))
        width = max(min(self.rule.window, layout.rows), 2)
        plan, cache_rows, window, spans = run(plan_scored_rows, self.rule, request, layout, state, cache, width)
        scored = CacheInputs(
            self.caches(guided), cache_rows, scored=self._layers, window=window, spans=spans, scores=cache.scores
        )
        return self._programs.cached_step(plan.inputs(request), scored)

    def _scores_of(self, guided: bool) -> Tensor:
        """(K,) fp32, the scores of the last step by cache row; only those of the conditional half are ever written."""
        if self._scores is None:
            self._scores = torch.zeros(self._spare(guided) + 1, dtype=torch.float32, device=self._programs.device)
        return self._scores

    def verify(
        self, drafts: Drafts, layout: Layout, state: CanvasState, *, run: RunStage = run_plainly
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `CachePolicy.verify`."""
        size = self._verify_size
        cache = self._cache(layout.seats * size, layout.guided, self._scores_of(layout.guided))
        plan: VerifyPlan = run(plan_verify, self.rule, drafts, layout, state, cache, size, self._verify_context)
        inputs = StepInputs(
            ids=plan.ids, positions=plan.positions, tiles=plan.tiles, wanted=plan.wanted, banned=drafts.banned
        )
        verify = VerifyInputs(
            caches=self.caches(layout.guided),
            views=plan.views,
            hidden=plan.hidden,
            given=drafts.tokens[: layout.seats].flatten(),
            own_rows=plan.own_rows,
            own=self._own_buffers(layout.seats * size),
            tile_rows=size,
        )
        return self._programs.verify_step(inputs, verify)

    def _own_buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where a verify pass puts its own keys and values; allocated when first asked for."""
        if self._own is None or len(self._own[0]) < rows:
            size = (rows, self._shape.kv_heads, self._shape.head_dim)
            made = (torch.zeros(size, dtype=self._shape.dtype, device=self._programs.device) for _ in range(2))
            self._own = next(made), next(made)
        keys, values = self._own
        return keys[:rows], values[:rows]


def plan_scored_rows(
    rule: FlashRule, request: Request, layout: Layout, state: CanvasState, cache: CacheRows, width: int
) -> tuple[RowPlan, Tensor, Tensor, Tensor]:
    """Stage: the forward of a step that scores, and scores that are zero again.

    Args:
        rule, request, layout, state: as in `CachePolicy.step`.
        cache: where the rows go.
        width: columns of the window, two or more, and enough for the rule's.

    Returns:
        What `plan_rows` returns; `window` (S + 1, width) and `spans` (S + 1, 2) of `CacheInputs`.
    """
    assert cache.scores is not None
    plan, cache_rows, picked = planned_rows(rule, request, layout, state, cache)
    cache.scores.zero_()  # the plan has read them
    # A place without a sample has no span: kernels look samples up by where their keys begin.
    spans = torch.stack((layout.base, layout.base + state.kept), 1)
    spans = torch.cat((spans, spans.new_zeros((1, 2)))).to(torch.int32)
    window = _window_rows(rule, picked, layout, state, width)
    return rule.shown(plan, request, layout, picked), cache_rows, window, spans


def _window_rows(rule: FlashRule, picked: PickedRows, layout: Layout, state: CanvasState, width: int) -> Tensor:
    """(S + 1, width) int64: rows of the forward in each sample's window, -1 where there are fewer.

    Behind the last sample comes an empty one: both sizes are two or more, as compiled programs want them.
    """
    running = counted(rule.open(layout, state))
    in_front = running[layout.start]
    masks = running[layout.start + layout.lengths] - in_front
    column = torch.arange(width, device=masks.device)
    rows = upper_bound(running[1:], in_front[:, None] + column).clamp(max=layout.rows - 1)
    inside = (column < masks.clamp(max=rule.window)[:, None]) & (picked.counts > 0)[:, None]
    window = torch.where(inside, picked.place[rows], -1)
    return torch.cat((window, window.new_full((1, width), -1)))


@dataclass(frozen=True)
class VerifyPlan:
    """Inputs of a verify pass: see `StepInputs` and `VerifyInputs`."""

    ids: Tensor
    positions: Tensor
    tiles: Tensor
    wanted: Tensor
    views: Tensor
    hidden: Tensor
    own_rows: Tensor


def plan_verify(
    rule: FlashRule,
    drafts: Drafts,
    layout: Layout,
    state: CanvasState,
    cache: CacheRows,
    size: int,
    context: int | None,
) -> VerifyPlan:
    """Stage: the verify pass.

    Args:
        rule: of the policy.
        drafts, layout, state: as in `CachePolicy.verify`.
        cache: what the step's forward has left.
        size, context: as in `verify_rows`.
    """
    assert cache.scores is not None
    masked, fresh = rule.masked(layout, state), state.fresh[: layout.rows]
    band = torch.where(masked, 0, torch.where(drafts.committed, 3, torch.where(fresh, 2, 1)))
    plan = verify_rows(
        drafts,
        order_by_score(layout, band, cache.scores),
        state.tokens[: layout.rows],
        layout,
        size=size,
        context=context,
        mask_token_id=rule.mask_token_id,
    )
    cache.computed.add_(plan.real.sum())
    positions = layout.positions[plan.rows]
    cache_rows = torch.where(plan.real, layout.base[layout.sample_of_row[plan.rows]] + positions, cache.spare)
    hidden = torch.zeros(cache.cache.shape[0], dtype=torch.bool, device=positions.device)
    return VerifyPlan(
        ids=plan.ids,
        positions=positions,
        tiles=plan.tiles,
        wanted=plan.masks.flatten(),
        views=plan.views,
        hidden=hidden.scatter_(0, cache_rows, True),
        own_rows=torch.arange(cache.length.shape[0], device=positions.device),
    )
