# SPDX-License-Identifier: Apache-2.0
"""LaCache: within a block, layers compute q, k and v of the block's rows only.

`first` fills the state, `step` uses it. In a cached layer i (layer 0: `stream` is the embedding):

    row_attention(q, k, v)                                      q, k, v of all rows
    first => copy_ q, k, v into q_i, k_i, v_i;  facache_first(q, k, v, m_i, den_i, num_i, tiles)
    step  => q, k, v of `stream[block_rows]` only, written into q_i, k_i, v_i;
             facache_step(q_i, k_i, v_i, m_i, den_i, num_i, tiles)

and in layer 0 the embedding itself is kept in `h` (EmbedCache) and made for the block's rows only. Output projection,
residual and feed-forward run for all rows in every step, but in the last layer (`select_wanted_rows`).

Layer 0 is exact: its inputs outside the block are tokens, which do not change within a block. From layer 1 on the
inputs of other rows change in every step, so the same rewrite is a policy (LaCache, Appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, copy_region, fake_mode_of, find, is_call, placeholders, remove_dead_code
from .inputs import add_input, symbolic

Kind = Literal["first", "step"]
STATE = ("q", "k", "v", "m", "den", "num")


def state_names(layers: Sequence[int]) -> tuple[str, ...]:
    """Names of the state inputs of a program that caches `layers`."""
    embedding = ("h",) if 0 in layers else ()
    return (*embedding, *(f"{name}_{layer}" for layer in layers for name in STATE))


def _stream(attention: Node) -> Node:
    """The residual stream a layer reads: the other summand of the add behind the output projection."""
    node = attention
    while not is_call(node, aten.add.Tensor):
        node = next(iter(node.users))
    projected = {node.args[0], node.args[1]}
    behind = attention
    while behind not in projected:
        behind = next(iter(behind.users))
    return (projected - {behind}).pop()  # type: ignore[return-value]


def _state_inputs(gm: GraphModule, layer: int, attention: Node) -> dict[str, Node]:
    """Placeholders of a layer's state, shaped like its q, k and v."""
    q, k, v = (node.meta["val"] for node in attention.args[:3])  # type: ignore[union-attr]
    with fake_mode_of(gm):
        values: dict[str, Tensor] = {"q": q.new_empty(q.shape), "k": k.new_empty(k.shape), "v": v.new_empty(v.shape)}
        for name, shape in (("m", q.shape[:2]), ("den", q.shape[:2]), ("num", q.shape)):
            values[name] = q.new_empty(shape, dtype=torch.float32)
    return {name: add_input(gm, f"{name}_{layer}", values[name]) for name in STATE}


def insert_lacache(gm: GraphModule, layers: Sequence[int], kind: Kind) -> Outcome:
    """Rewrite the attention of `layers` in a row program.

    Adds the inputs `block_tiles`, the state (see `state_names`) and, for `step`, `block_rows`.
    """
    outcome = Outcome()
    mode = fake_mode_of(gm)
    attentions = find(gm, torch.ops.dllm.row_attention.default)
    ids, positions = placeholders(gm)[:2]
    device = ids.meta["val"].device
    tiles = add_input(gm, "block_tiles", symbolic(mode, torch.zeros(7, 6, dtype=torch.int32, device=device), 0))
    if kind == "first":
        for layer in layers:
            _keep(gm, attentions[layer], layer, tiles)
            outcome.accept()
    else:
        rows = add_input(gm, "block_rows", symbolic(mode, torch.zeros(11, dtype=torch.int64, device=device), 0))
        first = rows.next
        while first.op != "call_function":
            first = first.next
        of_block = {node: call(gm, aten.index_select.default, (node, 0, rows), like=first) for node in (ids, positions)}
        for layer in layers:
            _reuse(gm, attentions[layer], layer, tiles, rows, of_block)
            outcome.accept()
    remove_dead_code(gm)
    return outcome


def _embedding_input(gm: GraphModule, stream: Node) -> Node:
    with fake_mode_of(gm):
        return add_input(gm, "h", stream.meta["val"].new_empty(stream.meta["val"].shape))


def _keep(gm: GraphModule, attention: Node, layer: int, tiles: Node) -> None:
    """Write the state of one layer while all rows are computed."""
    stream = _stream(attention)
    if layer == 0:
        call(gm, aten.copy_.default, (_embedding_input(gm, stream), stream), like=stream, before=stream.next)
    state = _state_inputs(gm, layer, attention)
    heads = attention.args[:3]
    for name, value in zip(("q", "k", "v"), heads, strict=True):
        call(gm, aten.copy_.default, (state[name], value), like=attention)
    args = (*heads, state["m"], state["den"], state["num"], tiles, attention.args[4])
    attention.replace_all_uses_with(call(gm, torch.ops.dllm.facache_first.default, args, like=attention))


def _reuse(gm: GraphModule, attention: Node, layer: int, tiles: Node, rows: Node, of_block: dict[Node, Node]) -> None:
    """Compute the block's rows of one layer anew and take the others from its state."""
    ops = torch.ops.dllm
    stream = _stream(attention)
    if layer == 0:
        (fresh,) = copy_region(gm, (stream,), of_block, before=stream)
        kept = _embedding_input(gm, stream)
        call(gm, ops.write_rows.default, (kept, rows, fresh), like=stream)
        stream.replace_all_uses_with(kept)
        stream = kept
    else:
        fresh = call(gm, aten.index_select.default, (stream, 0, rows), like=stream, before=stream.next)
    state = _state_inputs(gm, layer, attention)
    heads = copy_region(gm, attention.args[:3], {**of_block, stream: fresh}, before=attention)  # type: ignore[arg-type]
    for name, value in zip(("q", "k", "v"), heads, strict=True):
        call(gm, ops.write_rows.default, (state[name], rows, value), like=attention)
    args = (*(state[name] for name in STATE), tiles, attention.args[4])
    attention.replace_all_uses_with(call(gm, ops.facache_step.default, args, like=attention))


def insert_lacache_pass(layers: Sequence[int], kind: Kind) -> GraphPass:
    """The pass for a set of layers; exact for layer 0 alone, a policy otherwise."""
    layers = tuple(layers)
    return GraphPass(
        f"insert_lacache_{kind}",
        Level.EXACT if layers == (0,) else Level.POLICY,
        lambda gm: insert_lacache(gm, layers, kind),
        required=lambda _: len(layers),
        saves="q, k, v and scores of rows outside the block, in the cached layers" if kind == "step" else "",
    )
