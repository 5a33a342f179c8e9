# SPDX-License-Identifier: Apache-2.0
"""One decoding step: choose rows, forward, commit, find the end, move on. Tensor operations only.

Nothing here reads a value on the host, indexes with a boolean mask or looks at one sample after the other, so a step
of a given layout has static shapes and can be captured in a CUDA graph. State is written in place.

A cache policy may demand that a sample's next step computes all of its rows (`CanvasState.due`). Only the step after a
look of the host does that (`refreshing`), since it has another size; until then such a sample waits: it commits nothing
and none of its counters move, so that its tokens do not depend on how often the host looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DecodingConfig
from ..kernels import counter_rng
from .cache import CachePolicy, Drafts
from .commit import CommitRule, FlashVerifyRule, commit_rule
from .eos import BlockView, EosRule, eos_rule
from .facts import ModelFacts, stop_ids
from .layout import Layout
from .row_programs import StepInputs
from .state import NO_END, CanvasState

# Index of the draw for random remasking: Gumbel noise uses the indices [0, vocab_size), so this one is a stream of
# its own.
_REMASKING_STREAM = 2**32 - 1


@dataclass(frozen=True)
class StepConstants:
    """What stays the same for all steps of a call: rules on the host, scalars and id lists on the device.

    Attributes:
        mask_token_id: id of a masked position.
        fill_id: id written behind the end of an answer.
        stops: (n,) int64, ids that end an answer (possibly none).
        banned: (n,) int64, ids that are never proposed; [-1] for none.
        seed: 0-dim int64, the low 32 bits of the seed (all that the generator uses).
        remasking_stream: 0-dim int64 for random remasking, else None.
        temperature: 0-dim fp32, or None when greedy.
        guidance: 0-dim fp32, or None when off.
        stops_last: stop ids get confidence 0.
        commit: the commit rule.
        eos: the end-of-sequence rule.
        fills_at_once: masks behind a known end are filled in that step, not only when the sample is done.
    """

    mask_token_id: int
    fill_id: int
    stops: Tensor
    banned: Tensor
    seed: Tensor
    remasking_stream: Tensor | None
    temperature: Tensor | None
    guidance: Tensor | None
    stops_last: bool
    commit: CommitRule
    eos: EosRule
    fills_at_once: bool

    @classmethod
    def of(cls, config: DecodingConfig, facts: ModelFacts, device: torch.device) -> StepConstants:
        """Constants of `config` for a model with `facts`, whose mask id must be known."""
        assert facts.mask_token_id is not None, "prompts are checked first"
        stops = stop_ids(facts, config.eos_token_id)
        own = [one for one in facts.eos_token_id if one in stops]
        banned = facts.eos_token_id if config.logits_eos_inf else ()

        def ids(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def scalar(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        randomly = config.remasking == "random"
        return cls(
            mask_token_id=facts.mask_token_id,
            fill_id=next(iter((*own, *stops)), facts.mask_token_id),
            stops=ids(stops),
            banned=ids(banned or (-1,)),
            seed=scalar(config.seed & 0xFFFFFFFF, torch.int64),
            remasking_stream=scalar(_REMASKING_STREAM, torch.int64) if randomly else None,
            temperature=scalar(config.temperature, torch.float32) if config.temperature > 0 else None,
            guidance=scalar(config.cfg_scale, torch.float32) if config.cfg_scale > 0 else None,
            stops_last=config.confidence_eos_eot_inf,
            commit=commit_rule(config),
            eos=eos_rule(config),
            fills_at_once=config.has_blocks,
        )

    @property
    def forwards_per_step(self) -> int:
        """Forwards run in one step: 2 with guidance; a verify pass counts, also when it has nothing to check."""
        return self.forwards_per_draft + isinstance(self.commit, FlashVerifyRule)

    @property
    def forwards_per_draft(self) -> int:
        """Forwards of one step in front of a verify pass: 2 with guidance."""
        return 1 if self.guidance is None else 2


def write_look(table: Tensor, state: CanvasState, layout: Layout, mask_token_id: int) -> None:
    """Gather what the host reads between steps, so that it reads once.

    Args:
        table: (6, S) int64, written: done, due, block, kept rows, masked rows, fresh rows of each sample.
        state: after a step.
        layout: where the rows lie.
        mask_token_id: id of a masked position.
    """
    for row, value in enumerate((state.done, state.due, state.block, state.kept)):
        table[row].copy_(value)
    flags = torch.stack((state.tokens[: layout.rows] == mask_token_id, state.fresh[: layout.rows]))
    table[4:].zero_().scatter_add_(1, layout.sample_of_row.expand(2, -1), flags.long())


@dataclass(frozen=True)
class _Block:
    """The current block of each sample before the forward; (S, w) tensors, see `BlockView`."""

    rows: Tensor
    exists: Tensor
    positions: Tensor
    tokens: Tensor
    masked: Tensor

    def at(self, columns: Tensor) -> _Block:
        """The given columns (S, m) of each sample."""
        return _Block(**{name: value.gather(1, columns) for name, value in vars(self).items()})


def decode_step(
    cache: CachePolicy, constants: StepConstants, layout: Layout, state: CanvasState, *, refreshing: bool = True
) -> None:
    """Make one step for every sample that is neither done nor waiting; the others stay as they are.

    Args:
        cache: computes the forward.
        constants: what does not change.
        layout: where the rows lie.
        state: written in place.
        refreshing: this step computes all rows of samples that are due, so that none of them waits.
    """
    active = ~state.done if refreshing else ~(state.done | state.due)
    block = _current_block(constants, layout, state)
    columns = cache.columns(block.masked)
    asked = block if columns is None else block.at(columns)
    seeds = _seeds(constants, layout, state, asked)
    inputs = _inputs(constants, layout, state, asked, seeds)
    token, confidence = cache.step(inputs, layout, state, refreshing=refreshing)
    token, confidence = token.view(asked.rows.shape), confidence.view(asked.rows.shape)
    known = ~confidence.isnan()  # NaN: nothing was proposed, and the loop says that it does not advance
    if seeds is not None and constants.remasking_stream is not None:
        confidence = counter_rng.uniform(seeds, constants.remasking_stream)
    if constants.stops_last:
        confidence = torch.where(_is_stop(constants, token), 0.0, confidence)
    valid = asked.masked & known & (asked.positions < state.end[:, None]) & active[:, None]
    take = constants.commit(confidence, valid, state.masks_at_start, state.step_in_block)
    # Whatever is not taken goes to the spare place behind the last row.
    places = torch.where(take, asked.rows, layout.rows).flatten()
    state.tokens.scatter_(0, places, token.flatten())
    if isinstance(constants.commit, FlashVerifyRule):
        draft = _Draft(asked, token, confidence, valid & ~take, places)
        places = torch.cat((places, _verify(cache, constants, constants.commit, layout, state, block, draft)))
    if cache.tracks_commits:
        fresh = torch.zeros_like(state.fresh).index_fill_(0, places, True)[: layout.rows]
        kept = state.fresh[: layout.rows]
        kept.copy_(torch.where(active[layout.sample_of_row], fresh, kept))
    moves, ended = _advance(constants, layout, state, block, active)
    state.age.copy_(torch.where(active, torch.where(state.due, 1, state.age + 1), state.age))
    state.due.copy_(torch.where(active, cache.due(moves, ended, state), state.due))


@dataclass(frozen=True)
class _Draft:
    """What a step's first forward proposed for the candidates `asked`, (S, m) tensors.

    Attributes:
        asked: the candidates.
        token: proposed tokens.
        confidence: their confidences.
        left: candidates that were not committed.
        places: (S * m,) int64, canvas rows that were, R for those that were not.
    """

    asked: _Block
    token: Tensor
    confidence: Tensor
    left: Tensor
    places: Tensor


def _verify(
    cache: CachePolicy,
    constants: StepConstants,
    rule: FlashVerifyRule,
    layout: Layout,
    state: CanvasState,
    block: _Block,
    draft: _Draft,
) -> Tensor:
    """Check drafts in a second forward and commit what it confirms; the canvas rows (S * c,), R for none."""
    # A stop id of the first forward ends the answer already here: what lies behind it is no candidate.
    end = constants.eos(_view(constants, layout, state, block))
    search = rule.search(draft.confidence, draft.left & (draft.asked.positions < end[:, None]))
    rows, tokens = (value.gather(1, search.columns) for value in (draft.asked.rows, draft.token))
    committed = torch.zeros_like(state.fresh).index_fill_(0, draft.places, True)[: layout.rows]
    drafts = Drafts(rows, tokens, search.real, committed, constants.banned)
    token, confidence, probability = cache.verify(drafts, layout, state)
    if constants.stops_last:
        confidence = torch.where(_is_stop(constants, token), 0.0, confidence)
        probability = torch.where(_is_stop(constants, tokens), 0.0, probability)
    accepted = rule.accept(tokens, token, confidence, probability, search.real)
    places = torch.where(accepted, rows, layout.rows).flatten()
    state.tokens.scatter_(0, places, tokens.flatten())
    state.verified.add_(search.real.any(-1))
    return places


def _current_block(constants: StepConstants, layout: Layout, state: CanvasState) -> _Block:
    width = layout.plan.shape[-1]
    planned = layout.plan.gather(1, state.block[:, None, None].expand(-1, 1, width)).squeeze(1)
    exists = planned >= 0
    rows = torch.where(exists, planned, layout.start[:, None])
    tokens = state.tokens[rows]
    return _Block(rows, exists, layout.positions[rows], tokens, exists & (tokens == constants.mask_token_id))


def _seeds(constants: StepConstants, layout: Layout, state: CanvasState, block: _Block) -> Tensor | None:
    """(S, w) int64: a function of the sample's seed, the position and the sample's own count of steps alone."""
    if constants.temperature is None and constants.remasking_stream is None:
        return None
    of_sample = constants.seed + layout.index
    at_position = counter_rng.combine(of_sample[:, None], block.positions)
    return counter_rng.combine(at_position, state.steps[:, None])


def _inputs(
    constants: StepConstants, layout: Layout, state: CanvasState, block: _Block, seeds: Tensor | None
) -> StepInputs:
    ids, wanted = state.tokens[: layout.rows], block.rows.flatten()
    unconditional = None
    if constants.guidance is not None:
        ids = torch.cat([ids, torch.where(layout.given, constants.mask_token_id, ids)])
        unconditional = wanted + layout.rows
    sampled = constants.temperature is not None and seeds is not None
    return StepInputs(
        ids=ids,
        positions=layout.forward_positions,
        tiles=layout.tiles,
        wanted=wanted,
        banned=constants.banned,
        seeds=seeds.flatten() if sampled and seeds is not None else None,
        temperature=constants.temperature,
        unconditional=unconditional,
        guidance=constants.guidance,
    )


def _is_stop(constants: StepConstants, token: Tensor) -> Tensor:
    return (token[..., None] == constants.stops).any(-1)


def _view(constants: StepConstants, layout: Layout, state: CanvasState, block: _Block) -> BlockView:
    """The current block with what this step has committed so far."""
    tokens = state.tokens[block.rows]
    answer = block.exists & (block.positions >= layout.prompt_length[:, None])
    return BlockView(
        positions=block.positions,
        exists=block.exists,
        open=block.masked & (tokens == constants.mask_token_id),
        stop=answer & _is_stop(constants, tokens),
        end=state.end,
    )


def _advance(
    constants: StepConstants, layout: Layout, state: CanvasState, block: _Block, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the ends, fill what lies behind them, and move samples with a finished block on to the next.

    Returns:
        Two (S,) bool: samples that enter a block, and those whose end became known.
    """
    view = _view(constants, layout, state, block)
    end = torch.where(active, constants.eos(view), state.end)
    finished = active & ~(view.open & (block.positions < end[:, None])).any(-1)
    done = state.done | (finished & ((end != NO_END) | (state.block + 1 >= layout.n_blocks)))
    flat = state.tokens[: layout.rows]
    behind = (flat == constants.mask_token_id) & (layout.positions >= end[layout.sample_of_row])
    if not constants.fills_at_once:
        behind = behind & done[layout.sample_of_row]
    flat.copy_(torch.where(behind, constants.fill_id, flat))

    moves, ended = finished & ~done, end != state.end
    state.end.copy_(end)
    state.done.copy_(done)
    state.block.add_(moves)
    state.steps.add_(active)
    state.step_in_block.copy_(torch.where(moves, 0, state.step_in_block + active))
    next_masks = _current_block(constants, layout, state).masked.sum(-1)
    state.masks_at_start.copy_(torch.where(moves, next_masks, state.masks_at_start))
    return moves, ended
