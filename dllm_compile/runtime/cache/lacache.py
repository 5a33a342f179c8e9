# SPDX-License-Identifier: Apache-2.0
"""LaCache: chosen layers keep q, k, v and the attention state of all rows outside the block being decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...config import DecodingConfig
from ...errors import ConfigError
from ..block_tiles import block_edges, block_rows, block_tile_table
from ..layout import Layout
from ..row_programs import LaCacheInputs, RowPrograms, StepInputs
from ..rows import PickedRows, pick_rows, tiles_of
from ..shape import ModelShape
from ..stages import RunStage, run_plainly
from ..state import CanvasState
from .base import CachePolicy, CacheRule, Look, Request


def cached_layers(config: DecodingConfig, layers: int) -> tuple[int, ...]:
    """The layers to cache: 0 alone, or the paper's wider set (0 and 3-17 of 32) as a share of the depth.

    Raises:
        ConfigError: a layer the model does not have.
    """
    chosen = config.lacache_layers
    if chosen == "first":
        return (0,)
    if chosen == "wide":
        first, last = (round(share * layers / 32) for share in (3, 18))
        return (0, *range(max(first, 1), last))
    if max(chosen) >= layers:
        raise ConfigError(f"lacache_layers names layer {max(chosen)}, the model has {layers}: count from 0")
    return tuple(sorted(set(chosen)))


@dataclass(frozen=True, kw_only=True)
class LaCacheRule(CacheRule):
    """When the state of a sample must be filled.

    Attributes:
        prunes: a suffix policy drops rows at each block.
        interval: fill every so many forwards; None only where tokens outside the block have changed.
    """

    prunes: bool
    interval: int | None

    @property
    def always(self) -> bool:
        """In every step."""
        return self.interval == 1

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """At block starts, when masks behind an end were filled, and at the interval."""
        if self.always:
            return moves if self.prunes else torch.zeros_like(moves)
        due = moves | ended
        return due if self.interval is None else due | (state.age >= self.interval)


class LaCache(CachePolicy):
    """Exact for layer 0; with more layers a policy, refreshed every `lacache_interval` steps.

    The state of a sample is filled when it enters a block, when an answer's end is found inside one (which fills what
    lies behind it), and at the interval: the tokens outside the block may then be others, or their inputs old. With
    layer 0 alone any state that is filled while these tokens stand is right, so one sample that must be filled has
    all of them filled, in one launch. With more layers the time of filling decides the result, which must not depend
    on the other samples: those that must be filled and the others then go through launches of their own.

    Args:
        programs: computes the forwards.
        config: which layers, and the interval.
        rows: rows of the largest layout, without the unconditional half; None: those of the first one.
    """

    def __init__(self, programs: RowPrograms, config: DecodingConfig, rows: int | None = None) -> None:
        self._programs = programs
        self._layers = cached_layers(config, programs.shape.layers)
        self._exact = self._layers == (0,)
        self.rule: LaCacheRule = LaCacheRule(prunes=config.suffix != "all", interval=config.lacache_interval)
        self._rows = rows
        self._buffers: dict[str, Tensor] = {}
        # The state's rows are the kept rows of the canvas, sample by sample, then the same of the unconditional half.
        self._counts: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = ()  # where each sample's state lies; -1: it has none
        self._half = 0
        self._due: tuple[bool, ...] = ()
        self._members = torch.zeros(0, dtype=torch.bool)
        self._computed = 0

    @property
    def state_bytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    @property
    def row_forwards(self) -> int:
        """See `CachePolicy.row_forwards`."""
        return self._computed

    def begin(self, layout: Layout, kept: Sequence[int] = ()) -> None:
        """Allocate the state at the first call. All of it counts as old until `look` tells otherwise."""
        if not self._buffers:
            rows = layout.forward_rows if self._rows is None else self._rows * (2 if layout.guided else 1)
            self._buffers = allocate(self._programs.shape, self._layers, rows, self._programs.device)
            self._half = layout.rows
        self._starts = tuple(self._starts[i] for i in kept) + (-1,) * (len(layout.samples) - len(kept))
        self._counts = tuple(sample.length for sample in layout.samples)
        self._due = (True,) * len(layout.samples)

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:
        """Decide what is filled, and move the state of the other samples to where their rows are now."""
        half, starts = sum(look.kept), _starts(look.kept)
        moved = any(old not in (new, -1) for old, new in zip(self._starts, starts, strict=True))
        moved = moved or (layout.guided and half != self._half)
        fill_all = self._exact and (moved or any(look.due))
        self._due = (True,) * len(look.due) if fill_all else look.due
        if moved and not fill_all and not self.rule.always:
            self._move(look, layout.guided)
        self._starts, self._counts, self._half = starts, look.kept, half
        self._members = torch.tensor(self._due, device=self._programs.device)

    def _move(self, look: Look, guided: bool) -> None:
        known = zip(self._starts, look.kept, look.due, strict=True)
        parts = [torch.arange(count) + (0 if due else start) for start, count, due in known]
        index = torch.cat(parts)
        if guided:
            index = torch.cat((index, index + self._half))
        index = index.to(self._programs.device)
        for buffer in self._buffers.values():
            buffer[: len(index)] = buffer[index]

    def step(
        self,
        request: Request,
        layout: Layout,
        state: CanvasState,
        *,
        refreshing: bool = True,
        run: RunStage = run_plainly,
    ) -> tuple[Tensor, Tensor]:
        """Fill the state, or use it, or both where samples differ."""
        self._computed += sum(self._counts) * (2 if layout.guided else 1)
        due, inputs = self._due, request.over_all(layout, state)
        if not (refreshing and any(due)):
            return self._run(inputs, layout, state, fill=self.rule.always)
        self._due = (False,) * len(due)
        if all(due) or self.rule.always:
            return self._run(inputs, layout, state, fill=True)
        members = self._members
        filled = self._run(inputs, layout, state, fill=True, members=members, group=due)
        used = self._run(inputs, layout, state, fill=False, members=~members, group=tuple(not one for one in due))
        from_filled = members[layout.sample_of_row[inputs.wanted]]
        return torch.where(from_filled, filled[0], used[0]), torch.where(from_filled, filled[1], used[1])

    def _run(
        self,
        inputs: StepInputs,
        layout: Layout,
        state: CanvasState,
        *,
        fill: bool,
        members: Tensor | None = None,
        group: tuple[bool, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One launch, over all samples or over a group of them."""
        blocks = block_rows(layout.plan, state.block)
        buffers: Mapping[str, Tensor] = self._buffers
        if members is None and not self.rule.prunes:
            start, length, size = layout.start, layout.lengths, layout.rows
            index = None
        else:
            chosen = state.keep if members is None else state.keep & members[layout.sample_of_row]
            size = sum(self._counts[i] for i in range(len(self._counts)) if group is None or group[i])
            picked = pick_rows(chosen, layout.start, layout.lengths, size)
            # A sample that waits has entered a block of which rows may still be dropped: any row of its own will do.
            blocks = torch.where(state.keep[blocks], blocks, layout.start[:, None])
            inputs, blocks = self._reduced(inputs, picked, layout), picked.place[blocks]
            start, length = picked.starts, picked.counts
            index = None if members is None else self._index(picked, layout, state)
        edges = block_edges(blocks)
        rows = blocks.flatten()
        if members is not None:
            edges = torch.where(members[:, None], edges, start[:, None])
            # Samples of the other group name a row that is computed anyway.
            computed = blocks[:, 0].index_select(0, members.long().argmax(0, keepdim=True))
            rows = torch.where(members[:, None], blocks, computed).flatten()
        table = block_tile_table(start, length, edges, self._programs.tile_rows, max(self._counts))
        if layout.guided:
            table = torch.cat((table, table + size))
            rows = torch.cat((rows, rows + size))
        total = size * (2 if layout.guided else 1)
        # A compiled program has two rows at least: a row that is alone gets a twin, in the state as in the inputs.
        if index is not None and total == 1:
            index = index.repeat(2)
        buffers = {n: b[: max(total, 2)] if index is None else b[index] for n, b in buffers.items()}
        cache = LaCacheInputs(layers=self._layers, block_tiles=table, block_rows=None if fill else rows, state=buffers)
        result = self._programs.lacache_step(inputs, cache)
        if index is not None:
            for name, part in buffers.items():
                self._buffers[name][index[:total]] = part[:total]
        return result

    def _reduced(self, inputs: StepInputs, picked: PickedRows, layout: Layout) -> StepInputs:
        tiles = tiles_of(picked, picked.starts, picked.starts + picked.counts, self._programs.tile_rows)
        rows, size, wanted = picked.rows, len(picked.rows), picked.place[inputs.wanted]
        if layout.guided:
            rows, tiles = torch.cat((rows, rows + layout.rows)), torch.cat((tiles, tiles + size))
        return dataclasses.replace(
            inputs,
            ids=inputs.ids[rows],
            positions=inputs.positions[rows],
            tiles=tiles,
            wanted=wanted,
            unconditional=wanted + size if layout.guided else None,
        )

    def _index(self, picked: PickedRows, layout: Layout, state: CanvasState) -> Tensor:
        """Rows of the state of the picked rows."""
        start = state.kept.cumsum(0) - state.kept
        index = start[layout.sample_of_row[picked.rows]] + state.rank[picked.rows]
        return torch.cat((index, index + self._half)) if layout.guided else index


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))[:-1]


def allocate(shape: ModelShape, layers: tuple[int, ...], rows: int, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised state of `rows` rows; `first` writes whatever `step` reads."""
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if 0 in layers:
        sizes["h"] = ((shape.width,), shape.dtype)
    for layer in layers:
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            sizes[f"{name}_{layer}"] = ((heads, shape.head_dim), shape.dtype)
        sizes[f"m_{layer}"] = sizes[f"den_{layer}"] = ((shape.heads,), torch.float32)
        sizes[f"num_{layer}"] = ((shape.heads, shape.head_dim), torch.float32)
    return {n: torch.empty((rows, *size), dtype=dtype, device=device) for n, (size, dtype) in sizes.items()}
