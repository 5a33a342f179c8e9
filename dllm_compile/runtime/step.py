# SPDX-License-Identifier: Apache-2.0
"""One decoding step: choose rows, forward, commit, find the end, move on. Tensor operations only.

Nothing here reads a value on the host, indexes with a boolean mask or looks at one sample after the other, so a step
of a given layout has static shapes and can be captured in a CUDA graph. State is written in place.

Between its forwards a step consists of stages (see `stages`): `open_step` and the cache policy's plan in front of the
first one, `finish_step` behind it; with a verify pass `draft_step` and the policy's plan of that pass come between, and
`accept_step` ends the step.

A cache policy may demand that a sample's next step computes all of its rows (`CanvasState.due`). Only the step after a
look of the host does that (`refreshing`), since it has another size; until then such a sample waits: it commits nothing
and none of its counters move, so that its tokens do not depend on how often the host looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import counter_rng
from .cache import CachePolicy, CacheRule, Drafts, Request
from .commit import FlashVerifyRule
from .constants import StepConstants
from .current_block import current_block, is_stop, view_of
from .layout import Layout
from .stages import RunStage, run_plainly
from .state import NO_END, CanvasState

__all__ = ["StepConstants", "decode_step"]


def decode_step(
    cache: CachePolicy,
    constants: StepConstants,
    layout: Layout,
    state: CanvasState,
    *,
    refreshing: bool = True,
    look: Tensor | None = None,
    run: RunStage = run_plainly,
) -> None:
    """Make one step for every sample that is neither done nor waiting; the others stay as they are.

    Args:
        cache: computes the forward.
        constants: what does not change.
        layout: where the rows lie.
        state: written in place.
        refreshing: this step computes all rows of samples that are due, so that none of them waits.
        look: (6, S) int64, written: done, due, block, kept rows, masked rows, fresh rows of each sample after the step,
            gathered so that the host reads once.
        run: runs the stages.
    """
    now = constants.flags[refreshing]
    asked: Asked = run(open_step, cache.rule, constants, layout, state, _narrow(cache.rule, layout))
    request = Request(
        rows=asked.rows.flatten(),
        refreshing=now,
        mask_token_id=constants.mask_token_id,
        fill_id=constants.fill_id,
        banned=constants.banned,
        seeds=None if asked.seeds is None or constants.temperature is None else asked.seeds.flatten(),
        temperature=constants.temperature,
        guidance=constants.guidance,
    )
    found = cache.step(request, layout, state, refreshing=refreshing, run=run)
    if not isinstance(constants.commit, FlashVerifyRule):
        run(finish_step, cache.rule, constants, layout, state, asked, *found, now, look)
        return
    rows, tokens, real, committed = run(draft_step, constants, layout, state, asked, *found, now)
    drafts = Drafts(rows, tokens, real, committed, constants.banned)
    checked = cache.verify(drafts, layout, state, run=run)
    run(accept_step, cache.rule, constants, layout, state, drafts, *checked, now, look)


@dataclass(frozen=True)
class Asked:
    """The candidates of a step, (S, m) tensors: columns of the current block in ascending order of position.

    Attributes:
        rows: int64, canvas rows.
        positions: int64, canvas positions.
        masked: bool.
        seeds: int64: a function of the sample's seed, the position and the sample's own count of steps alone. None
            where nothing is drawn.
    """

    rows: Tensor
    positions: Tensor
    masked: Tensor
    seeds: Tensor | None


def _narrow(rule: CacheRule, layout: Layout) -> int | None:
    """The width of blocks that a rule's columns cover, which then decides sizes; None for wider ones."""
    width = layout.plan.shape[-1]
    return width if rule.most_columns is not None and width <= rule.most_columns else None


