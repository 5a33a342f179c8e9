# SPDX-License-Identifier: Apache-2.0
"""Policies that keep every row's keys and values and compute some of the rows in a step.

The chosen rows get fresh keys and values from their current inputs, written before attention reads them; they see all
kept rows of their sample, and rows that are not chosen keep what they had. A subclass says which rows that are, and
when all of them must be computed.

Samples keep their cache rows as long as they are decoded: position p of a sample lies at `Layout.base` + its rank among
the kept rows. Rows that a suffix policy drops have no place, so the keys of a sample are one range.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import torch
from torch import Tensor

from ...passes.insert_kv_cache import cache_names
from ..layout import Layout, Sample
from ..row_programs import CacheInputs, RowPrograms, StepInputs
from ..rows import PickedRows, pick_rows, tiles_of
from ..shape import ModelShape
from ..state import CanvasState
from .base import CachePolicy, Look


class RowSubset(CachePolicy):
    """Base of the policies.

    Args:
        programs: computes the forwards.
        cache_rows: cache rows of all samples that are decoded at the same time.
        prunes: a suffix policy drops rows at each block, so that a block always begins with all rows.
        interval: compute all rows every so many forwards; None only when the policy demands it.

    Raises:
        ConfigError: the model has no row programs.
    """

    def __init__(
        self, programs: RowPrograms, cache_rows: int, *, prunes: bool = False, interval: int | None = None
    ) -> None:
        self._programs = programs
        self._shape = programs.shape  # raises where the model has no row programs
        self._cache_rows = cache_rows
        self._prunes = prunes
        self._interval = interval
        self._sizes = (0, 0)
        self._caches: dict[str, Tensor] = {}
        self._computed = torch.zeros((), dtype=torch.int64, device=programs.device)

    @abstractmethod
    def rows(self, layout: Layout, state: CanvasState) -> Tensor:
        """(R,) bool: rows to compute in a step that does not compute all; dropped ones may be among them."""

    @abstractmethod
    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """At least the number of rows that `rows` chooses for a sample until it is due.

        Args:
            sample: the sample.
            block: its current block.
            masks: masked rows left.
            fresh: rows committed in its last step.
        """

    @property
    def always(self) -> bool:
        """Every step computes every row."""
        return self._interval == 1

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:
        """Bound the rows of the next steps."""
        plain = look.kept if self.always else self._most(layout, look)
        first = [kept if due else most for kept, due, most in zip(look.kept, look.due, plain, strict=True)]
        self._sizes = (self.bucket(sum(first)), self.bucket(sum(plain)))

    def shapes(self, *, refreshing: bool) -> int:
        """See `CachePolicy.shapes`."""
        return self._sizes[0] if refreshing else self._sizes[1]

    def sizes(self, layout: Layout) -> list[tuple[bool, int]]:
        """See `CachePolicy.sizes`: all samples begin, one begins while the others go on, and none does."""
        every = [sample.length for sample in layout.samples]
        if self.always:
            return [(True, self.bucket(sum(every))), (False, self.bucket(sum(every)))]
        most = [
            max(min(sample.length, self.most(sample, block, sample.masks, 0)) for block in range(len(sample.blocks)))
            for sample in layout.samples
        ]
        first = {self.bucket(sum(every)), *(self.bucket(sum(most) - a + b) for a, b in zip(most, every, strict=True))}
        plain = {self.bucket(rows) for rows in range(1, sum(most) + 1)}
        return [*((True, rows) for rows in sorted(first, reverse=True)), *((False, n) for n in sorted(plain)[::-1])]

    def resize(self, rows: int) -> None:
        """See `CachePolicy.resize`."""
        self._sizes = (rows, rows)

    def _most(self, layout: Layout, look: Look) -> tuple[int, ...]:
        known = zip(layout.samples, look.block, look.masks, look.fresh, strict=True)
        return tuple(min(kept, self.most(*one)) for kept, one in zip(look.kept, known, strict=True))

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """At block starts, when masks behind an end were filled, and at the interval."""
        if self.always:
            return moves if self._prunes else torch.zeros_like(moves)
        due = moves | ended
        return due if self._interval is None else due | (state.age >= self._interval)

    def step(
        self, inputs: StepInputs, layout: Layout, state: CanvasState, *, refreshing: bool = True
    ) -> tuple[Tensor, Tensor]:
        """See `CachePolicy.step`."""
        picked = self._pick(layout, state, refreshing)
        self._computed.add_(picked.counts.sum() * (2 if layout.guided else 1))
        size, guided = len(picked.rows), layout.guided
        place = layout.base[layout.sample_of_row] + state.rank
        rows, cache_rows = picked.rows, torch.where(picked.real, place[picked.rows], self._spare(guided))
        first = layout.base[: layout.seats]
        tiles = tiles_of(picked, first, first + state.kept[: layout.seats], self._programs.tile_rows)
        if guided:
            blind = torch.where(picked.real, cache_rows + self._cache_rows, self._spare(guided))
            cache_rows = torch.cat((cache_rows, blind))
            rows = torch.cat((rows, rows + layout.rows))
            tiles = torch.cat((tiles, torch.cat((tiles[:, :2] + size, tiles[:, 2:] + self._cache_rows), dim=1)))
        wanted = picked.place[inputs.wanted]
        reduced = dataclasses.replace(
            inputs,
            ids=inputs.ids[rows],
            positions=inputs.positions[rows],
            tiles=tiles,
            wanted=wanted,
            unconditional=wanted + size if guided else None,
        )
        return self._forward(reduced, cache_rows, picked, layout, state)

    def _forward(
        self, inputs: StepInputs, cache_rows: Tensor, picked: PickedRows, layout: Layout, state: CanvasState
    ) -> tuple[Tensor, Tensor]:
        return self._programs.cached_step(inputs, CacheInputs(self.caches(layout.guided), cache_rows))

    def _pick(self, layout: Layout, state: CanvasState, refreshing: bool) -> PickedRows:
        active = ~state.done if refreshing else ~(state.done | state.due)
        chosen = state.keep
        if not self.always:
            chosen = self.rows(layout, state)
            if refreshing:
                chosen = chosen | state.due[layout.sample_of_row]
            chosen = chosen & state.keep
        size = self.shapes(refreshing=refreshing)
        return pick_rows(chosen & active[layout.sample_of_row], layout.sample_of_row, layout.places, size)

    def _spare(self, guided: bool) -> int:
        """The cache row into which padding writes."""
        return self._cache_rows * (2 if guided else 1)

    def caches(self, guided: bool) -> dict[str, Tensor]:
        """Keys and values of every layer, one spare row behind the last; allocated when first asked for."""
        if not self._caches:
            self._caches = allocate(self._shape, self._spare(guided) + 1, self._programs.device)
        return self._caches

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated."""
        return sum(cache.numel() * cache.element_size() for cache in self._caches.values())

    @property
    def row_forwards(self) -> int:
        """See `CachePolicy.row_forwards`."""
        return int(self._computed)


def allocate(shape: ModelShape, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Zeroed caches: padding sees no key, but what nobody has written must still be finite."""
    size = (rows, shape.kv_heads, shape.head_dim)
    return {name: torch.zeros(size, dtype=shape.dtype, device=device) for name in cache_names(shape.layers)}
