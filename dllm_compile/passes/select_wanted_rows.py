# SPDX-License-Identifier: Apache-2.0
"""Behind the last attention, wanted rows only are computed.

    head(f(stream, attention))  =>  head(f(index_select(stream, 0, wanted), index_select(attention, 0, wanted)))

A decoding step reads the logits of its block. What stands between the last attention and the head works row by row:
row i of the result needs row i of the inputs. So the selection moves up, from the head through every operator of
`ROW_WISE` and every pointwise one that nothing else reads, to whatever is not of that kind (attention) or is read by
something that needs all rows (the stream that enters the last layer). No layer is looked for: where a row depends on
others earlier, as with one FP8 scale for all rows, the selection stays behind that.

With guidance the unconditional rows follow the wanted ones through the same calls; both are combined before the head.
Exact: no operation of a row changes. A matrix product of fewer rows may add in another order.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, fake_mode_of, find, record
from .inputs import add_input, symbolic

ROW_WISE: dict[Any, tuple[int, ...]] = {
    aten.linear.default: (0,),
    torch.ops.dllm.quantized_linear.default: (0,),
    torch.ops.dllm.rms_norm.default: (0,),
    torch.ops.dllm.swiglu.default: (0, 1),
    aten.split_with_sizes.default: (0,),
    aten.split.Tensor: (0,),
    aten.chunk.default: (0,),
    aten.slice.Tensor: (0,),
    aten.unflatten.int: (0,),
    getitem: (0,),
}
"""Operators that work row by row, the first dimension being the rows, with the places of the arguments that have rows.
Pointwise ones need no entry."""

_ALONG: dict[Any, int] = {
    aten.split_with_sizes.default: 2,
    aten.split.Tensor: 2,
    aten.chunk.default: 2,
    aten.slice.Tensor: 1,
    aten.unflatten.int: 1,
}
"""Operators of `ROW_WISE` that are so along other dimensions than the rows', with the place of the dimension."""


def select_wanted_rows(gm: GraphModule, guided: bool) -> Outcome:
    """Add inputs `wanted [W]` (and, guided, `unconditional [W]` and `guidance []`) and compute those rows only."""
    outcome = Outcome()
    mode = fake_mode_of(gm)
    for head in find(gm, torch.ops.dllm.head.default):
        device = head.args[0].meta["val"].device  # type: ignore[union-attr]
        wanted = add_input(gm, "wanted", symbolic(mode, torch.zeros(11, dtype=torch.int64, device=device), 0))
        reduced = _reduced(gm, head)
        if guided:
            with mode:
                like_wanted = torch.empty_like(wanted.meta["val"])
                scalar = torch.empty((), dtype=torch.float32, device=device)
            unconditional = add_input(gm, "unconditional", like_wanted)
            guidance = add_input(gm, "guidance", scalar)
            both = call(gm, aten.cat.default, ([wanted, unconditional],), like=next(iter(reduced)))
            _select(gm, reduced, both)
            _guide(gm, head, wanted, guidance)
        else:
            _select(gm, reduced, wanted)
        outcome.accept()
    return outcome


def _reduced(gm: GraphModule, head: Node) -> dict[Node, tuple[Node, ...]]:
    """Calls that need selected rows only, in graph order, with their inputs that have rows."""
    kept: set[Node] = set()
    while True:
        reduced: dict[Node, tuple[Node, ...]] = {head: (head.args[0],)}  # type: ignore[dict-item]
        asked = {head.args[0]}
        # Readers come before what they read.
        for node in reversed(gm.graph.nodes):
            if node in asked and node not in kept and all(node in reduced.get(user, ()) for user in node.users):
                inputs = _row_inputs(node)
                if inputs:
                    reduced[node] = inputs
                    asked.update(inputs)
        # Several results at once cannot be gathered: where they stay whole, so does each that is taken out of them.
        torn = {node for node, inputs in reduced.items() if any(_is_several(i) and i not in reduced for i in inputs)}
        if not torn:
            return dict(reversed(reduced.items()))
        kept |= torn


def _is_several(node: Node) -> bool:
    return not isinstance(node.meta["val"], Tensor)


def _row_inputs(node: Node) -> tuple[Node, ...]:
    """Inputs whose row i alone decides row i of `node`; none where that is not known."""
    if node.op != "call_function":
        return ()
    if node.target not in ROW_WISE:
        return _pointwise_inputs(node)
    if node.target is torch.ops.dllm.quantized_linear.default and node.args[3] < 0:  # type: ignore[operator]
        return ()  # one scale for all rows together
    if node.target in _ALONG:
        place = _ALONG[node.target]
        along = node.args[place] if place < len(node.args) else 0
        if along % node.args[0].meta["val"].dim() == 0:  # type: ignore[operator,union-attr]
            return ()
    return tuple(node.args[place] for place in ROW_WISE[node.target])  # type: ignore[misc]


def _pointwise_inputs(node: Node) -> tuple[Node, ...]:
    """Operands of a pointwise call that have the rows of its result; others are the same for all rows."""
    operator, result = node.target, node.meta.get("val")
    if not isinstance(operator, torch._ops.OpOverload) or not isinstance(result, Tensor) or result.dim() < 2:
        return ()
    if torch.Tag.pointwise not in operator.tags or operator._schema.is_mutable:
        return ()
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return ()  # numbers are drawn in the order of the rows
    return tuple(source for source in node.all_input_nodes if _has_rows(source, result))


def _has_rows(source: Node, result: Tensor) -> bool:
    value = source.meta["val"]
    # A parameter may have the rank of the result: then its first dimension is 1.
    same_rank = isinstance(value, Tensor) and value.dim() == result.dim()
    return same_rank and statically_known_true(value.shape[0] == result.shape[0])


def _select(gm: GraphModule, reduced: dict[Node, tuple[Node, ...]], rows: Node) -> None:
    """Gather `rows` of what `reduced` calls read and others make, and record the smaller values."""
    picked: dict[Node, Node] = {}
    for node, inputs in reduced.items():
        for source in inputs:
            if source in reduced:
                continue
            if source not in picked:
                # Not earlier: a buffer of a cache is written before it is read.
                picked[source] = call(gm, aten.index_select.default, (source, 0, rows), like=node)
            node.replace_input_with(source, picked[source])
        record(gm, node)


def _guide(gm: GraphModule, head: Node, wanted: Node, guidance: Node) -> None:
    """Combine the two halves of the rows that `head` reads, and give it the result."""
    rows = head.args[0]
    count = call(gm, aten.sym_size.int, (wanted, 0), like=head)
    halves = call(gm, aten.split_with_sizes.default, (rows, [count, count]), like=head)
    parts = [call(gm, getitem, (halves, i), like=head) for i in range(2)]
    head.args = (call(gm, torch.ops.dllm.guide.default, (*parts, guidance), like=head), *head.args[1:])
    record(gm, head)


def select_wanted_rows_pass(guided: bool) -> GraphPass:
    """The pass, with or without classifier-free guidance."""
    return GraphPass(
        "select_wanted_rows",
        Level.EXACT,
        lambda gm: select_wanted_rows(gm, guided),
        required=lambda layers: 1,
        saves="everything behind the last attention, for rows whose logits nobody reads",
    )