def open_step(
    rule: CacheRule, constants: StepConstants, layout: Layout, state: CanvasState, narrow: int | None
) -> Asked:
    """Stage: the candidates of each sample. `narrow` tells kinds apart (see `_narrow`)."""
    block = current_block(layout, state, state.block, constants.mask_token_id)
    rows, positions, masked = block.rows, block.positions, block.masked
    columns = rule.columns(masked)
    if columns is not None:
        rows, positions, masked = (value.gather(1, columns) for value in (rows, positions, masked))
    if constants.temperature is None and constants.remasking_stream is None:
        return Asked(rows, positions, masked, None)
    of_sample = constants.seed + layout.index
    at_position = counter_rng.combine(of_sample[:, None], positions)
    return Asked(rows, positions, masked, counter_rng.combine(at_position, state.steps[:, None]))


def finish_step(
    rule: CacheRule,
    constants: StepConstants,
    layout: Layout,
    state: CanvasState,
    asked: Asked,
    token: Tensor,
    confidence: Tensor,
    refreshing: Tensor,
    look: Tensor | None,
) -> None:
    """Stage: commit what a step's only forward proposed, and end the step."""
    places = _commit(constants, layout, state, asked, token, confidence, refreshing)[0]
    fresh = _flagged(state, places) if rule.tracks_commits else None
    _end_step(rule, constants, layout, state, fresh, refreshing, look)


