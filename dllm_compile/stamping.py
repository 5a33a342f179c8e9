# SPDX-License-Identifier: Apache-2.0
"""Capture of a deep model from a shallow one: four of its alike layers are traced, the others are stamped.

Export takes time for each layer, and the layers of a language model are the same code over other weights. So a copy of
the module tree whose list of layers is cut to the first `TRACED` is exported (modules are copied, parameters shared:
the model itself is not touched), and the nodes of its third layer are repeated under the other layers' names.

Two proofs stand in front of it, and one behind. The modules must be alike (`alike_layers.py`). The traced layers must
have given the same nodes, each fed by the one before it in the same way (`stamp`). And `capture` compares the result
with the model bit for bit, as it does with any graph. Where one of the three fails, the model is captured whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .alike_layers import TRACED, NotAlike, Repeated, kind_of, named_tensors
from .passes.graph import fake_mode_of, hashable, lookup, output_node


def stamp(shallow: GraphModule, repeated: Repeated) -> GraphModule:
    """The graph of the whole model from that of `repeated.shallow()`; parameters are the model's own objects.

    Raises:
        NotAlike: the traced layers did not give the same nodes, or do more than hand on a value to the next one.
    """
    calls = [node for node in shallow.graph.nodes if node.op == "call_function"]
    places = [[i for i, n in enumerate(calls) if _layer_of(n, repeated.path) == layer] for layer in range(TRACED)]
    if not all(places) or any(before[-1] > after[0] for before, after in pairwise(places)):
        raise NotAlike("the layers do not run one after the other")
    edges = [place[0] for place in places]
    before = calls[: edges[0]]
    parts = [calls[begin:end] for begin, end in pairwise([*edges, len(calls)])]
    handed = _handed_on(shallow, repeated, before, parts, places[-1][-1] + 1 - edges[-1])

    stamper = _Stamper(shallow, repeated)
    stamper.copy(before)
    for layer in range(TRACED - 1):
        stamper.copy(parts[layer])
    template = parts[TRACED - 2]
    for layer in range(TRACED - 1, len(repeated.layers) - 1):
        stamper.hand_on(handed)
        stamper.copy(template, TRACED - 2, layer)
    stamper.copy(parts[-1], TRACED - 1, len(repeated.layers) - 1)
    return stamper.finish()


def _layer_of(node: Node, path: str) -> int | None:
    for entry in (node.meta.get("nn_module_stack") or {}).values():
        head, found, rest = entry[0].partition(f"{path}.")
        if found and not head:
            return int(rest.partition(".")[0])
    return None


def _handed_on(
    gm: GraphModule, repeated: Repeated, before: list[Node], parts: list[list[Node]], in_last: int
) -> dict[Node, Node]:
    """What the third layer takes from the second one, and what the fourth takes in its place from the third.

    Args:
        before: calls in front of the first layer.
        parts: calls of each layer, with what follows it up to the next one.
        in_last: how many calls of the last part belong to the layer.
    """
    second, third, last = parts[1:]
    bodies = [_body(gm, repeated, part[:in_last], layer) for layer, part in enumerate(parts) if layer]
    wholes = [_body(gm, repeated, part, layer) for layer, part in ((1, second), (2, third))]
    for of_one, of_other in (*pairwise(bodies), tuple(wholes)):
        if of_one[0] != of_other[0]:
            raise NotAlike("two of the layers gave different nodes")
    twin = dict(zip(second, third, strict=True))
    outer = {*before, *(node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr"))}
    handed: dict[Node, Node] = {}
    for of_second, of_third in zip(wholes[0][1], wholes[1][1], strict=True):
        if of_third.op == "get_attr":
            continue  # compared by name
        if of_second is of_third:
            outer.add(of_third)
        elif of_third in twin and of_second in parts[0]:
            handed[of_third] = twin[of_third]
        else:
            raise NotAlike(f"{of_third.name} reaches beyond the next layer")
    for of_third, of_last in zip(bodies[1][1], bodies[2][1], strict=True):
        if of_last is not handed.get(of_third, of_third) and of_last.op != "get_attr":
            raise NotAlike(f"{of_last.name} is handed on in another way")
    inside = {*last, *third, *outer}
    for node in (*last, output_node(gm)):
        for read in node.all_input_nodes:
            if read not in inside:
                raise NotAlike(f"{read.name} is read behind the last layer")
    return handed


def _body(gm: GraphModule, repeated: Repeated, nodes: list[Node], layer: int) -> tuple[Any, tuple[Node, ...]]:
    """(calls without names, what they read from outside in order of first use)."""
    local = {node: i for i, node in enumerate(nodes)}
    outside: dict[Node, int] = {}
    prefix = repeated.prefix(layer)

    def token(node: Node) -> Any:
        if node in local:
            return ("call", local[node])
        number = outside.setdefault(node, len(outside))
        if node.op != "get_attr":
            return ("outside", number)
        name, tensor = str(node.target), lookup(gm, str(node.target))
        if id(tensor) in repeated.own and name.startswith(prefix):
            return ("own", name.removeprefix(prefix), number)
        return ("shared", id(tensor), number)

    calls = [(node.target, hashable(node.args, token), hashable(node.kwargs, token)) for node in nodes]
    return calls, tuple(outside)


class _Stamper:
    """Copies nodes of the shallow graph into the whole one, under the names of other layers."""

    def __init__(self, shallow: GraphModule, repeated: Repeated) -> None:
        self._shallow, self._repeated = shallow, repeated
        self._mode = fake_mode_of(shallow)
        self._graph = Graph()
        self._attributes: dict[str, Node] = {}
        self._tensors: dict[str, Tensor] = {}
        # Where several layers share a tensor, export names it after any of them.
        self._names = {id(tensor): name for name, tensor in reversed(named_tensors(repeated.source))}
        self._values: dict[Node, Node] = {}
        for node in shallow.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._graph.node_copy(node)

    def copy(self, nodes: Iterable[Node], layer: int = 0, to: int = 0) -> None:
        """Copy calls of `layer` for the layer `to`."""
        old, new = self._repeated.prefix(layer), self._repeated.prefix(to)
        for node in nodes:
            copied = self._graph.node_copy(node, lambda source: self._value(source, old, new))
            self._values[node] = copied
            if layer != to:
                stack = node.meta.get("nn_module_stack") or {}
                copied.meta["nn_module_stack"] = dict(_renamed(key, entry, old, new) for key, entry in stack.items())

    def hand_on(self, handed: dict[Node, Node]) -> None:
        """What was the next layer's input becomes what the layer made last gives in its place."""
        self._values.update({taken: self._values[given] for taken, given in handed.items()})

    def finish(self) -> GraphModule:
        """The whole graph over the model's tensors."""
        output = output_node(self._shallow)
        self._graph.node_copy(output, lambda source: self._value(source, "", ""))
        gm = GraphModule(self._tensors, self._graph, class_name=type(self._shallow).__name__)
        gm.meta.update(self._shallow.meta)
        return gm

    def _value(self, node: Node, old: str, new: str) -> Node:
        if node.op != "get_attr":
            return self._values[node]
        tensor = lookup(self._shallow, str(node.target))
        name = self._names.get(id(tensor), str(node.target))
        if id(tensor) in self._repeated.own and name.startswith(old):
            name = new + name.removeprefix(old)
            tensor = self._of_model(name, like=tensor)
        if name not in self._attributes:
            self._tensors[name] = tensor
            self._attributes[name] = attribute = self._graph.get_attr(name)
            attribute.meta = {**node.meta, "val": self._mode.from_tensor(tensor, static_shapes=True)}
        return self._attributes[name]

    def _of_model(self, name: str, like: Tensor) -> Tensor:
        try:
            tensor = lookup(self._repeated.source, name)  # type: ignore[arg-type]
        except AttributeError:
            raise NotAlike(f"{name} is no parameter or buffer of the model") from None
        if kind_of(tensor) != kind_of(like):
            raise NotAlike(f"{name} has another shape, dtype or kind than in the traced layer")
        return tensor


def _renamed(key: str, entry: tuple[str, Any], old: str, new: str) -> tuple[str, tuple[str, Any]]:
    path, kind = entry
    if not f"{path}.".startswith(old):
        return key, entry
    path = f"{new}{f'{path}.'.removeprefix(old)}".removesuffix(".")
    return key.replace(old[:-1], new[:-1]), (path, kind)
