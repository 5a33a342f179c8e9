# SPDX-License-Identifier: Apache-2.0
"""The last norm and the head run on wanted rows only.

    head(rms_norm(stream))  =>  head(rms_norm(index_select(stream, 0, wanted)))

A decoding step reads the logits of its block; the head is 7 % of a row's work and its softmax much more. With guidance
the unconditional rows follow the wanted ones and both are combined before the head. Exact.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .framework import GraphPass, Level, Outcome
from .graph import aten, call, fake_mode_of, find, is_call
from .inputs import add_input, symbolic


def _stream(head: Node) -> tuple[Node, Node]:
    """(node to rewire, its input): the last norm where there is one, else the head itself."""
    norm = head.args[0]
    consumer = norm if is_call(norm, torch.ops.dllm.rms_norm.default) and len(norm.users) == 1 else head  # type: ignore[union-attr]
    return consumer, consumer.args[0]  # type: ignore[return-value,union-attr]


def select_wanted_rows(gm: GraphModule, guided: bool) -> Outcome:
    """Add inputs `wanted [W]` (and, guided, `unconditional [W]` and `guidance []`) and gather before the last norm."""
    outcome = Outcome()
    mode = fake_mode_of(gm)
    for head in find(gm, torch.ops.dllm.head.default):
        consumer, stream = _stream(head)
        device = stream.meta["val"].device
        wanted = add_input(gm, "wanted", symbolic(mode, torch.zeros(11, dtype=torch.int64, device=device), 0))
        picked = call(gm, aten.index_select.default, (stream, 0, wanted), like=consumer)
        if guided:
            with mode:
                like_wanted = torch.empty_like(wanted.meta["val"])
                scalar = torch.empty((), dtype=torch.float32, device=device)
            unconditional = add_input(gm, "unconditional", like_wanted)
            guidance = add_input(gm, "guidance", scalar)
            other = call(gm, aten.index_select.default, (stream, 0, unconditional), like=consumer)
            picked, other = (_normed(gm, consumer, head, rows) for rows in (picked, other))
            picked = call(gm, torch.ops.dllm.guide.default, (picked, other, guidance), like=head)
            consumer = head
        rewired = call(gm, consumer.target, (picked, *consumer.args[1:]), like=consumer)
        consumer.replace_all_uses_with(rewired)
        gm.graph.erase_node(consumer)
        if rewired.target is not head.target:
            _refresh(gm, head)
        outcome.accept()
    return outcome


def _normed(gm: GraphModule, consumer: Node, head: Node, rows: Node) -> Node:
    return rows if consumer is head else call(gm, consumer.target, (rows, *consumer.args[1:]), like=consumer)


def _refresh(gm: GraphModule, head: Node) -> None:
    """Make the head anew, so that its recorded value is that of the wanted rows."""
    fresh = call(gm, head.target, head.args, like=head)
    head.replace_all_uses_with(fresh)
    gm.graph.erase_node(head)


def select_wanted_rows_pass(guided: bool) -> GraphPass:
    """The pass, with or without classifier-free guidance."""
    return GraphPass(
        "select_wanted_rows",
        Level.EXACT,
        lambda gm: select_wanted_rows(gm, guided),
        required=lambda layers: 1,
        saves="last norm and head of all rows but the block's",
    )
