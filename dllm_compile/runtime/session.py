# SPDX-License-Identifier: Apache-2.0
"""What decoding needs as long as it goes on: rules, caches, the canvas and its layout, and captured steps.

Without captured steps a session lasts for one call and everything has the size that the call needs. With them it
outlives the call: its buffers have room for prompts of other lengths, and stay where they are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..config import DecodingConfig, NewShapes
from ..export_gate import EXPORT_GATE
from .cache import Look, cache_policy
from .capacity import Capacity, bucket
from .captured import MOST_CAPTURED_ROWS, CapturedSteps
from .facts import ModelFacts
from .layout import Layout, Sample
from .row_programs import RowPrograms
from .stages import RunStage, run_plainly
from .state import CanvasState
from .step import StepConstants, decode_step
from .suffix import choose_rows, suffix_rule

_T = TypeVar("_T", Layout, CanvasState)

# What a step does not depend on, or what is written anew into a buffer at each call.
_PER_CALL = frozenset({"seed", "slots", "check_every", "max_new_tokens"})


class Session:
    """Samples that are decoded together, and the step that advances them.

    Args:
        programs: computes the forwards.
        facts: ids of the model, the mask id among them.
        config: how to decode.
        cache_rows: cache rows of all samples that are decoded at the same time.
        capacity: sizes of the buffers; None: those that the samples at hand need, and no step is captured.
        new_shapes: see `CapturedSteps`.
        run: runs the stages of a step.
    """

    def __init__(
        self,
        programs: RowPrograms,
        facts: ModelFacts,
        config: DecodingConfig,
        cache_rows: int,
        capacity: Capacity | None = None,
        new_shapes: NewShapes = "capture",
        run: RunStage = run_plainly,
    ) -> None:
        assert facts.mask_token_id is not None, "prompts are checked first"
        self.constants = StepConstants.of(config, facts, programs.device)
        rows = cache_rows if capacity is None else capacity.rows
        self.cache = cache_policy(config, programs, rows, facts.mask_token_id, spare=capacity is not None)
        self.layout: Layout
        self.state: CanvasState
        self._programs = programs
        self._run = run
        self._mask_id = facts.mask_token_id
        self._capacity = capacity
        self._suffix = suffix_rule(config)
        self._held: dict[str, Tensor] = {}
        self._table = torch.zeros(0, dtype=torch.int64)
        self._due = True
        self.captured: CapturedSteps | None = None
        if capacity is not None:
            self.cache.bucket = bucket
            if programs.device.type == "cuda":
                held = self._held  # not the session itself: a cycle would keep its caches until it is collected
                self.captured = CapturedSteps(programs.device, new_shapes, lambda: tuple(held.values()))

    def start(self, samples: Sequence[Sample], bases: Sequence[int], config: DecodingConfig) -> Look:
        """Forget what was decoded before and begin with `samples`, whose cache rows begin at `bases`.

        Args:
            samples: at least one.
            bases: first cache row of each.
            config: as the session's own, but for what may differ from call to call (see `key`).
        """
        self.constants.seed.fill_(config.seed & 0xFFFFFFFF)
        self._suffix = suffix_rule(config)
        layout = self._lay_out(samples, bases)
        self.layout = self._hold(layout)
        self.cache.begin(self.layout)
        self.state = self._hold(CanvasState.begin(self.layout, self.layout.initial_tokens(self._mask_id)))
        self._table = self._held.setdefault("look", layout.start.new_zeros((6, layout.places)))
        return Look.at_the_beginning(samples)

    def go_on(self, keep: Sequence[int], look: Look, joined: Sequence[Sample], bases: Sequence[int]) -> Look:
        """Take samples out and let others in.

        Args:
            keep: places of the samples that stay.
            look: at all samples so far.
            joined: samples that have not begun.
            bases: first cache row of those that stay, then of those that join.
        """
        samples = [*(self.layout.samples[i] for i in keep), *joined]
        # Rows move, but a sample's positions, counts and cache rows stay what they are.
        layout = self._lay_out(samples, bases)
        tokens = layout.initial_tokens(self._mask_id)
        state = self.state.carried(self.layout, keep, layout, tokens)
        self.layout, self.state = self._hold(layout), self._hold(state)
        if self._capacity is None:
            self._table = self._table.new_zeros((6, layout.places))
        self.cache.begin(self.layout, keep)
        return look.of(keep) + Look.at_the_beginning(joined)

    def _lay_out(self, samples: Sequence[Sample], bases: Sequence[int]) -> Layout:
        return Layout.of(
            samples,
            mask_token_id=self._mask_id,
            tile_rows=self._programs.tile_rows,
            guided=self.constants.guidance is not None,
            device=self._programs.device,
            bases=bases,
            capacity=self._capacity,
        )

    def _hold(self, value: _T) -> _T:
        """`value` with its tensors in the session's buffers; as it is without captured steps."""
        if self._capacity is None:
            return value
        kept: dict[str, Tensor] = {}
        for field in fields(value):
            tensor = getattr(value, field.name)
            if isinstance(tensor, Tensor):
                name = f"{type(value).__name__}.{field.name}"
                kept[field.name] = self._held.setdefault(name, tensor)
                if kept[field.name] is not tensor:
                    kept[field.name].copy_(tensor)
        return replace(value, **kept)  # type: ignore[arg-type]

    def prepare(self, look: Look) -> Look:
        """Choose what exists in blocks that begin now, and the sizes of the next steps."""
        if self._suffix is not None and any(look.due):
            choose_rows(self._suffix, self.layout, self.state, self._mask_id)
            look = replace(look, kept=tuple(self.state.kept[: len(look.kept)].tolist()))
        self.cache.look(self.layout, self.state, look)
        self._due = any(look.due)
        return look

    def step(self, *, refreshing: bool) -> None:
        """Advance every sample that is neither done nor waiting.

        Args:
            refreshing: samples that are due compute all their rows; otherwise they wait.
        """
        with EXPORT_GATE.running():
            if self.captured is None:
                self._step(refreshing)
            else:
                refreshing = refreshing and self._due  # the same step, where none is due
                self.captured.run(self._key(self.captured, refreshing), lambda: self._step(refreshing))
        self.cache.stepped(self.layout)

    def _key(self, captured: CapturedSteps, refreshing: bool) -> tuple[bool, int] | None:
        """What tells the next step from others; None where it is not to be captured."""
        rows = self.cache.shapes(refreshing=refreshing)
        if rows is None or (rows or self.layout.forward_rows) > MOST_CAPTURED_ROWS:
            return None
        larger = captured.at_least(refreshing, rows)
        if larger is not None and larger != rows:
            self.cache.resize(larger, refreshing=refreshing)
            rows = larger
        return refreshing, rows

    def rehearse(self, rows: int, *, refreshing: bool) -> None:
        """A step of `rows` rows, as `CachePolicy.sizes` names them, while every sample is done: it changes nothing."""
        self._due = refreshing
        self.cache.resize(rows, refreshing=refreshing)
        self.step(refreshing=refreshing)

    def _step(self, refreshing: bool) -> None:
        decode_step(
            self.cache,
            self.constants,
            self.layout,
            self.state,
            refreshing=refreshing,
            look=self._table,
            run=self._run,
        )

    def look(self) -> tuple[list[bool], Look]:
        """What the host reads between steps, all at once: the done flags, and what policies must know."""
        table = self._table[:, : len(self.layout.samples)].tolist()
        done, due, block, kept, masks, fresh = table
        look = Look(
            block=tuple(block), due=tuple(map(bool, due)), kept=tuple(kept), masks=tuple(masks), fresh=tuple(fresh)
        )
        return list(map(bool, done)), look


