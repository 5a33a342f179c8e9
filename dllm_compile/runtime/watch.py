# SPDX-License-Identifier: Apache-2.0
"""Who looks on while the loop runs: streamers and the progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from .facts import ModelFacts
from .layout import Sample
from .output import cut_at_stop
from .streamers import Streamer


class StreamFeed:
    """Hands one canvas to a streamer: the prompt, each block when it is finished, drafts in between.

    With masks in the prompt (infilling) the prompt is handed over when they are filled. The block in which the answer
    ends is cut behind its first stop id.
    """

    def __init__(self, streamer: Streamer, sample: Sample, facts: ModelFacts, stops: tuple[int, ...]) -> None:
        if getattr(streamer, "mask_token_id", 0) is None:
            streamer.mask_token_id = facts.mask_token_id  # type: ignore[attr-defined]
        self._streamer, self._sample, self._stops = streamer, sample, stops
        self._block = 0
        self._put = 0  # canvas positions handed over
        self._ended = False
        if not self._sample.infill:
            self._hand_prompt(self._sample.prompt)

    def _hand_prompt(self, tokens: Tensor) -> None:
        self._streamer.put(tokens[None])
        self._put = len(tokens)

    def step(self, tokens: Tensor, block: int, *, done: bool) -> None:
        """Look at the canvas after a step.

        Args:
            tokens: (N,) int64 on the CPU.
            block: the block the sample is in now.
            done: whether the sample has ended, in that block.
        """
        finished = block + 1 if done else block
        for k in range(self._block, finished):
            if k == 0 and self._sample.infill:
                self._hand_prompt(tokens[: len(self._sample.prompt)].clone())
            end = self._sample.span(k)[1]
            if end <= self._put:
                continue
            text = tokens[self._put : end].clone()
            last = done and k == finished - 1
            self._streamer.put(cut_at_stop(text, self._stops, keep_stop=True) if last else text)
            self._put = end
        self._block = finished
        put_draft = getattr(self._streamer, "put_draft", None)
        if put_draft is not None and not done:
            put_draft(value=tokens[None, self._put :].clone())
        if done:
            self.end()

    def end(self) -> None:
        """Tell the streamer, once, that nothing follows."""
        if not self._ended:
            self._ended = True
            self._streamer.end()


def check_streamer(streamer: object) -> None:
    """Refuse what a canvas cannot be shown to.

    Raises:
        ConfigError: it lacks a method of the protocol, or asks for logits, which are never kept.
    """
    needed = ("put", "end", *(("put_draft",) if getattr(streamer, "put_draft", None) is not None else ()))
    if isinstance(streamer, type) or not all(callable(getattr(streamer, name, None)) for name in needed):
        raise ConfigError(
            "streamer must be an object with put(tokens) and end(), such as CanvasStreamer(tokenizer), not "
            f"{streamer!r}"
        )
    if getattr(streamer, "_takes_logits", False):
        raise ConfigError("This streamer asks for logits, which are never kept: use one that takes tokens")


class StreamFeeds:
    """A feed for each prompt of a call, whichever of them are decoded at the moment.

    Raises:
        ConfigError: not as many streamers as prompts, or one that cannot be shown anything.
    """

    def __init__(
        self,
        streamer: Streamer | Sequence[Streamer],
        samples: Sequence[Sample],
        facts: ModelFacts,
        stops: tuple[int, ...],
    ) -> None:
        streamers = streamer if isinstance(streamer, list | tuple) else (streamer,)
        if len(streamers) != len(samples):
            raise ConfigError(
                f"A streamer shows one canvas, and {len(streamers)} came with {len(samples)} prompts: pass a list of "
                "streamers, one for each prompt, or none"
            )
        for one in streamers:  # all of them before the first is handed anything
            check_streamer(one)
        pairs = zip(streamers, samples, strict=True)
        self._feeds = {sample.index: StreamFeed(one, sample, facts, stops) for one, sample in pairs}

    def step(self, samples: Sequence[Sample], tokens: Tensor, block: Sequence[int], done: Sequence[bool]) -> None:
        """Look at the canvases after a step.

        Args:
            samples: those that are decoded now.
            tokens: their canvases one behind the other, on the CPU.
            block, done: as in `StreamFeed.step`, for each.
        """
        begin = 0
        for sample, in_block, ended in zip(samples, block, done, strict=True):
            self._feeds[sample.index].step(tokens[begin : begin + sample.canvas], in_block, done=ended)
            begin += sample.length

    def end(self) -> None:
        """Nothing follows, for anyone."""
        for feed in self._feeds.values():
            feed.end()


class Progress:
    """A bar over committed tokens; without `enabled` it does nothing and imports nothing."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._total = total
        if enabled:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, unit="tok", desc="decoding", dynamic_ncols=True)

    def show(self, masks_left: int) -> None:
        """Move the bar to what has been committed."""
        if self._bar is not None:
            self._bar.update(self._total - masks_left - self._bar.n)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.close()
