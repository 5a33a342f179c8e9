# SPDX-License-Identifier: Apache-2.0
"""LaCache: chosen layers keep q, k, v and the attention state of all rows outside the block being decoded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...config import DecodingConfig
from ...errors import ConfigError
from ..block_tiles import block_edges, block_rows, block_tile_table
from ..layout import Layout
from ..row_programs import LaCacheInputs, RowPrograms, StepInputs
from ..shape import ModelShape
from ..state import CanvasState


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


class LaCache:
    """Exact for layer 0; with more layers a policy, refreshed every `lacache_interval` steps.

    The state is allocated once a call, for the largest layout (the first one). It is filled anew when a sample enters a
    block, when an answer's end is found inside one (which fills what lies behind it), and when samples leave: the
    tokens outside the block may then be others.
    """

    looks_every_step = True

    def __init__(self, programs: RowPrograms, config: DecodingConfig) -> None:
        self._programs = programs
        self._layers = cached_layers(config, programs.shape.layers)
        self._interval = config.lacache_interval
        self._buffers: dict[str, Tensor] = {}
        self._key: Tensor | None = None
        self._age = 0
        self.first_steps = 0

    def begin(self, layout: Layout) -> None:
        """Allocate the state for the largest layout, or take the front of it; the next step fills it."""
        rows = layout.forward_rows
        if not self._buffers or next(iter(self._buffers.values())).shape[0] < rows:
            self._buffers = allocate(self._programs.shape, self._layers, rows, self._programs.device)
        self._key = None

    @property
    def state_bytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def step(self, inputs: StepInputs, layout: Layout, state: CanvasState) -> tuple[Tensor, Tensor]:
        """Fill the state, or use it."""
        # What rows outside the block hold is a function of these two alone.
        key = torch.stack((state.block, state.end))
        fill = self._key is None or self._age == self._interval or not torch.equal(key, self._key)
        if fill:
            self._key, self._age = key, 0
            self.first_steps += 1
        self._age += 1
        rows = block_rows(layout.plan, state.block)
        edges = block_edges(rows)
        table = block_tile_table(layout.start, layout.lengths, edges, self._programs.tile_rows, layout.longest)
        rows = rows.flatten()
        if layout.guided:
            table = torch.cat((table, table + layout.rows))
            rows = torch.cat((rows, rows + layout.rows))
        buffers: Mapping[str, Tensor] = {n: buffer[: layout.forward_rows] for n, buffer in self._buffers.items()}
        cache = LaCacheInputs(layers=self._layers, block_tiles=table, block_rows=None if fill else rows, state=buffers)
        return self._programs.lacache_step(inputs, cache)


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
