# SPDX-License-Identifier: Apache-2.0
"""Calls of each program on one sample, together with the logits that the user's model gives for the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..config import DecodingConfig
from ..passes import (
    INSERT_VERIFY,
    WHOLE_SAMPLE,
    GraphPass,
    flatten_rows_pass,
    head_passes,
    insert_kv_cache_pass,
    insert_lacache_pass,
)
from ..passes.graph import placeholders
from ..passes.insert_verify import OWN_BUFFERS
from ..runtime.block_tiles import block_tile_table
from ..runtime.cache.flash_rule import scored_layers
from ..runtime.cache.lacache import allocate as allocate_state
from ..runtime.cache.lacache import cached_layers
from ..runtime.cache.row_subset import allocate
from ..runtime.shape import ModelShape

Inputs = dict[str, Tensor]
Build = Callable[[str], GraphModule]
"""The finished graph of another program, by name."""


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        inputs: by name; a graph takes those it has.
        expected: (R, V) logits of every row.
        needs: an input without which a graph cannot answer yet: rows of the call see others only in a cache.
    """

    inputs: Inputs
    expected: Tensor
    needs: str = "ids"


@dataclass(frozen=True)
class Case:
    """A program, and how it is tried.

    Attributes:
        name: of the program.
        passes: from the canonical graph to it, without those that end every program.
        calls: makes the calls, which share their buffers, after running the programs they depend on.
    """

    name: str
    passes: tuple[GraphPass, ...]
    calls: Callable[[Build], list[Call]]


@dataclass(frozen=True)
class Ground:
    """One sample and what the user's model says about it.

    Attributes:
        early, late: (N,) int64, the canvas at the beginning, and with other tokens in its first block.
        early_logits, late_logits: (N, V).
        block: first and end row of the first block.
        mask_token_id: id of a masked position.
        tile_rows: most query rows of a tile; None: all.
        shape: of the model.
    """

    early: Tensor
    late: Tensor
    early_logits: Tensor
    late_logits: Tensor
    block: tuple[int, int]
    mask_token_id: int
    tile_rows: int | None
    shape: ModelShape

    @property
    def rows(self) -> int:
        """N."""
        return len(self.early)

    def inputs(self, ids: Tensor, begin: int = 0, end: int | None = None, *, whole: bool = False) -> Inputs:
        """Inputs of a step that computes rows [begin, end) of canvas `ids` and sees all N keys."""
        end = self.rows if end is None else end
        device = ids.device
        step = end - begin if whole or self.tile_rows is None else self.tile_rows
        tiles = [[q, min(q + step, end - begin), 0, self.rows] for q in range(0, end - begin, step)]
        wanted = torch.arange(max(self.block[0], begin), min(self.block[1], end), device=device) - begin
        return {
            "ids": ids[begin:end].clone(),
            "positions": torch.arange(begin, end, device=device),
            "tiles": torch.tensor(tiles, dtype=torch.int32, device=device),
            "wanted": wanted,
            "banned": torch.tensor([-1], device=device),
            "cache_rows": torch.arange(begin, end, device=device),
        }

    def caches(self) -> Inputs:
        """Empty caches, and what a scored step adds."""
        device, rows = self.early.device, self.rows + 1
        window = torch.arange(*self.block, device=device)[None, :2]
        return {
            **allocate(self.shape, rows, device),
            "scores": torch.zeros(rows, device=device),
            "window": torch.cat((window - self.block[0], torch.full_like(window, -1))),
            "spans": torch.tensor([[0, self.rows], [0, 0]], dtype=torch.int32, device=device),
        }