def draft_step(
    constants: StepConstants,
    layout: Layout,
    state: CanvasState,
    asked: Asked,
    token: Tensor,
    confidence: Tensor,
    refreshing: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stage: commit what a step's first forward was sure of, and choose what its second one checks.

    Returns:
        Canvas rows, proposed tokens and reality of the drafts, and what was committed: see `Drafts`.
    """
    assert isinstance(constants.commit, FlashVerifyRule)
    places, confidence, left = _commit(constants, layout, state, asked, token, confidence, refreshing)
    # A stop id of the first forward ends the answer already here: what lies behind it is no candidate.
    end = constants.eos(view_of(constants, layout, state))
    search = constants.commit.search(confidence, left & (asked.positions < end[:, None]))
    rows, tokens = (value.gather(1, search.columns) for value in (asked.rows, token.view(asked.rows.shape)))
    return rows, tokens, search.real, _flagged(state, places)


def accept_step(
    rule: CacheRule,
    constants: StepConstants,
    layout: Layout,
    state: CanvasState,
    drafts: Drafts,
    token: Tensor,
    confidence: Tensor,
    probability: Tensor,
    refreshing: Tensor,
    look: Tensor | None,
) -> None:
    """Stage: commit what the verify pass confirms, and end the step.

    Args:
        rule, constants, layout, state, refreshing, look: as in `decode_step`.
        drafts: what was checked.
        token: (seats * c,) int64, the pass's own token for each candidate.
        confidence: (seats * c,) fp32, its probability.
        probability: (seats * c,) fp32, that of the draft.
    """
    assert isinstance(constants.commit, FlashVerifyRule)
    # The place for left over rows has no sample, and so neither drafts nor rows in the pass.
    rows, tokens, real = (value[: layout.seats] for value in (drafts.rows, drafts.tokens, drafts.real))
    token, confidence, probability = (value.view(rows.shape) for value in (token, confidence, probability))
    if constants.stops_last:
        confidence = torch.where(is_stop(constants, token), 0.0, confidence)
        probability = torch.where(is_stop(constants, tokens), 0.0, probability)
    accepted = constants.commit.accept(tokens, token, confidence, probability, real)
    places = torch.where(accepted, rows, layout.rows).flatten()
    state.tokens[places] = tokens.flatten()
    state.verified.add_(drafts.real.any(-1))
    fresh = rule.fresh(drafts.committed, _flagged(state, places))
    _end_step(rule, constants, layout, state, fresh, refreshing, look)


def _active(state: CanvasState, refreshing: Tensor) -> Tensor:
    """(S,) bool: samples that take part in this step."""
    return ~(state.done | (state.due & ~refreshing))


def _commit(
    constants: StepConstants,
    layout: Layout,
    state: CanvasState,
    asked: Asked,
    token: Tensor,
    confidence: Tensor,
    refreshing: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the tokens that the commit rule takes.

    Returns:
        Canvas rows (S * m,) that were written, R where none was; confidences (S, m) as the rule saw them; and the
        candidates (S, m) bool that are left.
    """
    token, confidence = token.view(asked.rows.shape), confidence.view(asked.rows.shape)
    known = ~confidence.isnan()  # NaN: nothing was proposed, and the loop says that it does not advance
    if asked.seeds is not None and constants.remasking_stream is not None:
        confidence = counter_rng.uniform(asked.seeds, constants.remasking_stream)
    if constants.stops_last:
        confidence = torch.where(is_stop(constants, token), 0.0, confidence)
    active = _active(state, refreshing)[:, None]
    valid = asked.masked & known & (asked.positions < state.end[:, None]) & active
    take = constants.commit(confidence, valid, state.masks_at_start, state.step_in_block)
    # Whatever is not taken goes to the spare place behind the last row.
    places = torch.where(take, asked.rows, layout.rows).flatten()
    state.tokens[places] = token.flatten()
    return places, confidence, valid & ~take


def _flagged(state: CanvasState, places: Tensor) -> Tensor:
    """(R,) bool: the canvas rows among `places`."""
    return torch.zeros_like(state.fresh).scatter_(0, places, True)[:-1]


def _end_step(
    rule: CacheRule,
    constants: StepConstants,
    layout: Layout,
    state: CanvasState,
    fresh: Tensor | None,
    refreshing: Tensor,
    look: Tensor | None,
) -> None:
    """Find the ends, fill what lies behind them, and move samples with a finished block on to the next.

    Args:
        rule, constants, layout, state, refreshing, look: as in `decode_step`.
        fresh: (R,) bool, what this step has committed and the next one must compute; None where nobody asks.
    """
    active, of_row = _active(state, refreshing), layout.sample_of_row
    if fresh is not None:
        kept = state.fresh[: layout.rows]
        kept.copy_(torch.where(active[of_row], fresh, kept))
    view = view_of(constants, layout, state)
    end = torch.where(active, constants.eos(view), state.end)
    finished = active & ~(view.open & (view.positions < end[:, None])).any(-1)
    done = state.done | (finished & ((end != NO_END) | (state.block + 1 >= layout.n_blocks)))
    flat = state.tokens[: layout.rows]
    behind = (flat == constants.mask_token_id) & (layout.positions >= end[of_row])
    if not constants.fills_at_once:
        behind = behind & done[of_row]
    flat.copy_(torch.where(behind, constants.fill_id, flat))

    moves, ended = finished & ~done, end != state.end
    state.end.copy_(end)
    state.done.copy_(done)
    state.block.add_(moves)
    state.steps.add_(active)
    state.step_in_block.copy_(torch.where(moves, 0, state.step_in_block + active))
    next_masks = current_block(layout, state, state.block, constants.mask_token_id).masked.sum(-1)
    state.masks_at_start.copy_(torch.where(moves, next_masks, state.masks_at_start))
    state.age.copy_(torch.where(active, torch.where(state.due, 1, state.age + 1), state.age))
    state.due.copy_(torch.where(active, rule.due(moves, ended, state), state.due))
    if look is not None:
        _write_look(look, state, layout, constants.mask_token_id)


def _write_look(table: Tensor, state: CanvasState, layout: Layout, mask_token_id: int) -> None:
    of_sample = torch.stack((state.done, state.due, state.block, state.kept))
    flags = torch.stack((state.tokens[: layout.rows] == mask_token_id, state.fresh[: layout.rows]))
    running = F.pad(flags, (1, 0)).cumsum(1)
    counts = running[:, layout.start + layout.lengths] - running[:, layout.start]
    table.copy_(torch.cat((of_sample, counts)))
