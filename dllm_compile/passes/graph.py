# SPDX-License-Identifier: Apache-2.0
"""Walkers and small edits shared by the passes. Nothing here knows a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

# Composite operators run their Python decomposition: torch 2.11's own C++ ones read sizes that are symbols here.
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, map_arg
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import PassError

aten = torch.ops.aten

# Nodes that change a tensor's dtype or layout and nothing else: a walk towards a producer looks through them.
CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.type_as.default, aten.clone.default})
VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.transpose.int,
        aten.contiguous.default,
        aten.unsqueeze.default,
        aten.expand.default,
    }
)


def is_call(node: object, *targets: Any) -> bool:
    """Whether `node` is a call of one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_biased_norm(node: Node) -> bool:
    """Whether `node` adds a parameter to a `dllm::rms_norm`."""
    if not is_call(node, aten.add.Tensor) or not is_call(node.args[0], torch.ops.dllm.rms_norm.default):
        return False
    return isinstance(node.args[1], Node) and node.args[1].op == "get_attr"


def find(gm: GraphModule, *targets: Any) -> list[Node]:
    """All calls of `targets`, in graph order."""
    return [node for node in gm.graph.nodes if is_call(node, *targets)]


def skip(node: Node, targets: Iterable[Any]) -> Node:
    """Walk up through calls of `targets` to the first other node."""
    targets = frozenset(targets)
    while node.op == "call_function" and node.target in targets:
        node = node.args[0]  # type: ignore[assignment]
    return node


def skip_down(node: Node, targets: Iterable[Any]) -> Node:
    """Walk down through single-user calls of `targets`; returns the last of them, or `node`."""
    targets = frozenset(targets)
    while len(node.users) == 1 and is_call(user := next(iter(node.users)), *targets):
        node = user
    return node


def data_inputs(node: Node) -> list[Node]:
    """Inputs whose *values* reach the output: the second argument of `type_as` lends its dtype only."""
    return [node.args[0]] if is_call(node, aten.type_as.default) else node.all_input_nodes  # type: ignore[list-item]


def backward_slice(outputs: Iterable[Node], stop: Callable[[Node], bool]) -> list[Node]:
    """Calls that `outputs` depend on, in graph order, not going past nodes for which `stop` holds."""
    seen: set[Node] = set()
    stack = [node for node in outputs if not stop(node)]
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        stack.extend(source for source in data_inputs(node) if not stop(source))
    if not seen:
        return []
    return [node for node in next(iter(seen)).graph.nodes if node in seen]


def depends_on_input(node: Node) -> bool:
    """Whether `node` depends on a placeholder (else it is a function of parameters alone)."""
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current.op == "placeholder":
            return True
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return False


def attribute(gm: GraphModule, node: Node) -> Tensor:
    """The tensor behind a `get_attr` node."""
    return lookup(gm, str(node.target))


def lookup(gm: GraphModule, path: str) -> Tensor:
    """The tensor stored under a dotted path."""
    value: Any = gm
    for atom in path.split("."):
        value = getattr(value, atom)
    return value


def set_buffer(gm: GraphModule, path: str, value: Tensor) -> None:
    """Store `value` as a non-persistent buffer under a dotted path, making modules on the way."""
    *parents, leaf = path.split(".")
    module: torch.nn.Module = gm
    for atom in parents:
        if not hasattr(module, atom):
            module.add_module(atom, torch.nn.Module())
        module = getattr(module, atom)
    module.register_buffer(leaf, value, persistent=False)


def fake_mode_of(gm: GraphModule) -> FakeTensorMode:
    """The mode in which the graph's recorded values live."""
    for node in gm.graph.nodes:  # one mode for all of them, and this is asked for every node that a pass inserts
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise PassError("the graph has no recorded values: it must come from dllm_compile.capture")


def get_attr(gm: GraphModule, path: str, before: Node) -> Node:
    """A `get_attr` node for `path`, inserted before `before`, with its recorded value."""
    with gm.graph.inserting_before(before):
        node = gm.graph.get_attr(path)
    node.meta["val"] = fake_mode_of(gm).from_tensor(lookup(gm, path), static_shapes=True)
    return node


