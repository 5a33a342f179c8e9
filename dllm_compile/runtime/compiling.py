# SPDX-License-Identifier: Apache-2.0
"""Compiles a row program once for all sizes, and each distinct layer of it once for all layers that are like it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._compat import distinct_sizes
from ..passes.graph import attribute, output_node, placeholders
from ..passes.split_layers import Segment, segment_graph, split_layers
from .block_tiles import block_tile_table
from .stages import guards_on_inputs

# Sizes with which a program is compiled: different and above one, so that no dimension is taken for a constant
# or for another one. What is not named here has a row for each row of the step.
_ROWS = 37
_SIZES = {"tiles": 6, "wanted": 11, "unconditional": 11, "seeds": 11, "given": 11}
_SIZES |= {"block_rows": 13, "banned": 3, "spans": 7}
_CACHE_ROWS = 53

# Calls that need not be compiled again before it pays to compile the layers apart (docs/decisions/0006).
_MIN_SAVED = 0.4


def compile_program(gm: GraphModule, device: torch.device) -> tuple[Callable[..., Any], int]:
    """Compile once for all sizes, on inputs made here, so that the user's first shapes decide nothing.

    Returns:
        What is called, with the program's inputs by name, and the number of graphs that were compiled for it.
    """
    segments = split_layers(gm)
    inputs = {str(node.target): _example(str(node.target), node.meta["val"], device) for node in placeholders(gm)}
    with warnings.catch_warnings(), distinct_sizes():
        warnings.simplefilter("ignore")
        if _pays(segments):
            layered = LayerByLayer(gm, segments)
            layered.compile(inputs)
            return layered, layered.graphs
        run = _compiled(gm)
        _mark(placeholders(gm), inputs.values())
        run(**inputs)
    return run, 1


def _pays(segments: Sequence[Segment]) -> bool:
    """Whether so much is repeated that compiling layers apart saves time."""
    distinct = {segment.key: len(segment.nodes) for segment in segments}
    return sum(distinct.values()) <= (1 - _MIN_SAVED) * sum(len(segment.nodes) for segment in segments)


@dataclass(frozen=True)
class _Call:
    """One call of a compiled segment: places of its arguments and results among the values of a run."""

    run: Callable[..., tuple[Tensor, ...]]
    segment: Segment
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    frees: tuple[int, ...]


class LayerByLayer:
    """Runs the segments of a program one after the other; equal ones share one compiled function.

    Weights are passed to it as they are, so that updates in place are seen. Nothing is read on the host: a step can be
    captured.

    Attributes:
        graphs: number of compiled functions, one for each distinct segment.
    """

    def __init__(self, gm: GraphModule, segments: Sequence[Segment]) -> None:
        slots: dict[Node, int] = {}
        for node in (node for segment in segments for node in (*segment.inputs, *segment.outputs)):
            slots.setdefault(node, len(slots))
        # Plain tensors over the parameters' own memory: whether a parameter asks for gradients is no matter here.
        self._values = [attribute(gm, node).detach() if node.op == "get_attr" else None for node in slots]
        self._inputs = {str(node.target): slots[node] for node in placeholders(gm) if node in slots}
        results = output_node(gm).args[0]
        self._single = isinstance(results, Node)
        outputs: tuple[Node, ...] = (results,) if isinstance(results, Node) else tuple(results)  # type: ignore[arg-type,assignment]
        self._outputs = tuple(slots[node] for node in outputs)
        runs: dict[Hashable, Callable[..., tuple[Tensor, ...]]] = {}
        last = {node: i for i, segment in enumerate(segments) for node in segment.inputs}
        self._calls = []
        for i, segment in enumerate(segments):
            if segment.key not in runs:
                runs[segment.key] = _compiled(segment_graph(segment))
            done = [n for n in segment.inputs if n.op == "call_function" and last[n] == i and n not in outputs]
            groups = (segment.inputs, segment.outputs, done)
            places = [tuple(slots[node] for node in group) for group in groups]
            self._calls.append(_Call(runs[segment.key], segment, *places))
        self.graphs = len(runs)

    @property
    def calls(self) -> tuple[int, ...]:
        """How often each compiled function is called in a run, in the order in which they are compiled."""
        return tuple(Counter(call.segment.key for call in self._calls).values())

    def compile(self, inputs: Mapping[str, Tensor]) -> None:
        """Run once on example inputs; sizes that are symbols in the program stay free in every segment."""
        self._run(inputs, set())

    def __call__(self, **inputs: Tensor) -> Any:
        """Run with the program's inputs by name."""
        return self._run(inputs, None)

    def _run(self, inputs: Mapping[str, Tensor], compiled: set[Hashable] | None) -> Any:
        values: list[Any] = self._values.copy()
        for name, slot in self._inputs.items():
            values[slot] = inputs[name]
        for call in self._calls:
            arguments = [values[slot] for slot in call.takes]
            if compiled is not None and call.segment.key not in compiled:
                compiled.add(call.segment.key)
                _mark(call.segment.inputs, arguments)
            results = call.run(*arguments)
            for slot, result in zip(call.gives, results, strict=True):
                values[slot] = result
            # A result of an earlier segment lives no longer than it is read.
            del arguments, results
            for slot in call.frees:
                values[slot] = None
        outputs = tuple(values[slot] for slot in self._outputs)
        return outputs[0] if self._single else outputs


def _compiled(gm: GraphModule) -> Callable[..., Any]:
    return torch.compile(gm.forward, fullgraph=True, options={"guard_filter_fn": guards_on_inputs})  # type: ignore[no-any-return]


def _mark(nodes: Iterable[Node], values: Iterable[Tensor]) -> None:
    """Sizes that are symbols in the graph are compiled as such, whatever the examples' sizes."""
    for node, value in zip(nodes, values, strict=True):
        for dimension, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                torch._dynamo.mark_dynamic(value, dimension)


def _example(name: str, recorded: Tensor, device: torch.device) -> Tensor:
    """An input to compile with."""
    if name == "tiles":
        edges = torch.linspace(0, _ROWS, _SIZES["tiles"] + 1).int()
        return torch.stack((edges[:-1], edges[1:], edges[:-1], edges[1:]), dim=1).to(device)
    if name == "block_tiles":
        start, length, block = torch.tensor([0]), torch.tensor([_ROWS]), torch.tensor([[9, 20]])
        return block_tile_table(start, length, block, tile_rows=16, longest=_ROWS).to(device)
    if name == "banned":
        return torch.full((_SIZES["banned"],), -1, dtype=recorded.dtype, device=device)
    if name == "window":
        return torch.zeros((_SIZES["spans"], 9), dtype=recorded.dtype, device=device)
    if "_cache_" in name or name in ("scores", "hidden"):
        return torch.zeros((_CACHE_ROWS, *map(int, recorded.shape[1:])), dtype=recorded.dtype, device=device)
    sizes = (_SIZES.get(name, _ROWS), *map(int, recorded.shape[1:])) if recorded.dim() else ()
    return torch.zeros(sizes, dtype=recorded.dtype, device=device)
