# SPDX-License-Identifier: Apache-2.0
"""No cache: every step computes every row, or every row that a suffix policy keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout
from ..row_programs import RowPrograms
from ..rows import pick_rows, tiles_of
from ..stages import RunStage, run_plainly
from ..state import CanvasState
from .base import CachePolicy, CacheRule, Look, Request
from .row_plan import RowPlan, row_plan


class Uncached(CachePolicy):
    """The plain loop."""

    def __init__(self, programs: RowPrograms) -> None:
        self._programs = programs
        self._computed = 0

    def step(
        self,
        request: Request,
        layout: Layout,
        state: CanvasState,
        *,
        refreshing: bool = True,
        run: RunStage = run_plainly,
    ) -> tuple[Tensor, Tensor]:
        """One forward over all rows."""
        return self._programs.step(request.over_all(layout, state))

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


@dataclass(frozen=True, kw_only=True)
class PrunedRule(CacheRule):
    """A block waits for a look of the host, which learns how many rows it keeps."""

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """At block starts."""
        return moves


class UncachedPruned(CachePolicy):
    """The plain loop over the kept rows, where a suffix policy drops some or a layout has rows of no sample.

    Args:
        programs: computes the forwards.
        prunes: a suffix policy drops rows at each block.
    """

    def __init__(self, programs: RowPrograms, *, prunes: bool = True) -> None:
        self.rule = PrunedRule() if prunes else CacheRule()
        self._programs = programs
        self._kept = self._size = 0
        self._computed = 0

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:
        """Count the rows of the next steps."""
        self._kept = sum(look.kept)
        self._size = self.bucket(self._kept)

    def step(
        self,
        request: Request,
        layout: Layout,
        state: CanvasState,
        *,
        refreshing: bool = True,
        run: RunStage = run_plainly,
    ) -> tuple[Tensor, Tensor]:
        """One forward over the kept rows, of waiting samples too."""
        length = torch.empty(self._size, dtype=torch.bool, device=self._programs.device)
        plan: RowPlan = run(plan_kept, request, layout, state, length, self._programs.tile_rows)
        return self._programs.step(plan.inputs(request))

    def shapes(self, *, refreshing: bool) -> int:
        """See `CachePolicy.shapes`."""
        return self._size

    def sizes(self, layout: Layout) -> list[tuple[bool, int]]:
        """See `CachePolicy.sizes`. How many rows later blocks keep shows in time."""
        return [(True, self._size), (False, self._size)]

    def resize(self, rows: int, *, refreshing: bool) -> None:
        """See `CachePolicy.resize`."""
        self._size = rows

    def stepped(self, layout: Layout) -> None:
        """Count the rows."""
        self._computed += self._kept * (2 if layout.guided else 1)

    @property
    def row_forwards(self) -> int:
        """See `CachePolicy.row_forwards`."""
        return self._computed


def plan_kept(request: Request, layout: Layout, state: CanvasState, length: Tensor, tile_rows: int | None) -> RowPlan:
    """Stage: a forward over the kept rows.

    Args:
        request, layout, state: as in `CachePolicy.step`.
        length: (n,), rows of the forward; what it holds is not read.
        tile_rows: most rows of a tile.
    """
    size = length.shape[0]
    picked = pick_rows(state.keep, layout.start, layout.lengths, size)
    first = picked.starts[: layout.seats]
    tiles = tiles_of(picked, first, first + picked.counts[: layout.seats], tile_rows)
    return row_plan(request, layout, state, picked, torch.cat((tiles, tiles + size)) if layout.guided else tiles)
