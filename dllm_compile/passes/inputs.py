# SPDX-License-Identifier: Apache-2.0
"""New inputs of a graph and the symbolic sizes they are recorded with."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from .graph import placeholders


def add_input(gm: GraphModule, name: str, value: Tensor) -> Node:
    """A new placeholder behind the existing ones, with its recorded value."""
    with gm.graph.inserting_after(placeholders(gm)[-1]):
        node = gm.graph.placeholder(name)
    node.meta["val"] = value
    return node


def symbolic(mode: FakeTensorMode, example: Tensor, *dynamic: int) -> Tensor:
    """A fake tensor like `example` whose `dynamic` dimensions are symbols."""
    sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(example.dim())]
    return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