def cases(ground: Ground, decoding: DecodingConfig) -> list[Case]:
    """The programs that a decoding configuration uses, plain ones first."""
    flatten = flatten_rows_pass(ground.tile_rows or WHOLE_SAMPLE)
    end = head_passes(ground.mask_token_id)

    def dense(_: Build) -> list[Call]:
        canvases = ((ground.early, ground.early_logits), (ground.late, ground.late_logits))
        return [Call(ground.inputs(ids), logits) for ids, logits in canvases]

    found = [Case("forward", (flatten,), dense), Case("step", (flatten, *end), dense)]
    if decoding.cache == "lacache":
        found += _lacache(ground, decoding, flatten, end)
    elif decoding.cache != "none":
        scored = decoding.cache == "flash" and (decoding.track >= 0 or decoding.rule == "flash_verify")
        layers = scored_layers(decoding, ground.shape.layers) if scored else ()
        insert = insert_kv_cache_pass(layers)
        found.append(Case("cached_step", (flatten, insert, *end), lambda build: _cached(ground)))
    if decoding.rule == "flash_verify":
        rows = ground.block[1] - ground.block[0]
        whole = flatten_rows_pass(WHOLE_SAMPLE if ground.tile_rows is None else rows)
        given = head_passes(ground.mask_token_id, given=True)
        found.append(Case("verify_step", (whole, INSERT_VERIFY, *given), lambda build: _verify(ground, build)))
    return found


def _cached(ground: Ground) -> list[Call]:
    """All rows, whose keys and values are written; then some of them over those of the others."""
    caches, (begin, end) = ground.caches(), ground.block
    every = {**ground.inputs(ground.early), **caches}
    some = {**ground.inputs(ground.early, begin, end), **caches}
    every["window"] = torch.where(caches["window"] < 0, -1, caches["window"] + begin)
    return [Call(every, ground.early_logits), Call(some, ground.early_logits[begin:end], needs="cache_rows")]


def _lacache(ground: Ground, decoding: DecodingConfig, flatten: GraphPass, end: tuple[GraphPass, ...]) -> list[Case]:
    layers = cached_layers(decoding, ground.shape.layers)
    # What is kept of layers above the first is right only as long as no token changes.
    exact = layers == (0,)
    ids, logits = (ground.late, ground.late_logits) if exact else (ground.early, ground.early_logits)
    device = ground.early.device

    def inputs(ids: Tensor, state: Inputs) -> Inputs:
        start, length = torch.tensor([0], device=device), torch.tensor([ground.rows], device=device)
        table = block_tile_table(
            start, length, torch.tensor([ground.block], device=device), ground.tile_rows, ground.rows
        )
        block = torch.arange(*ground.block, device=device)
        return {**ground.inputs(ids), **state, "block_tiles": table, "block_rows": block}

    def first(_: Build) -> list[Call]:
        state = allocate_state(ground.shape, layers, ground.rows, device)
        return [Call(inputs(ground.early, state), ground.early_logits)]

    def step(build: Build) -> list[Call]:
        state = allocate_state(ground.shape, layers, ground.rows, device)
        _run(build("lacache_first"), inputs(ground.early, state))
        return [Call(inputs(ids, state), logits)]

    return [
        Case(f"lacache_{kind}", (flatten, insert_lacache_pass(layers, kind), *end), calls)  # type: ignore[arg-type]
        for kind, calls in (("first", first), ("step", step))
    ]


def _verify(ground: Ground, build: Build) -> list[Call]:
    """The block's rows as context, that see each other and all other rows of the cache."""
    caches, (begin, end) = ground.caches(), ground.block
    every = {**ground.inputs(ground.early), **caches}
    every["window"] = torch.where(caches["window"] < 0, -1, caches["window"] + begin)
    _run(build("cached_step"), every)
    rows, device = end - begin, ground.early.device
    hidden = torch.zeros(ground.rows + 1, dtype=torch.bool, device=device)
    hidden[begin:end] = True
    size = (rows, ground.shape.kv_heads, ground.shape.head_dim)
    own = {name: torch.zeros(size, dtype=ground.shape.dtype, device=device) for name in OWN_BUFFERS}
    inputs = {
        **ground.inputs(ground.early, begin, end, whole=True),
        **{name: cache for name, cache in caches.items() if "_cache_" in name},
        **own,
        "own_rows": torch.arange(rows, device=device),
        "views": torch.tensor([[0, 0, 1]] * rows, dtype=torch.int32, device=device),
        "hidden": hidden,
        "given": ground.late[begin:end].clone(),
    }
    return [Call(inputs, ground.early_logits[begin:end], needs="hidden")]


def _run(gm: GraphModule, inputs: Inputs) -> None:
    """Call a graph with those of the inputs that it has, for what it writes in place."""
    with torch.no_grad():
        gm(**{str(node.target): inputs[str(node.target)] for node in placeholders(gm)})