def call(
    gm: GraphModule,
    target: Any,
    args: tuple[Any, ...],
    like: Node,
    before: Node | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Node:
    """Insert a call before `before` (default: before `like`), with recorded value and `like`'s provenance."""
    with gm.graph.inserting_before(before or like):
        node = gm.graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = _run_fake(gm, node)
    return node


def copy_region(gm: GraphModule, outputs: Iterable[Node], known: dict[Node, Node], before: Node) -> list[Node]:
    """Compute `outputs` once more, before `before`, from other inputs: `known` maps nodes to what stands for them."""
    outputs = list(outputs)
    mapping = dict(known)
    for node in backward_slice(outputs, known.__contains__):
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: mapping.get(source, source))  # type: ignore[misc]
        mapping[node] = call(gm, node.target, args, like=node, before=before, kwargs=kwargs)
    return [mapping.get(node, node) for node in outputs]


def replace(old: Node, new: Node) -> None:
    """Give all uses of `old` to `new`; dead code is removed after the pass."""
    old.replace_all_uses_with(new)


def _run_fake(gm: GraphModule, node: Node) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with fake_mode_of(gm), torch.no_grad(), enable_python_dispatcher():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def record(gm: GraphModule, node: Node) -> None:
    """Record anew what `node` gives, after its inputs were changed for ones of another shape."""
    node.meta["val"] = _run_fake(gm, node)


def remove_dead_code(gm: GraphModule) -> None:
    """Erase calls nobody reads. Unlike FX's own rule this also removes ops tagged as random (attention's dropout)."""

    def impure(node: Node) -> bool:
        if node.op != "call_function":
            return node.op != "get_attr"
        return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable

    gm.graph.eliminate_dead_code(impure)


