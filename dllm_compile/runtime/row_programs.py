# SPDX-License-Identifier: Apache-2.0
"""What the decode loop asks of a compiled model: one step over a flat axis of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .shape import ModelShape


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one forward over R rows of all samples, lying one after the other without padding.

    Attributes:
        ids: (R,) int64, token of each row; masked positions hold the mask id.
        positions: (R,) int64, canvas position of each row inside its own sample (for RoPE).
        tiles: (n, 4) int32 on the device, each [q_begin, q_end, k_begin, k_end): these query rows attend to these
            key rows. Every row is covered by exactly one tile.
        wanted: (W,) int64, rows whose token is wanted. A row may be named more than once.
        banned: (n,) int64, ids that are never proposed (-1: none).
        seeds: (W,) int64, one for each wanted row, when tokens are sampled; None for greedy.
        temperature: 0-dim fp32, given together with `seeds`.
        unconditional: (W,) int64, the row of the unconditional half that belongs to each wanted row; None without
            guidance.
        guidance: 0-dim fp32, the scale of classifier-free guidance, given together with `unconditional`:
            z = z_u + (guidance + 1)(z_c - z_u).
    """

    ids: Tensor
    positions: Tensor
    tiles: Tensor
    wanted: Tensor
    banned: Tensor
    seeds: Tensor | None = None
    temperature: Tensor | None = None
    unconditional: Tensor | None = None
    guidance: Tensor | None = None


@dataclass(frozen=True)
class LaCacheInputs:
    """What a LaCache step needs besides its rows.

    Attributes:
        layers: cached layers, ascending.
        block_tiles: (n, 6) int32, see `kernels.facache`.
        block_rows: (W',) int64, rows of the blocks; None fills the state.
        state: buffers by name (see `passes.insert_lacache`), one row for each row of the step.
    """

    layers: tuple[int, ...]
    block_tiles: Tensor
    block_rows: Tensor | None
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class CacheInputs:
    """What a cached step needs besides its rows. Key rows in `StepInputs.tiles` are rows of the caches.

    Attributes:
        caches: `k_cache_i` and `v_cache_i` of every layer i, each (K, H_kv, hd) in the model's dtype, written in place.
        cache_rows: (R,) int64, where each row of the step writes its key and value. Padding rows share a spare row.
        scored: layers that add to `scores`; empty when no score is wanted.
        window: (S, w) int64, rows of the step whose queries are scored, -1 for none.
        spans: (S, 2) int32, first and end cache row of each sample.
        scores: (K,) fp32, added to in place: raw logits between the window's queries and each key, summed over rows,
            heads and scored layers.
    """

    caches: Mapping[str, Tensor]
    cache_rows: Tensor
    scored: tuple[int, ...] = ()
    window: Tensor | None = None
    spans: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class VerifyInputs:
    """What a verify pass needs besides its rows. A tile holds all rows of a sample; its key rows are cache rows.

    Attributes:
        caches: as in `CacheInputs`; read only.
        views: (R, 3) int32, who sees whom (see `kernels.verify_attention`).
        hidden: (K,) bool, cache rows that are not seen.
        given: (W,) int64, a token for each wanted row.
        own_rows: (R,) int64: 0, 1, 2, ...
        own: two buffers [R, H_kv, hd] in the model's dtype, written over in every layer.
        tile_rows: rows of a sample.
    """

    caches: Mapping[str, Tensor]
    views: Tensor
    hidden: Tensor
    given: Tensor
    own_rows: Tensor
    own: tuple[Tensor, Tensor]
    tile_rows: int


class RowPrograms(Protocol):
    """A model that computes rows of several samples at once, each sample equal to itself alone."""

    device: torch.device
    tile_rows: int | None
    """Most query rows a tile may have; None: one tile a sample."""

    @property
    def shape(self) -> ModelShape:
        """Sizes that caches depend on."""
        ...

    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """One forward.

        Returns:
            token (W,) int64, never the mask id and never a banned id, and its confidence (W,) fp32: the probability
            of that token under the unperturbed logits.
        """
        ...

    def lacache_step(self, inputs: StepInputs, cache: LaCacheInputs) -> tuple[Tensor, Tensor]:
        """One forward that fills LaCache's state, or uses it; returns what `step` returns."""
        ...

    def cached_step(self, inputs: StepInputs, cache: CacheInputs) -> tuple[Tensor, Tensor]:
        """One forward of the given rows over keys and values in a cache; returns what `step` returns."""
        ...

    def verify_step(self, inputs: StepInputs, verify: VerifyInputs) -> tuple[Tensor, Tensor, Tensor]:
        """One forward that checks given tokens over a cache and writes nothing to it.

        Returns:
            What `step` returns for the wanted rows, greedy, and the probability (W,) fp32 of the given tokens.
        """
        ...