def session_key(config: DecodingConfig, capacity: Capacity) -> Hashable:
    """Equal for calls that can use the same session."""
    per_call = _PER_CALL if config.steps is None else _PER_CALL - {"max_new_tokens"}
    return capacity, tuple(getattr(config, field.name) for field in fields(config) if field.name not in per_call)


class SessionPool:
    """Sessions between calls: the ones used last are kept, with their caches and graphs.

    Two calls at the same time never share one.

    Args:
        new_shapes: what happens after a warm-up to a step that was not captured.
        keep: sessions that are kept while nobody uses them.
        run: runs the stages of their steps.
    """

    def __init__(self, new_shapes: NewShapes = "capture", keep: int = 2, run: RunStage = run_plainly) -> None:
        self.new_shapes = new_shapes
        self.run = run
        self._keep = keep
        self._idle: OrderedDict[Hashable, list[Session]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], Session]) -> Iterator[Session]:
        """A session for `key`, made where none is idle."""
        with self._lock:
            idle = self._idle.get(key)
            session = idle.pop() if idle else None
            if session is None:
                self._shrink(self._keep - 1)  # before another set of caches is allocated
        session = make() if session is None else session
        yield session
        # After an error it is not used again: what it holds may be half written.
        with self._lock:
            self._idle.setdefault(key, []).append(session)
            self._idle.move_to_end(key)
            self._shrink(self._keep)

    def idle(self) -> tuple[Session, ...]:
        """Sessions that are kept and that nobody uses now."""
        with self._lock:
            return tuple(session for sessions in self._idle.values() for session in sessions)

    def clear(self) -> None:
        """Give up idle sessions and the memory they hold."""
        with self._lock:
            self._shrink(0)

    def _shrink(self, most: int) -> None:
        while sum(map(len, self._idle.values())) > most:
            key, idle = next(iter(self._idle.items()))
            if idle:
                idle.pop(0)
            if not idle:
                del self._idle[key]