def module_path(node: Node) -> str:
    """Path of the innermost module the node came from, or ''."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if entry[0]]
    return paths[-1] if paths else ""


def describe(node: Node) -> str:
    """Where a node is, for messages."""
    return module_path(node) or node.name


def inventory(gm: GraphModule) -> str:
    """Operators of the graph with their counts, most frequent first."""
    return ", ".join(f"{name} x{count}" for name, count in operator_counts(gm).most_common())


def operator_counts(gm: GraphModule) -> Counter[str]:
    """How often each operator is called."""
    return Counter(target_name(node) for node in gm.graph.nodes if node.op == "call_function")


def target_name(node: Node) -> str:
    """`aten.linear`, `dllm.rope`, … without the overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def same_value(left: Any, right: Any) -> bool:
    """Whether two recorded values agree in shape, dtype, device and strides (sizes may be symbolic)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.device != right.device or left.dim() != right.dim():
            return False
        pairs = [*zip(left.shape, right.shape, strict=True)]
        # A dimension of size 1 may have any stride.
        pairs += [
            (a, b)
            for a, b, size in zip(left.stride(), right.stride(), left.shape, strict=True)
            if not _same_size(size, 1)
        ]
        return all(_same_size(a, b) for a, b in pairs)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, int | torch.SymInt) and isinstance(right, int | torch.SymInt):
        return _same_size(left, right)
    return type(left) is type(right)


def _same_size(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if isinstance(left, torch.SymInt) and isinstance(right, torch.SymInt):
        if left.node.shape_env is not right.node.shape_env:
            return False  # symbols of one name that have nothing to do with each other
        if left.node.expr == right.node.expr:
            return True
    # A size that was found to be constant may be recorded as a symbol with one value.
    return bool(statically_known_true(left == right))


def facts(value: Any) -> Hashable:
    """What a recorded value says about the real one: dtype, device, sizes and strides, symbols by their expressions.

    Equal for two values of one graph exactly when code made for the one is right for the other.
    """
    if isinstance(value, Tensor):
        constant = getattr(value, "constant", None)  # a fake tensor whose number is known
        sizes = (tuple(map(facts, value.shape)), tuple(map(facts, value.stride())), facts(value.storage_offset()))
        return (value.dtype, value.device, *sizes, None if constant is None else id(value))
    if isinstance(value, tuple | list):
        return tuple(map(facts, value))
    if isinstance(value, torch.SymInt):
        return ("symbol", value.node.expr)
    return (type(value), repr(value))


def hashable(value: Any, of_node: Callable[[Node], Hashable]) -> Hashable:
    """Arguments of a call as nested tuples, nodes as `of_node` says; `1`, `1.0` and `True` stay different."""
    if isinstance(value, Node):
        return of_node(value)
    if isinstance(value, tuple | list):
        return tuple(hashable(item, of_node) for item in value)
    if isinstance(value, dict):
        return tuple((key, hashable(item, of_node)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(hashable(part, of_node) for part in (value.start, value.stop, value.step)))
    return facts(value)


def check_metadata(gm: GraphModule, author: str) -> None:
    """Re-run every call on recorded values and compare with what is recorded.

    Raises:
        PassError: a node's recorded value is missing or differs from what the node would produce.
    """
    # Layers are alike: what an operator gives for inputs of some shape is asked once.
    known: dict[Hashable, Any] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if "val" not in node.meta:
            raise PassError(f"{author} inserted {node.format_node()} without a recorded value")
        signature = (node.target, *(hashable(a, lambda n: facts(n.meta["val"])) for a in (node.args, node.kwargs)))
        if signature not in known:
            known[signature] = _run_fake(gm, node)
        actual = known[signature]
        if not same_value(node.meta["val"], actual):
            raise PassError(f"{author}: {node.format_node()} is recorded as {node.meta['val']} but gives {actual}")


def restride(gm: GraphModule, changed: Iterable[Node]) -> None:
    """Record again what follows from `changed` nodes, where only strides may differ from what was recorded.

    Raises:
        PassError: a shape or dtype would change, which no rewrite of an equal value may do.
    """
    dirty = set(changed)
    for node in gm.graph.nodes:
        if node.op != "call_function" or not dirty.intersection(node.all_input_nodes):
            continue
        before, after = node.meta["val"], _run_fake(gm, node)
        if same_value(before, after):
            continue
        if isinstance(before, Tensor) and (before.dtype != after.dtype or before.shape != after.shape):
            raise PassError(f"{node.format_node()} changed from {before} to {after}")
        node.meta["val"] = after
        dirty.add(node)


class _Recorder(Interpreter):
    """Runs a graph on fake values and records what each node gives."""

    def run_node(self, node: Node) -> Any:
        """Record the value of `node`."""
        value = super().run_node(node)
        node.meta["val"] = value
        return value

    def fetch_attr(self, target: str) -> Any:
        """Parameters as fake tensors of static shape."""
        return self.mode.from_tensor(super().fetch_attr(target), static_shapes=True)

    mode: FakeTensorMode


def record_values(gm: GraphModule, mode: FakeTensorMode, inputs: Iterable[Any]) -> None:
    """Record `val` for every node by running the graph on fake `inputs`, one for each placeholder."""
    recorder = _Recorder(gm)
    recorder.mode = mode
    with mode, torch.no_grad(), enable_python_dispatcher():
        recorder.run(*inputs)


def share(gm: GraphModule) -> GraphModule:
    """A second GraphModule over a copy of the graph: same parameters and buffers, nodes of its own."""
    graph = Graph()
    values: dict[Node, Node] = {}
    result = graph.graph_copy(gm.graph, values)
    output = graph.output(result)
    output.meta = dict(next(iter(reversed(gm.graph.nodes))).meta)
    copy = GraphModule(gm, graph, class_name=type(gm).__name__)
    copy.meta.update(gm.meta)
    return copy


def placeholders(gm: GraphModule) -> list[Node]:
    """Input nodes, in calling order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def output_node(gm: GraphModule) -> Node:
    """The output node."""
    return next(node for node in reversed(gm.graph.nodes) if node.op == "output")
