# SPDX-License-Identifier: Apache-2.0
"""The decode loop: steps on the device, a look at the flags now and then, waiting samples in place of finished ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..config import DecodingConfig
from ..errors import ConfigError, DllmCompileError
from .cache import Look
from .capacity import Capacity
from .commit.flash_verify import within_canvas
from .facts import ModelFacts, stop_ids
from .layout import Sample
from .output import FinishedRow, GenerationOutput, build_output
from .prompts import check_mask_token, check_prompts
from .row_programs import RowPrograms
from .session import Session, SessionPool, session_key
from .slots import Slots
from .streamers import Streamer
from .watch import Progress, StreamFeeds

# Steps between two looks, where nothing waits for one: enough to hide the looks, few enough to waste little at the end.
_STEPS_BETWEEN_LOOKS = 4


# Not inference mode: tensors made there can never be saved for a backward pass, and results of decoding are
# trained on (RL roll-outs).
@torch.no_grad()
def decode(
    programs: RowPrograms,
    facts: ModelFacts,
    prompts: Sequence[Tensor],
    config: DecodingConfig,
    streamer: Streamer | Sequence[Streamer] | None = None,
    progress: bool = False,
    cancelled: Callable[[], bool] | None = None,
    sessions: SessionPool | None = None,
) -> GenerationOutput:
    """Fill the canvas of every prompt.

    Args:
        programs: computes a step over flat rows.
        facts: ids and limits of the model.
        prompts: B tensors (P,) int64, as `split_prompts` returns them.
        config: how to decode.
        streamer: shown the canvas after each step; of several prompts a list, one for each.
        progress: show a bar over committed tokens.
        cancelled: asked at every look; True ends the call with what there is.
        sessions: where buffers and captured steps of earlier calls are kept; None makes new ones and captures nothing.

    Returns:
        Rows in the order of `prompts`, on the device of `programs`. What a row holds does not depend on the others.

    Raises:
        PromptError: a prompt that cannot be decoded (see `check_prompts`), before anything is computed.
        ConfigError: stop ids outside the vocabulary, not as many streamers as prompts, a streamer that cannot be shown
            anything, or `cancelled` that cannot be asked.
    """
    if cancelled is not None and not callable(cancelled):
        raise ConfigError(
            f"cancelled must be a function that says whether to end, such as an event's is_set, not {cancelled!r}"
        )
    check_prompts(prompts, facts, config)
    started = time.perf_counter()
    mask_id, stops = check_mask_token(facts), stop_ids(facts, config.eos_token_id)
    samples = [Sample.plan(i, prompt.cpu(), config, mask_id) for i, prompt in enumerate(prompts)]
    slots = Slots.of(samples, config.slots)
    feed = None if streamer is None else StreamFeeds(streamer, samples, facts, stops)
    bar = Progress(sum(sample.masks for sample in samples), enabled=progress)
    with borrowed_session(programs, facts, samples, slots, config, sessions) as session:
        loop = _Loop(session, samples, slots, config)
        try:
            loop.run(1 if feed is not None else steps_between_looks(config, session), feed, bar, cancelled)
        finally:
            bar.close()
        row_forwards = session.cache.row_forwards - loop.rows_before
    if feed is not None:
        feed.end()
    pads = (facts.pad_token_id, *facts.eos_token_id, 0)
    return build_output(
        [loop.finished[i] for i in range(len(prompts))],
        stops=stops,
        pad_id=next(one for one in pads if one is not None),
        forwards=loop.forwards,
        row_forwards=row_forwards,
        seconds=time.perf_counter() - started,
        device=programs.device,
    )


@contextmanager
def borrowed_session(
    programs: RowPrograms,
    facts: ModelFacts,
    samples: Sequence[Sample],
    slots: Slots,
    config: DecodingConfig,
    sessions: SessionPool | None,
) -> Iterator[Session]:
    """A session with room for `samples`, of which as many as there are free slots are decoded at a time."""
    config = within_canvas(config, max(sample.length for sample in samples))
    if sessions is None or not config.is_capturable:
        yield Session(programs, facts, config, slots.rows)
        return
    capacity = Capacity.of(samples, slots.free, slots.rows, config)
    key = session_key(config, capacity)
    make = lambda: Session(programs, facts, config, slots.rows, capacity, sessions.new_shapes, sessions.run)  # noqa: E731
    with sessions.lend(key, make) as one:
        yield one


def steps_between_looks(config: DecodingConfig, session: Session) -> int:
    """What `check_every` asks for; None: 1, and more where steps are so short that the looks would show."""
    if config.check_every is not None:
        return config.check_every
    # At the end of a block samples of most policies wait for a look.
    return 1 if session.captured is None or config.waits_for_looks else _STEPS_BETWEEN_LOOKS


class _Loop:
    """One call: what is decoded now, what waits, what has finished, and the counts."""

    def __init__(self, session: Session, samples: Sequence[Sample], slots: Slots, config: DecodingConfig) -> None:
        self.session = session
        self.samples = samples
        self.slots = slots
        self.config = config
        self.waiting = deque(samples)
        self.finished: dict[int, FinishedRow] = {}
        self.forwards = 0
        self.rows_before = session.cache.row_forwards

    def run(
        self, check_every: int, feed: StreamFeeds | None, bar: Progress, cancelled: Callable[[], bool] | None
    ) -> None:
        """Step until every sample has finished. The first step after a look advances every sample, so it ends."""
        session = self.session
        first = [self.waiting.popleft() for _ in range(self.slots.free)]
        look = session.start(first, [self.slots.base(sample) for sample in first], self.config)
        while True:
            look = session.prepare(look)
            # Each step commits a token of every sample that does not wait: more steps than masks would be idle.
            for i in range(min(check_every, max(look.masks, default=1))):
                session.step(refreshing=i == 0)
                self.forwards += session.constants.forwards_per_step
            done, seen = session.look()
            if any(a == b for a, b in zip(look.masks, seen.masks, strict=True)):
                raise DllmCompileError(
                    "Decoding does not advance: the model proposed its own mask token, or its logits hold no finite "
                    "number. Check the weights (NaN?) and mask_token_id"
                )
            bar.show(sum(seen.masks) + sum(sample.masks for sample in self.waiting))
            if feed is not None:
                feed.step(session.layout.samples, session.state.tokens.cpu(), seen.block, done)
            if cancelled is not None and cancelled():
                self._give_up(seen)
                return
            look = self._replace(done, seen) if any(done) else seen
            if not look.due:
                return

    def _replace(self, done: Sequence[bool], look: Look) -> Look:
        """Take finished samples out and let others in; the look at what is decoded now."""
        self._harvest([i for i, flag in enumerate(done) if flag])
        keep = [i for i, flag in enumerate(done) if not flag]
        joined = [self.waiting.popleft() for _ in range(min(self.slots.free, len(self.waiting)))]
        if not (keep or joined):
            return look.of(keep)
        stay = [self.session.layout.samples[i] for i in keep]
        bases = [self.slots.base(sample) for sample in (*stay, *joined)]
        return self.session.go_on(keep, look, joined, bases)

    def _harvest(self, ended: Sequence[int]) -> None:
        session, state = self.session, self.session.state
        tokens, blocks, ends = state.tokens.cpu(), state.block.tolist(), state.end.tolist()
        forwards = (state.steps * session.constants.forwards_per_draft + state.verified).tolist()
        for i in ended:
            sample, offset = session.layout.samples[i], session.layout.offsets[i]
            last = sample.span(blocks[i])[1]
            if not session.constants.fills_at_once:
                last = min(last, ends[i])
            self.finished[sample.index] = FinishedRow(
                tokens=tokens[offset : offset + sample.canvas].clone(),
                prompt_length=len(sample.prompt),
                decoded=last - len(sample.prompt),
                forwards=forwards[i],
            )
            self.slots.release(sample)

    def _give_up(self, look: Look) -> None:
        """Hand out every sample as it is; those that have not begun consist of masks."""
        self._harvest(range(len(look.due)))
        mask_id = self.session.constants.mask_token_id
        for sample in self.waiting:
            tokens = torch.full((sample.canvas,), mask_id)
            tokens[: len(sample.prompt)] = sample.prompt
            self.finished[sample.index] = FinishedRow(tokens, len(sample.prompt), decoded=0, forwards=0)
