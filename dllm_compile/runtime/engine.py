# SPDX-License-Identifier: Apache-2.0
"""The decode loop: run steps on the device, look at the done flags now and then, drop finished samples."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import DecodingConfig
from ..errors import DllmCompileError
from .cache import cache_policy
from .facts import ModelFacts, stop_ids
from .layout import Layout, Sample
from .output import FinishedRow, GenerationOutput, build_output
from .prompts import check_mask_token, check_prompts
from .row_programs import RowPrograms
from .state import CanvasState
from .step import StepConstants, decode_step
from .streamers import Streamer
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
    """One call: what is still decoded, what has finished, and the counts."""

    def __init__(
        self, programs: RowPrograms, facts: ModelFacts, prompts: Sequence[Tensor], config: DecodingConfig
    ) -> None:
        self.programs = programs
        self.mask_id = check_mask_token(facts)
        self.stops = stop_ids(facts, config.eos_token_id)
        self.constants = StepConstants.of(config, facts, programs.device)
        self.cache = cache_policy(config, programs)
        self.samples = [Sample.plan(i, prompt, config, self.mask_id) for i, prompt in enumerate(prompts)]
        self.layout = self._lay_out(self.samples)
        self.cache.begin(self.layout)
        self.state = CanvasState.begin(self.layout, self.layout.initial_tokens(self.mask_id))
        self.finished: dict[int, FinishedRow] = {}
        self.forwards = 0
        self.row_forwards = 0

    def _lay_out(self, samples: Sequence[Sample]) -> Layout:
        return Layout.of(
            samples,
            mask_token_id=self.mask_id,
            tile_rows=self.programs.tile_rows,
            guided=self.constants.guidance is not None,
            device=self.programs.device,
        )

    def run(self, check_every: int, feed: StreamFeed | None, bar: Progress) -> None:
        """Step until every sample has finished. Each step commits a token of each active sample, so it ends."""
        budget = max(sample.masks for sample in self.samples)
        while budget > 0:
            for _ in range(check_every):
                decode_step(self.cache, self.constants, self.layout, self.state)
                self.forwards += self.constants.forwards_per_step
                self.row_forwards += self.layout.forward_rows
            budget -= check_every
            if self._look(feed, bar):
                return
        raise DllmCompileError(
            "Decoding does not advance: the model proposed its own mask token, or its logits hold no finite number. "
            "Check the weights (NaN?) and mask_token_id"
        )

    def _look(self, feed: StreamFeed | None, bar: Progress) -> bool:
        """Read the flags, take finished samples out; true when none is left."""
        done: list[bool] = self.state.done.tolist()
        if bar.enabled:
            bar.show(int((self.state.tokens[: self.layout.rows] == self.mask_id).sum()))
        if feed is not None:
            feed.step(self.state.tokens[:-1].cpu(), int(self.state.block[0]), done=done[0])
        if any(done):
            self._harvest([i for i, flag in enumerate(done) if flag])
            keep = [i for i, flag in enumerate(done) if not flag]
            if not keep:
                return True
            # Tokens move, but a sample's own rows, positions and counts stay what they are.
            self.state = self.state.select(self.layout, keep)
            self.layout = self._lay_out([self.layout.samples[i] for i in keep])
            self.cache.begin(self.layout)
            # `plan` pads to the widest block that is left; block numbers are the samples' own and stay valid.
        return False

    def _harvest(self, ended: Sequence[int]) -> None:
        tokens, blocks, steps = self.state.tokens.cpu(), self.state.block.tolist(), self.state.steps.tolist()
        for i in ended:
            sample, offset = self.layout.samples[i], self.layout.offsets[i]
            last = int(sample.blocks[blocks[i]][-1]) + 1
            self.finished[sample.index] = FinishedRow(
                tokens=tokens[offset : offset + sample.length].clone(),
                prompt_length=len(sample.prompt),
                decoded=last - len(sample.prompt),
                forwards=steps[i] * self.constants.forwards_per_step,
            )
