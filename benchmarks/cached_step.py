# SPDX-License-Identifier: Apache-2.0
"""Weights, caches and rows of one layer of a cached step at the 8B shape, and what its parts can be computed with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.kernels.rope import rope_reference
from dllm_compile.runtime.layout import tile_table

from .timing import interleaved, replayable

HEADS, HEAD_DIM, WIDTH, KEYS, WINDOW = 32, 128, 4096, 1280, 16
# (samples, query rows of each)
CASES = ((1, 32), (1, 128), (8, 128), (32, 128))
# Sets of weights and caches that a graph goes through, so that the L2 does not help.
SETS = 4
TILE_ROWS = 128

Call = Callable[[], Any]
Variants = dict[str, Callable[[int], Call]]


def random(*shape: int) -> Tensor:
    """bf16 on the card."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1


def _tables() -> tuple[Tensor, Tensor]:
    positions, pairs = torch.arange(KEYS, device="cuda"), torch.arange(0, HEAD_DIM, 2, device="cuda")
    angles = positions[:, None] * 1e4 ** (-pairs / HEAD_DIM)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def _tiles(samples: int, query: int) -> Tensor:
    """The table of a step: each sample's rows see its 1,280 keys, and the last tiles are empty."""
    table = tile_table(torch.full((samples,), query), TILE_ROWS)
    begin = table[:, 0].div(query, rounding_mode="floor") * KEYS
    table = torch.stack((table[:, 0], table[:, 1], begin, begin + KEYS), dim=1)
    rows = samples * query
    empty = torch.tensor([[rows, rows, 0, 0]]).expand(rows // TILE_ROWS + samples + 1 - len(table), -1)
    return torch.cat((table, empty)).int().cuda()


@dataclass
class Step:
    """Inputs of `samples` samples that bring `query` rows each."""

    samples: int
    query: int
    packed: list[Tensor] = field(init=False, repr=False)
    caches: list[list[Tensor]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count, samples = self.samples * self.query, self.samples
        self.rows = torch.cat([torch.randperm(KEYS, device="cuda")[: self.query] + KEYS * s for s in range(samples)])
        self.positions = self.rows % KEYS
        self.tables = _tables()
        self.x = random(count, WIDTH)
        self.packed = [random(3 * WIDTH, WIDTH) for _ in range(SETS)]
        self.separate = [list(weight.chunk(3)) for weight in self.packed]
        self.caches = [[random(samples * KEYS + 1, HEADS, HEAD_DIM) for _ in range(2)] for _ in range(SETS)]
        self.tiles = _tiles(samples, self.query)
        first = torch.arange(samples, device="cuda")[:, None]
        self.window = first * self.query + torch.arange(WINDOW, device="cuda")
        self.spans = torch.cat((first * KEYS, (first + 1) * KEYS), 1).int()
        self.by_head = torch.zeros(HEADS, samples * KEYS + 1, device="cuda")
        self.scores = torch.zeros(samples * KEYS + 1, device="cuda")
        self.arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")

    def project(self, i: int) -> Tensor:
        """q, k, v side by side."""
        return F.linear(self.x, self.packed[i])

    def write(self, qkv: Tensor, i: int) -> Tensor:
        """Rotated queries; keys and values go to the caches."""
        operator = torch.ops.dllm.qkv_rope_cache_write
        return operator(qkv, *self.tables, self.positions, self.rows, *self.caches[i], HEADS, HEADS)

    def unfused_write(self, i: int, run: Callable[..., Tensor]) -> Tensor:
        """Three projections, rotation and index writes by `unfused` or what was compiled from it."""
        return run(self.x, self.separate[i], *self.tables, self.positions, self.rows, self.caches[i])

    def attend(self, q: Tensor, i: int) -> Tensor:
        """Attention of the rows to the caches."""
        return torch.ops.dllm.cached_attention(q, *self.caches[i], self.tiles, TILE_ROWS, self.arrived)

    def attend_scored(self, q: Tensor, i: int) -> Tensor:
        """`attend` that scores keys too."""
        tracking = (self.window, self.spans, self.by_head, self.arrived)
        return torch.ops.dllm.row_attention_scored(q, *self.caches[i], self.tiles, TILE_ROWS, *tracking)

    def score(self, q: Tensor, i: int) -> None:
        """Scores by a kernel of their own."""
        torch.ops.dllm.row_scores(q, self.window, self.caches[i][0], self.spans, self.scores)

    def sdpa(self, q: Tensor, i: int, backend: SDPBackend) -> Tensor:
        """`attend` of a rectangular batch by a library."""
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*(self._rectangular(x) for x in (q, *self.caches[i])))

    def unfused_score(self, q: Tensor, i: int) -> Tensor:
        """Scores as the sum of a (samples, heads, window, keys) array."""
        q, k = self._rectangular(q)[:, :, :WINDOW], self._rectangular(self.caches[i][0])
        return torch.matmul(q, k.transpose(2, 3)).float().sum((1, 2))

    def _rectangular(self, x: Tensor) -> Tensor:
        return x[: len(x) // self.samples * self.samples].view(self.samples, -1, HEADS, HEAD_DIM).transpose(1, 2)

    def row(self, kind: str, times: dict[str, float], extra: dict[str, float]) -> dict[str, Any]:
        """A row of the results."""
        rounded = {name: round(value, 2) for name, value in {**times, **extra}.items()}
        sizes = {"samples": self.samples, "rows": self.samples * self.query, "keys": KEYS}
        return {"kernel": kind, **sizes, "unit": "us", **rounded}


def unfused(
    x: Tensor,
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rows: Tensor,
    caches: list[Tensor],
) -> Tensor:
    """Three projections, rotation and two index writes, as a plain model computes them; returns rotated queries."""
    q, k, v = (F.linear(x, weight) for weight in weights)
    q, k = (rope_reference(part, cos, sin, positions, HEADS) for part in (q, k))
    caches[0].index_copy_(0, rows, k)
    caches[1].index_copy_(0, rows, v.unflatten(-1, (HEADS, HEAD_DIM)))
    return q


def timed(variants: Variants, arguments: argparse.Namespace) -> dict[str, float]:
    """Microseconds of one call of each variant, from graph replays over all sets."""
    graphs = {name: replayable(_in_turn([make(i) for i in range(SETS)])) for name, make in variants.items()}
    figures = interleaved(graphs, rounds=arguments.rounds, inner=5)
    return {name: 1e3 * figure["median_ms"] / SETS for name, figure in figures.items()}


def _in_turn(calls: list[Call]) -> Call:
    def call() -> None:
        for one in calls:
            one()

    return call
