# SPDX-License-Identifier: Apache-2.0
"""The decode loop: steps on the device, a look at the flags now and then, waiting samples in place of finished ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import DecodingConfig
from ..errors import DllmCompileError
from .cache import Look, cache_policy
from .facts import ModelFacts, stop_ids
from .layout import Layout, Sample
from .output import FinishedRow, GenerationOutput, build_output
from .prompts import check_mask_token, check_prompts
from .row_programs import RowPrograms
from .slots import Slots
from .state import CanvasState
from .step import StepConstants, decode_step
from .streamers import Streamer
from .suffix import choose_rows, suffix_rule
from .watch import Progress, StreamFeed


# Not inference mode: tensors made there can never be saved for a backward pass, and results of decoding are
# trained on (RL roll-outs).
@torch.no_grad()
def decode(
    programs: RowPrograms,
    facts: ModelFacts,
    prompts: Sequence[Tensor],
    config: DecodingConfig,
    streamer: Streamer | None = None,
    progress: bool = False,
) -> GenerationOutput:
    """Fill the canvas of every prompt.

    Args:
        programs: computes a step over flat rows.
        facts: ids and limits of the model.
        prompts: B tensors (P,) int64, as `split_prompts` returns them.
        config: how to decode.
        streamer: shown the canvas after each step; for one prompt only.
        progress: show a bar over committed tokens.

    Returns:
        Rows in the order of `prompts`, on the device of `programs`. What a row holds does not depend on the others.

    Raises:
        PromptError: a prompt that cannot be decoded (see `check_prompts`), before anything is computed.
        ConfigError: stop ids outside the vocabulary, or a streamer with several prompts.
    """
    check_prompts(prompts, facts, config)
    started = time.perf_counter()
    loop = _Loop(programs, facts, [prompt.cpu() for prompt in prompts], config)
    feed = None if streamer is None else StreamFeed(streamer, loop.samples, facts, loop.stops)
    bar = Progress(sum(sample.masks for sample in loop.samples), enabled=progress)
    try:
        loop.run(1 if feed is not None else config.check_every, feed, bar)
    finally:
        bar.close()
    if feed is not None:
        feed.end()
    pads = (facts.pad_token_id, *facts.eos_token_id, 0)
    return build_output(
        [loop.finished[i] for i in range(len(prompts))],
        stops=loop.stops,
        pad_id=next(one for one in pads if one is not None),
        forwards=loop.forwards,
        row_forwards=loop.row_forwards,
        seconds=time.perf_counter() - started,
        device=programs.device,
    )


class _Loop:
    """One call: what is decoded now, what waits, what has finished, and the counts."""

    def __init__(
        self, programs: RowPrograms, facts: ModelFacts, prompts: Sequence[Tensor], config: DecodingConfig
    ) -> None:
        self.programs = programs
        self.mask_id = check_mask_token(facts)
        self.stops = stop_ids(facts, config.eos_token_id)
        self.constants = StepConstants.of(config, facts, programs.device)
        self.suffix = suffix_rule(config)
        self.samples = [Sample.plan(i, prompt, config, self.mask_id) for i, prompt in enumerate(prompts)]
        self.slots = Slots.of(self.samples, config.slots)
        self.cache = cache_policy(config, programs, self.slots.rows, self.mask_id)
        self.waiting = deque(self.samples)
        self.finished: dict[int, FinishedRow] = {}
        self.forwards = 0
        first = [self.waiting.popleft() for _ in range(self.slots.free)]
        self.layout = self._lay_out(first)
        self.cache.begin(self.layout)
        self.state = CanvasState.begin(self.layout, self.layout.initial_tokens(self.mask_id))

    @property
    def row_forwards(self) -> int:
        """Rows computed."""
        return self.cache.row_forwards

    def _lay_out(self, samples: Sequence[Sample]) -> Layout:
        return Layout.of(
            samples,
            mask_token_id=self.mask_id,
            tile_rows=self.programs.tile_rows,
            guided=self.constants.guidance is not None,
            device=self.programs.device,
            bases=[self.slots.base(sample) for sample in samples],
        )

    def run(self, check_every: int, feed: StreamFeed | None, bar: Progress) -> None:
        """Step until every sample has finished. The first step after a look advances every sample, so it ends."""
        look = Look.at_the_beginning(self.layout.samples)
        while True:
            self.cache.look(self.layout, self.state, self._with_suffix(look))
            # Each step commits a token of every sample that does not wait: more steps than masks would be idle.
            for i in range(min(check_every, max(look.masks, default=1))):
                decode_step(self.cache, self.constants, self.layout, self.state, refreshing=i == 0)
                self.forwards += self.constants.forwards_per_step
            done, seen = self._look()
            if any(a == b for a, b in zip(look.masks, seen.masks, strict=True)):
                raise DllmCompileError(
                    "Decoding does not advance: the model proposed its own mask token, or its logits hold no finite "
                    "number. Check the weights (NaN?) and mask_token_id"
                )
            bar.show(sum(seen.masks) + sum(sample.masks for sample in self.waiting))
            if feed is not None:
                feed.step(self.state.tokens[:-1].cpu(), seen.block[0], done=done[0])
            look = self._replace(done, seen) if any(done) else seen
            if not look.due:
                return

    def _with_suffix(self, look: Look) -> Look:
        """Choose which masks exist in blocks that begin now."""
        if self.suffix is None or not any(look.due):
            return look
        choose_rows(self.suffix, self.layout, self.state, self.mask_id)
        return replace(look, kept=tuple(self.state.kept.tolist()))

    def _look(self) -> tuple[list[bool], Look]:
        """What the host reads between steps, all at once: the done flags, and what policies must know."""
        state, layout = self.state, self.layout
        flags = torch.stack((state.tokens[: layout.rows] == self.mask_id, state.fresh[: layout.rows]))
        counts = flags.new_zeros((2, len(layout.samples)), dtype=torch.int64)
        counts.scatter_add_(1, layout.sample_of_row.expand(2, -1), flags.long())
        table = torch.cat((torch.stack((state.done.long(), state.due.long(), state.block, state.kept)), counts))
        done, due, block, kept, masks, fresh = table.tolist()
        look = Look(
            block=tuple(block), due=tuple(map(bool, due)), kept=tuple(kept), masks=tuple(masks), fresh=tuple(fresh)
        )
        return list(map(bool, done)), look

    def _replace(self, done: Sequence[bool], look: Look) -> Look:
        """Take finished samples out and let others in; the look at what is decoded now."""
        self._harvest([i for i, flag in enumerate(done) if flag])
        keep = [i for i, flag in enumerate(done) if not flag]
        joined = [self.waiting.popleft() for _ in range(min(self.slots.free, len(self.waiting)))]
        look = look.of(keep) + Look.at_the_beginning(joined)
        if look.due:
            # Rows move, but a sample's positions, counts and cache rows stay what they are.
            layout = self._lay_out([*(self.layout.samples[i] for i in keep), *joined])
            self.state = self.state.carried(self.layout, keep, layout, layout.initial_tokens(self.mask_id))
            self.layout = layout
            self.cache.begin(layout, keep)
        return look

    def _harvest(self, ended: Sequence[int]) -> None:
        state = self.state
        tokens, blocks, steps, ends = state.tokens.cpu(), state.block.tolist(), state.steps.tolist(), state.end.tolist()
        for i in ended:
            sample, offset = self.layout.samples[i], self.layout.offsets[i]
            last = sample.span(blocks[i])[1]
            if not self.constants.fills_at_once:
                last = min(last, ends[i])
            self.finished[sample.index] = FinishedRow(
                tokens=tokens[offset : offset + sample.length].clone(),
                prompt_length=len(sample.prompt),
                decoded=last - len(sample.prompt),
                forwards=steps[i] * self.constants.forwards_per_step,
            )
            self.slots.release(sample)
