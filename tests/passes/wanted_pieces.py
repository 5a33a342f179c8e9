# SPDX-License-Identifier: Apache-2.0
"""Programs run on the same random rows before and after `select_wanted_rows`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dllm_compile.passes.graph import aten, placeholders
from dllm_compile.runtime.block_tiles import block_tile_table

R, CACHED, SPLIT = 21, 30, 8
WANTED, UNCONDITIONAL, GUIDANCE = [1, 7, 7, 20, 12], [2, 0, 19, 8, 3], 0.7


def inputs_of(gm: GraphModule) -> dict[str, Tensor]:
    """Random inputs of two samples of unequal length; caches and states are new with every call."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([SPLIT, R - SPLIT])
    tiles = torch.tensor([[0, SPLIT, 0, SPLIT], [SPLIT, R, SPLIT, R]], dtype=torch.int32)
    given = {
        "ids": torch.randint(0, 40, (R,), generator=generator),
        "positions": torch.cat([torch.arange(int(length)) for length in lengths]),
        "tiles": tiles,
        "wanted": torch.tensor(WANTED),
        "unconditional": torch.tensor(UNCONDITIONAL),
        "guidance": torch.tensor(GUIDANCE),
        "banned": torch.tensor([-1]),
        "cache_rows": torch.arange(R),
        "window": torch.tensor([[0, 1], [R - 2, R - 1]]),
        "spans": tiles[:, 2:].contiguous(),
        "scores": torch.zeros(CACHED),
        "views": torch.tensor([0, 0, 1], dtype=torch.int32).expand(R, 3).contiguous(),
        "hidden": torch.rand(CACHED, generator=generator) < 0.5,
        "own_rows": torch.arange(R),
        "block_rows": torch.tensor([2, 3, 15, 16]),
        "block_tiles": block_tile_table(
            torch.tensor([0, SPLIT]), lengths, torch.tensor([[2, 4], [15, 17]]), None, int(lengths.max())
        ),
    }
    for node in placeholders(gm):
        name, value = str(node.target), node.meta["val"]
        if name not in given:
            count = CACHED if "cache" in name else R
            filled = torch.randn((count, *map(int, value.shape[1:])), generator=generator)
            given[name] = filled.abs() + 1 if name.startswith("den") else filled
    return {str(node.target): given[str(node.target)] for node in placeholders(gm)}


def run(gm: GraphModule) -> Any:
    with torch.no_grad():
        return gm(**inputs_of(gm))


def close(actual: Tensor, expected: Tensor) -> None:
    """Products of fewer rows may add in another order: fp32 to a few roundings of the largest logit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def calls(gm: GraphModule) -> Iterator[Node]:
    return (node for node in gm.graph.nodes if node.op == "call_function")


def selected(gm: GraphModule) -> list[Node]:
    """What wanted rows are taken of."""
    (wanted,) = (node for node in placeholders(gm) if node.target == "wanted")
    rows = [node for node in wanted.users if node.target is aten.index_select.default]
    both = [user for node in wanted.users if node.target is aten.cat.default for user in node.users]
    return [node.args[0] for node in (*rows, *both)]


def behind(gm: GraphModule, anchor: Node) -> list[Node]:
    nodes = list(calls(gm))
    return nodes[nodes.index(anchor) + 1 :]


def has_rows_of(node: Node, size: Any) -> bool:
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return all(one.shape[0] == size for one in values if isinstance(one, Tensor))
