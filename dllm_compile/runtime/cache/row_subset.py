# SPDX-License-Identifier: Apache-2.0
"""Policies that keep every row's keys and values and compute some of the rows in a step.

The chosen rows get fresh keys and values from their current inputs, written before attention reads them; they see all
kept rows of their sample, and rows that are not chosen keep what they had. A subclass says which rows that are, and
when all of them must be computed.

Samples keep their cache rows as long as they are decoded: position p of a sample lies at `Layout.base` + its rank among
the kept rows. Rows that a suffix policy drops have no place, so the keys of a sample are one range.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ...passes.insert_kv_cache import cache_names
from ..layout import Layout, Sample
from ..row_programs import CacheInputs, RowPrograms
from ..rows import PickedRows, pick_rows, tiles_of
from ..shape import ModelShape
from ..stages import RunStage, run_plainly
from ..state import CanvasState
from .base import CachePolicy, CacheRule, Look, Request
from .row_plan import RowPlan, row_plan


@dataclass(frozen=True, kw_only=True)
class RowRule(CacheRule):
    """Which rows a step computes, and when it computes all of them.

    Attributes:
        prunes: a suffix policy drops rows at each block, so that a block always begins with all rows.
        interval: compute all rows every so many forwards; None only when the policy demands it.
    """

    prunes: bool = False
    interval: int | None = None

    @property
    def always(self) -> bool:
        """Every step computes every row."""
        return self.interval == 1

    def rows(self, layout: Layout, state: CanvasState, scores: Tensor | None) -> Tensor:
        """(R,) bool: rows to compute in a step that does not compute all; dropped ones may be among them.

        Args:
            layout, state: as in `CachePolicy.step`.
            scores: (K,) fp32 by cache row, of policies that keep them.
        """
        raise NotImplementedError

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """At block starts, when masks behind an end were filled, and at the interval."""
        if self.always:
            return moves if self.prunes else torch.zeros_like(moves)
        due = moves | ended
        return due if self.interval is None else due | (state.age >= self.interval)


class RowSubset(CachePolicy):
    """Base of the policies.

    Args:
        programs: computes the forwards.
        cache_rows: cache rows of all samples that are decoded at the same time.
        rule: which rows.

    Raises:
        ConfigError: the model has no row programs.
    """

    rule: RowRule

    def __init__(self, programs: RowPrograms, cache_rows: int, rule: RowRule) -> None:
        self.rule = rule
        self._programs = programs
        self._shape = programs.shape  # raises where the model has no row programs
        self._cache_rows = cache_rows
        self._sizes = (0, 0)
        self._caches: dict[str, Tensor] = {}
        self._computed = torch.zeros((), dtype=torch.int64, device=programs.device)

    @abstractmethod
    def most(self, sample: Sample, block: int, masks: int, fresh: int) -> int:
        """At least the number of rows that `rows` chooses for a sample until it is due.

        Args:
            sample: the sample.
            block: its current block.
            masks: masked rows left.
            fresh: rows committed in its last step.
        """

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:
        """Bound the rows of the next steps."""
        plain = look.kept if self.rule.always else self._most(layout, look)
        first = [kept if due else most for kept, due, most in zip(look.kept, look.due, plain, strict=True)]
        self._sizes = (self.bucket(sum(first)), self.bucket(sum(plain)))

    def shapes(self, *, refreshing: bool) -> int:
        """See `CachePolicy.shapes`."""
        return self._sizes[0] if refreshing else self._sizes[1]

    def sizes(self, layout: Layout) -> list[tuple[bool, int]]:
        """See `CachePolicy.sizes`: all samples begin, one begins while the others go on, and none does."""
        every = [sample.length for sample in layout.samples]
        if self.rule.always:
            return [(True, self.bucket(sum(every))), (False, self.bucket(sum(every)))]
        most = [
            max(min(sample.length, self.most(sample, block, sample.masks, 0)) for block in range(len(sample.blocks)))
            for sample in layout.samples
        ]
        first = {self.bucket(sum(every)), *(self.bucket(sum(most) - a + b) for a, b in zip(most, every, strict=True))}
        plain = {self.bucket(rows) for rows in range(1, sum(most) + 1)}
        return [*((True, rows) for rows in sorted(first, reverse=True)), *((False, n) for n in sorted(plain)[::-1])]

    def resize(self, rows: int, *, refreshing: bool) -> None:
        """See `CachePolicy.resize`."""
        self._sizes = (rows, self._sizes[1]) if refreshing else (self._sizes[0], rows)

    def _most(self, layout: Layout, look: Look) -> tuple[int, ...]:
        known = zip(layout.samples, look.block, look.masks, look.fresh, strict=True)
        return tuple(min(kept, self.most(*one)) for kept, one in zip(look.kept, known, strict=True))

    def step(
        self,
        request: Request,
        layout: Layout,
        state: CanvasState,
        *,
        refreshing: bool = True,
        run: RunStage = run_plainly,
    ) -> tuple[Tensor, Tensor]:
        """See `CachePolicy.step`."""
        caches = self.caches(layout.guided)
        cache = self._cache(self.shapes(refreshing=refreshing), layout.guided)
        plan, cache_rows = run(plan_rows, self.rule, request, layout, state, cache)
        return self._programs.cached_step(plan.inputs(request), CacheInputs(caches, cache_rows))

    def _cache(self, size: int, guided: bool, scores: Tensor | None = None) -> CacheRows:
        """What stages know of the cache, for a forward of `size` rows."""
        length = torch.empty(size, dtype=torch.bool, device=self._programs.device)
        spare = self.caches(guided)["k_cache_0"]
        return CacheRows(length, spare, self._computed, scores, self._programs.tile_rows)

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


@dataclass(frozen=True)
class CacheRows:
    """What stages need to know of a cache. Sizes are those of tensors, so that they need not be constants.

    Attributes:
        length: (n,), rows of the forward; what it holds is not read.
        cache: (K, ...), any tensor with a row for each cache row; what it holds is not read. The last row is a spare
            one, into which padding writes; with guidance the second half of the others belongs to the blind rows.
        computed: 0-dim int64, rows computed so far; added to.
        scores: (K,) fp32 by cache row, of policies that keep them.
        tile_rows: most rows of a tile.
    """

    length: Tensor
    cache: Tensor
    computed: Tensor
    scores: Tensor | None
    tile_rows: int | None

    @property
    def spare(self) -> int:
        """The cache row of padding."""
        return self.cache.shape[0] - 1


def plan_rows(
    rule: RowRule, request: Request, layout: Layout, state: CanvasState, cache: CacheRows
) -> tuple[RowPlan, Tensor]:
    """Stage: the forward of a step.

    Args:
        rule, request, layout, state: as in `CachePolicy.step`.
        cache: where the rows go.

    Returns:
        The plan, and (n,) or (2n,) int64: where each row writes its key and value.
    """
    return planned_rows(rule, request, layout, state, cache)[:2]


def planned_rows(
    rule: RowRule, request: Request, layout: Layout, state: CanvasState, cache: CacheRows
) -> tuple[RowPlan, Tensor, PickedRows]:
    """What `plan_rows` returns, and the rows themselves."""
    picked = _pick(rule, request, layout, state, cache)
    cache.computed.add_(picked.counts.sum() * (2 if layout.guided else 1))
    place = layout.base[layout.sample_of_row] + state.rank
    cache_rows = torch.where(picked.real, place[picked.rows], cache.spare)
    first = layout.base[: layout.seats]
    tiles = tiles_of(picked, first, first + state.kept[: layout.seats], cache.tile_rows)
    if layout.guided:
        size, half = cache.length.shape[0], cache.spare // 2
        cache_rows = torch.cat((cache_rows, torch.where(picked.real, cache_rows + half, cache.spare)))
        tiles = torch.cat((tiles, torch.cat((tiles[:, :2] + size, tiles[:, 2:] + half), dim=1)))
    return row_plan(request, layout, state, picked, tiles), cache_rows, picked


def _pick(rule: RowRule, request: Request, layout: Layout, state: CanvasState, cache: CacheRows) -> PickedRows:
    of_row = layout.sample_of_row
    takes_part = ~(state.done | (state.due & ~request.refreshing))
    chosen = state.keep & takes_part[of_row]
    if not rule.always:
        whole = state.due & request.refreshing
        chosen = chosen & (rule.rows(layout, state, cache.scores) | whole[of_row])
    return pick_rows(chosen, layout.start, layout.lengths, cache.length.shape[0])


def allocate(shape: ModelShape, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Zeroed caches: padding sees no key, but what nobody has written must still be finite."""
    size = (rows, shape.kv_heads, shape.head_dim)
    return {name: torch.zeros(size, dtype=shape.dtype, device=device) for name in cache_names(shape.layers)}
