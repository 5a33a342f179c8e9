# SPDX-License-Identifier: Apache-2.0
"""The part of a graph that belongs to one transformer block, as boxes and arrows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from ..passes.graph import module_path, target_name
from .python_code import value_text

_ATTENTION = (
    "aten.scaled_dot_product_attention",
    "dllm.attention",
    "dllm.row_attention",
    "dllm.row_attention_scored",
    "dllm.cached_attention",
    "dllm.verify_attention",
    "dllm.facache_first",
    "dllm.facache_step",
)
_PRODUCTS = ("aten.linear", "dllm.quantized_linear", "dllm.fp8_linear", "dllm.linear_", "dllm.head")
_VIEWS = ("view", "reshape", "transpose", "unflatten", "split", "slice", "unbind", "getitem", "unsqueeze", "expand")


@dataclass
class Box:
    """One call, or something that comes from outside.

    Attributes:
        name: of the node.
        title: the operator.
        detail: weights it reads.
        kind: "product", "attention", "dllm", "view", "pointwise", "input" or "output".
        hint: everything else, shown when pointed at.
    """

    name: str
    title: str
    detail: str
    kind: str
    hint: str


@dataclass
class Drawing:
    """Boxes by name in graph order, and arrows between them."""

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[tuple[str, str]] = field(default_factory=list)


def block_path(gm: GraphModule, layer: int) -> str | None:
    """Path of the module that is block `layer`; None where the graph does not tell."""
    attentions = [node for node in gm.graph.nodes if node.op == "call_function" and target_name(node) in _ATTENTION]
    if not attentions:
        return None
    atoms = module_path(attentions[min(layer, len(attentions) - 1)]).split(".")
    numbers = [place for place, atom in enumerate(atoms) if atom.isdigit()]
    return ".".join(atoms[: numbers[-1] + 1]) if numbers else None


def block_drawing(gm: GraphModule, path: str) -> Drawing:
    """The calls of the module at `path`, what they read from outside and what is read of them."""
    members = [node for node in gm.graph.nodes if node.op == "call_function" and _is_within(node, path)]
    shown = [node for node in members if target_name(node) != "getitem"]
    inside = set(members)
    drawing = Drawing()
    for node in shown:
        for source in _sources(node):
            if source in inside:
                drawing.arrows.append((source.name, node.name))
                continue
            outer = drawing.boxes.setdefault(source.name, _outer(source))
            drawing.arrows.append((outer.name, node.name))
        drawing.boxes[node.name] = _box(node, path)
    for node in shown:
        if any(user not in inside for user in _users(node)):
            end = f"{node.name} >"
            drawing.boxes[end] = Box(end, "to what follows", "", "output", value_text(node.meta.get("val")))
            drawing.arrows.append((node.name, end))
    drawing.arrows = list(dict.fromkeys(drawing.arrows))
    return drawing


def _is_within(node: Node, path: str) -> bool:
    own = module_path(node)
    return own == path or own.startswith(f"{path}.")


def _sources(node: Node) -> list[Node]:
    """What a call reads, weights left out; parts of a result stand for the whole."""
    return list(dict.fromkeys(_whole(source) for source in node.all_input_nodes if source.op != "get_attr"))


def _whole(node: Node) -> Node:
    while node.op == "call_function" and target_name(node) == "getitem":
        node = node.args[0]  # type: ignore[assignment]
    return node


def _users(node: Node) -> Iterable[Node]:
    """What reads a call, also by one of its parts."""
    for user in node.users:
        if user.op == "call_function" and target_name(user) == "getitem":
            yield from _users(user)
        else:
            yield user


def _outer(node: Node) -> Box:
    title = str(node.target) if node.op == "placeholder" else target_name(node)
    return Box(node.name, title, "", "input", f"{node.name} {value_text(node.meta.get('val'))} {module_path(node)}")


def _box(node: Node, path: str) -> Box:
    title = target_name(node)
    weights = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    detail = ", ".join(weight.removeprefix(f"{path}.").removesuffix(".weight") for weight in weights)
    own = module_path(node).removeprefix(path).removeprefix(".")
    hint = f"{node.name} = {node.target}\n{value_text(node.meta.get('val'))}\n{own or path}"
    return Box(node.name, title.removeprefix("aten."), detail, _kind(title), hint)


def _kind(title: str) -> str:
    if title in _ATTENTION:
        return "attention"
    if title.startswith(_PRODUCTS):
        return "product"
    if title.startswith("dllm.") or title.endswith("_reference"):
        return "dllm"
    return "view" if any(word in title for word in _VIEWS) else "pointwise"
