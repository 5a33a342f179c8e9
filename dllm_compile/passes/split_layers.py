# SPDX-License-Identifier: Apache-2.0
"""A row program is cut into segments, one a layer, and equal segments are found.

    embed, norm | qkv, ..., down, add, norm | qkv, ..., down, add, norm | qkv, attention, wanted rows, ..., head
    prologue    | layer 0                   | layer 1, the same function of other weights | the last layer

Anchor: the attention of each layer. Between two of them the cut falls in front of an operator that the compiler does
not fuse with what it reads (a matrix product, an operator of our own), so that no fusion is lost, and among those
where the fewest values cross. Whatever crosses, in any number, becomes an output of one segment and an input of a later
one; weights, caches and tables are inputs. Two segments with the same key compute the same function: operators,
constants and the shapes, dtypes, strides and devices of all inputs agree. What differs (a layer that keeps a state, the
first scored layer, the last one) has another key.

The graph is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .graph import aten, attribute, facts, hashable, module_path, output_node


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive calls of a program.

    Attributes:
        nodes: the calls, in order.
        inputs: parameters, program inputs and results of earlier segments that they read, in order of first use.
        outputs: results that are read behind the segment, in order.
        key: equal for segments that are the same function of their inputs.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: Hashable


def split_layers(gm: GraphModule) -> list[Segment]:
    """Cut `gm` at its layers; one segment where it has less than two. Neighbours that occur only once are joined."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    cuts = [0, *_cuts(calls, output_node(gm)), len(calls)]
    parts = [calls[begin:end] for begin, end in pairwise(cuts) if end > begin]
    segments = [_segment(gm, part) for part in parts]
    occurrences = Counter(segment.key for segment in segments)
    joined: list[list[Node]] = []
    open_end = False  # the last of `joined` is single and may be continued
    for segment in segments:
        single = occurrences[segment.key] == 1
        if single and open_end:
            joined[-1].extend(segment.nodes)
        else:
            joined.append(list(segment.nodes))
        open_end = single
    return [_segment(gm, part) for part in joined]


def segment_graph(segment: Segment) -> GraphModule:
    """The segment as a graph of its own: all that it reads is an input, it returns a tuple."""
    graph = Graph()
    values: dict[Node, Node] = {}
    for source in segment.inputs:
        values[source] = graph.placeholder(source.name)
        values[source].meta["val"] = source.meta["val"]
    for node in segment.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in segment.outputs))
    return GraphModule(torch.nn.Module(), graph, class_name="Segment")


# --- where to cut ---------------------------------------------------------------------------------------------------


def _is_own(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "dllm"


def _is_attention(node: Node) -> bool:
    name = node.target._opname if _is_own(node) else ""  # type: ignore[union-attr]
    return "attention" in name or name.startswith("facache")


def _reads_from_memory(node: Node) -> bool:
    """Whether the inputs of `node` are written to memory anyway: no producer is fused into it."""
    return node.target is aten.linear.default or _is_own(node)


def _cuts(calls: list[Node], output: Node) -> list[int]:
    """Indices of calls that begin a segment."""
    anchors = [i for i, node in enumerate(calls) if _is_attention(node)]
    if len(anchors) < 2:
        return []
    crossing = _crossing(calls, output)
    possible = {i for i, values in enumerate(crossing) if all(isinstance(n.meta["val"], Tensor) for n in values)}
    best: dict[int, int] = {}  # by the anchor behind the cut
    for before, anchor in pairwise(anchors):
        block = _block(calls[before], calls[anchor])
        costs = [
            (sum(map(_size, crossing[i])), not _inside(calls[i], block), i)
            for i in range(before + 1, anchor + 1)
            if i in possible and _reads_from_memory(calls[i])
        ]
        if costs:
            best[anchor] = min(costs)[2]
    if not best:
        return []
    # Equal layers begin alike: where most of them begin, the first one does, and one behind a layer of another kind.
    ((usual, begin), _), *_ = Counter((anchor - cut, calls[cut].target) for anchor, cut in best.items()).most_common(1)
    cuts = set()
    for anchor in anchors:
        if anchor - usual in possible and calls[anchor - usual].target is begin:
            cuts.add(anchor - usual)
        elif anchor in best:
            cuts.add(best[anchor])
    return sorted(cuts - {0})


def _crossing(calls: list[Node], output: Node) -> list[list[Node]]:
    """For each call, the earlier ones whose results it or a later one reads."""
    place = {node: i for i, node in enumerate([*calls, output])}
    last = [max((place[user] for user in node.users), default=-1) for node in calls]
    alive: list[Node] = []
    result = []
    for i, node in enumerate(calls):
        alive = [other for other in alive if last[place[other]] >= i]
        result.append(list(alive))
        alive.append(node)
    return result


def _size(node: Node) -> int:
    """Bytes of a result, for one row of the program."""
    value: Tensor = node.meta["val"]
    count = value.element_size()
    for size in value.shape:
        count *= size if isinstance(size, int) else 1
    return count


def _block(before: Node, anchor: Node) -> str:
    """Path of the module that holds `anchor` and not `before`; '' where the paths do not say."""
    path: list[str] = []
    theirs = module_path(before).split(".")
    for i, atom in enumerate(module_path(anchor).split(".")):
        path.append(atom)
        if i >= len(theirs) or theirs[i] != atom:
            return ".".join(path)
    return ""


def _inside(node: Node, block: str) -> bool:
    return f"{module_path(node)}.".startswith(f"{block}.") if block else False


# --- which segments are equal ---------------------------------------------------------------------------------------


def _segment(gm: GraphModule, nodes: Sequence[Node]) -> Segment:
    inside = set(nodes)
    inputs: dict[Node, int] = {}
    local = {node: i for i, node in enumerate(nodes)}
    described: list[Hashable] = []

    def token(node: Node) -> Hashable:
        if node in local:
            return ("call", local[node])
        if node not in inputs:
            inputs[node] = len(inputs)
            described.append(_described(gm, node))
        return ("input", inputs[node])

    body = tuple((node.target, hashable(node.args, token), hashable(node.kwargs, token)) for node in nodes)
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    results = tuple((local[node], facts(node.meta["val"])) for node in outputs)
    return Segment(tuple(nodes), tuple(inputs), outputs, (body, tuple(described), results))


def _described(gm: GraphModule, node: Node) -> Hashable:
    """What a compiled function may depend on in an input."""
    return facts(attribute(gm, node).detach() if node.op == "get_attr" else node.meta["val"])
