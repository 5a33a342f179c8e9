# SPDX-License-Identifier: Apache-2.0
"""Inputs with which a graph can be called: for counting its work, and to have something to run a dumped graph on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..passes.graph import placeholders, target_name
from ..runtime.block_tiles import block_tile_table

_LOOKUPS = ("dllm.embed", "embed_reference", "aten.embedding")


@dataclass(frozen=True)
class ExampleSize:
    """A named size of a call.

    Attributes:
        prompt: tokens of a prompt.
        answer: masks behind it.
        block: rows whose tokens are wanted, the first of the answer. A cached step computes these rows alone.
        samples: equal ones, decoded together.
    """

    prompt: int = 256
    answer: int = 128
    block: int = 32
    samples: int = 1

    @property
    def canvas(self) -> int:
        """Rows of a sample."""
        return self.prompt + self.answer

    def within(self, limit: int | None) -> ExampleSize:
        """The same in eighths of at most `limit` positions, where the model has no more."""
        if limit is None or self.canvas <= limit:
            return self
        part = max(limit // 8, 1)
        return ExampleSize(max(limit - 4 * part, 1), min(4 * part, limit - 1) or 1, part, self.samples)

    def __str__(self) -> str:
        """For the report."""
        samples = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        return f"{samples} of {self.prompt} + {self.answer} tokens, block {self.block}"


def example_inputs(
    gm: GraphModule, size: ExampleSize, *, device: torch.device, tile_rows: int | None = None, values: bool = True
) -> dict[str, Tensor]:
    """Inputs of a graph by name, the same every time.

    Args:
        gm: a captured or canonical graph, or a program.
        size: of the call.
        device: where they lie.
        tile_rows: most query rows of a tile; None: a sample.
        values: with False floating point inputs are on the meta device: enough for counting.

    Raises:
        KeyError: the graph has an input of which this module knows nothing.
    """
    maker = _Maker(gm, size, device, tile_rows, values)
    with torch.no_grad():
        return {name: maker.make(name, node) for name, node in maker.nodes.items()}


class _Maker:
    def __init__(
        self, gm: GraphModule, size: ExampleSize, device: torch.device, tile_rows: int | None, values: bool
    ) -> None:
        self.nodes = {str(node.target): node for node in placeholders(gm)}
        self.size = size
        self.device = device
        self.tile_rows = tile_rows
        self.values = values
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = _vocabulary(gm)
        self.cached = "cache_rows" in self.nodes or "hidden" in self.nodes
        self.verifies = "hidden" in self.nodes
        self.groups = size.samples * (2 if "unconditional" in self.nodes else 1)
        first = size.prompt if self.cached else 0
        self.canvas_rows = torch.arange(first, first + size.block if self.cached else size.canvas)
        self.per_group = len(self.canvas_rows)
        self.rows = self.groups * self.per_group
        self.keys = self.groups * size.canvas + 1
        self.in_block = size.prompt - first  # place of the block among a group's rows

    def make(self, name: str, node: Node) -> Tensor:
        """One input."""
        if node.meta["val"].dim() == 2 and name in ("ids", "input_ids"):
            return self._ids((self.size.samples, self.size.canvas)).to(self.device)
        known = self._integers().get(name)
        if known is not None:
            return known().to(device=self.device, dtype=node.meta["val"].dtype)
        return self._floats(name, node.meta["val"])

    def _integers(self) -> dict[str, Callable[[], Tensor]]:
        """Inputs that hold ids, places or scalars."""
        block, groups, samples = self.size.block, self.groups, self.size.samples
        wanted = (torch.arange(samples)[:, None] * self.per_group + self.in_block + torch.arange(block)).flatten()
        in_all = (torch.arange(groups)[:, None] * self.per_group + self.in_block + torch.arange(block)).flatten()
        bases = torch.arange(groups) * self.size.canvas
        own = (bases[:, None] + self.canvas_rows).flatten()
        return {
            "ids": lambda: self._ids((self.rows,)),
            "input_ids": lambda: self._ids((self.rows,)),
            "positions": lambda: self.canvas_rows.repeat(groups),
            "tiles": self._tiles,
            "wanted": lambda: wanted,
            "given": lambda: self._ids(wanted.shape),
            "banned": lambda: torch.tensor([-1]),
            "seeds": lambda: torch.arange(len(wanted)),
            "temperature": lambda: torch.tensor(0.7),
            "unconditional": lambda: wanted + samples * self.per_group,
            "guidance": lambda: torch.tensor(1.0),
            "cache_rows": lambda: own,
            "block_rows": lambda: in_all,
            "block_tiles": self._block_tiles,
            "window": lambda: in_all.view(groups, block)[:, :16],
            "spans": lambda: torch.stack((bases, bases + self.size.canvas), 1),
            "own_rows": lambda: torch.arange(self.rows),
            "views": self._views,
            "hidden": lambda: torch.zeros(self.keys, dtype=torch.bool).index_fill_(0, own, True),
        }

    def _ids(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(self.vocabulary, shape, generator=self.generator)

    def _floats(self, name: str, recorded: Tensor) -> Tensor:
        if name == "scores":
            return torch.zeros(self.keys, dtype=recorded.dtype, device=self.device)
        if not (name == "h" or name.startswith(("k_", "v_", "q_", "m_", "den_", "num_", "own_"))):
            raise KeyError(f"no example is known for the input {name}")
        rows = self.keys if "_cache_" in name else self.rows
        shape = (rows, *map(int, recorded.shape[1:]))
        if not self.values:
            return torch.empty(shape, dtype=recorded.dtype, device="meta")
        drawn = torch.randn(shape, generator=self.generator)
        # A sum of exponentials, the largest of which is 1.
        drawn = drawn.abs() + 1 if name.startswith("den_") else drawn
        return drawn.to(device=self.device, dtype=recorded.dtype)

    def _tiles(self) -> Tensor:
        """Every group sees itself: its rows, or its part of the cache."""
        step = self.per_group if self.tile_rows is None or self.verifies else self.tile_rows
        keys = self.size.canvas if self.cached else self.per_group
        tiles = []
        for group in range(self.groups):
            begin, end = group * self.per_group, (group + 1) * self.per_group
            tiles += [[q, min(q + step, end), group * keys, (group + 1) * keys] for q in range(begin, end, step)]
        return torch.tensor(tiles)

    def _block_tiles(self) -> Tensor:
        start = torch.arange(self.groups) * self.per_group
        length = torch.full_like(start, self.per_group)
        block = torch.stack((start + self.in_block, start + self.in_block + self.size.block), 1)
        return block_tile_table(start, length, block, self.tile_rows, self.per_group)

    def _views(self) -> Tensor:
        """Context, then drafts, then their masks (see `kernels.verify_attention`)."""
        drafts = self.per_group // 4
        ranks = list(range(drafts))
        rows = [[0, 0, drafts + 1]] * (self.per_group - 2 * drafts)
        rows += [[rank + 1, rank + 1, drafts + 1] for rank in ranks] + [[rank, 0, rank + 1] for rank in ranks]
        return torch.tensor(rows * self.groups)


def _vocabulary(gm: GraphModule) -> int:
    """Rows of the table in which ids are looked up."""
    lookups = (node for node in gm.graph.nodes if target_name(node) in _LOOKUPS)
    tables = [source for node in lookups for source in node.all_input_nodes if source.op == "get_attr"]
    return int(tables[0].meta["val"].shape[0])
