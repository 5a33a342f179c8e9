# SPDX-License-Identifier: Apache-2.0
"""No cache: every step computes every row, or every row that a suffix policy keeps."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..layout import Layout
from ..row_programs import RowPrograms, StepInputs
from ..rows import pick_rows, tiles_of
from ..state import CanvasState
from .base import CachePolicy, Look


class Uncached(CachePolicy):
    """The plain loop."""

    def __init__(self, programs: RowPrograms) -> None:
        self._programs = programs
        self._computed = 0

    def step(
        self, inputs: StepInputs, layout: Layout, state: CanvasState, *, refreshing: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One forward over all rows."""
        return self._programs.step(inputs)

    def shapes(self, *, refreshing: bool) -> int:
        """See `CachePolicy.shapes`: always the same."""
        return 0

    def stepped(self, layout: Layout) -> None:
        """Count the rows."""
        self._computed += sum(sample.length for sample in layout.samples) * (2 if layout.guided else 1)

    @property
    def row_forwards(self) -> int:
        """See `CachePolicy.row_forwards`."""
        return self._computed


class UncachedPruned(CachePolicy):
    """The plain loop over the kept rows. A block waits for a look of the host, which learns how many they are."""

    def __init__(self, programs: RowPrograms) -> None:
        self._programs = programs
        self._kept = self._size = 0
        self._computed = 0

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:
        """Count the rows of the next steps."""
        self._kept = sum(look.kept)
        self._size = self.bucket(self._kept)

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """At block starts."""
        return moves

    def step(
        self, inputs: StepInputs, layout: Layout, state: CanvasState, *, refreshing: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One forward over the kept rows, of waiting samples too."""
        size = self._size
        picked = pick_rows(state.keep, layout.sample_of_row, layout.places, size)
        first = picked.starts[: layout.seats]
        tiles = tiles_of(picked, first, first + picked.counts[: layout.seats], self._programs.tile_rows)
        rows, wanted = picked.rows, picked.place[inputs.wanted]
        if layout.guided:
            rows, tiles = torch.cat((rows, rows + layout.rows)), torch.cat((tiles, tiles + size))
        reduced = dataclasses.replace(
            inputs,
            ids=inputs.ids[rows],
            positions=inputs.positions[rows],
            tiles=tiles,
            wanted=wanted,
            unconditional=wanted + size if layout.guided else None,
        )
        return self._programs.step(reduced)

    def shapes(self, *, refreshing: bool) -> int:
        """See `CachePolicy.shapes`."""
        return self._size

    def sizes(self, layout: Layout) -> list[tuple[bool, int]]:
        """See `CachePolicy.sizes`. How many rows later blocks keep shows in time."""
        return [(True, self._size), (False, self._size)]

    def resize(self, rows: int) -> None:
        """See `CachePolicy.resize`."""
        self._size = rows

    def stepped(self, layout: Layout) -> None:
        """Count the rows."""
        self._computed += self._kept * (2 if layout.guided else 1)

    @property
    def row_forwards(self) -> int:
        """See `CachePolicy.row_forwards`."""
        return self._computed
