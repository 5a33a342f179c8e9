# SPDX-License-Identifier: Apache-2.0
"""Numeric certificates: a region may be replaced only after both were run on the same random input.

Structure is not semantics: a norm that multiplies by `1 + weight`, or a rotation computed in low precision, has the
shape of the region it is mistaken for. The captured region is therefore executed node by node with the model's own
parameters and compared with the operator that is to replace it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node, map_arg

aten = torch.ops.aten

# Sizes of the dynamic dimensions while a region is run: unequal, and not one.
BATCH, LENGTH = 2, 7


def evaluate(gm: GraphModule, outputs: Iterable[Node], known: Mapping[Node, Any]) -> list[Any]:
    """Run the nodes that `outputs` depend on, taking the values of `known` as given.

    Sizes of the graph's inputs are `BATCH` and `LENGTH`.

    Raises:
        KeyError: an output depends on an input that is not in `known`.
    """
    outputs = list(outputs)
    needed = _needed(outputs, known)
    values: dict[Node, Any] = dict(known)
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node in values or node not in needed:
                continue
            if node.op == "get_attr":
                values[node] = functools.reduce(getattr, str(node.target).split("."), gm)
            elif node.target is aten.sym_size.int:
                values[node] = (BATCH, LENGTH)[node.args[1]]
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            else:
                raise KeyError(f"the region depends on {node.op} {node.name}")
    return [values[node] for node in outputs]


def _needed(outputs: list[Node], known: Mapping[Node, Any]) -> set[Node]:
    needed: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in needed or node in known:
            continue
        needed.add(node)
        if node.target is not aten.sym_size.int:
            stack.extend(node.all_input_nodes)
    return needed


def observe(gm: GraphModule, nodes: Iterable[Node], seed: int = 0) -> dict[Node, Tensor]:
    """Values of `nodes` while a captured graph computes a batch of random ids, of shape (BATCH, LENGTH)."""
    wanted = set(nodes)
    placeholder = next(node for node in gm.graph.nodes if node.op == "placeholder")
    (logits,) = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(int(logits.meta["val"].shape[-1]), (BATCH, LENGTH), generator=generator)
    observer = _Observer(gm, wanted)
    with torch.no_grad():
        observer.run(ids.to(placeholder.meta["val"].device))
    return observer.seen


class _Observer(Interpreter):
    def __init__(self, gm: GraphModule, wanted: set[Node]) -> None:
        super().__init__(gm)
        self.wanted, self.seen = wanted, dict[Node, Tensor]()

    def run_node(self, node: Node) -> Any:
        """Run a node and remember what was asked for."""
        value = super().run_node(node)
        if node in self.wanted:
            self.seen[node] = value
        return value


def random_like(node: Node, seed: int = 0) -> Tensor:
    """Random normal values shaped like a [B, T, *] activation, drawn without touching the global generator."""
    value: Tensor = node.meta["val"]
    shape = (BATCH, LENGTH, *(int(size) for size in value.shape[2:]))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=value.device, dtype=value.dtype)


def deviation(expected: Tensor, actual: Tensor) -> float:
    """Largest absolute difference; 0.0 exactly when bit-equal, inf when shapes, dtypes or finiteness differ."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return math.inf
    if torch.equal(expected, actual):
        return 0.0
    difference = (expected.double() - actual.double()).abs().max().item()
    return difference if math.isfinite(difference) else math.inf


def relative_deviation(expected: Tensor, actual: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; inf when shapes differ or NaN occurs."""
    difference = deviation(expected, actual)
    return difference if difference in (0.0, math.inf) else difference / expected.double().abs().max().item()


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; inf when shapes differ or NaN occurs."""
    if expected.shape != actual.shape:
        return math.inf
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if math.isfinite(error) else math.inf


def decibels(error: float) -> float:
    """Signal-to-quantization-noise ratio of a relative error; inf where there is none."""
    return math.inf if error == 0 else -20 * math.log10(error)
