# SPDX-License-Identifier: Apache-2.0
"""Keys and values go into a cache, and attention reads the cache: any subset of rows may be computed.

    qkv = linear(x, W_qkv);  q, k = rope(split 0), rope(split 1);  v = split 2
    row_attention(q, k, v, tiles)
    =>  q = qkv_rope_cache_write(qkv, cos, sin, positions, cache_rows, k_cache_i, v_cache_i)
        cached_attention(q, k_cache_i, v_cache_i, tiles, arrived)

The step computes the rows it is given, writes their keys and values to `cache_rows` before attention reads them, and
attends to whatever the tiles name. Which rows those are is a cache policy's business; all rows fill the cache. Where
something stands between projection and rotation (QK-norm), or the projections are not packed, k and v are written by
`write_rows` instead. `arrived` is one array of zeros for all layers, with which the attention kernel counts.

In `scored` layers `row_attention_scored` also adds the raw logits between the window's queries and every cached key
(Flash-Cache, Eq. 2) to an array with a row for each head, which starts as zeros; behind the last layer the sum of its
rows is added to `scores`. Runs after every exact pass: regions that span a mutation no longer match.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import torch
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..kernels.cached_attention import ARRIVALS
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, fake_mode_of, find, is_call, output_node, placeholders
from .inputs import add_input, symbolic


def cache_names(layers: int) -> tuple[str, ...]:
    """Names of the cache inputs of a program, in order."""
    return tuple(f"{kind}_cache_{layer}" for layer in range(layers) for kind in ("k", "v"))


def packed_projection(attention: Node) -> tuple[Node, Node, Node, Node] | None:
    """(packed projection, cos, sin, positions) when q, k and v are its rotated and plain parts in order."""
    q, k, v = attention.args[:3]
    rope = torch.ops.dllm.rope.default
    if not (is_call(q, rope) and is_call(k, rope) and is_call(v, aten.unflatten.int)):
        return None
    parts = [node.args[0] for node in (q, k, v)]  # type: ignore[union-attr]
    if not all(is_call(part, getitem) and part.args[1] == i for i, part in enumerate(parts)):
        return None
    splits = {part.args[0] for part in parts}
    if len(splits) != 1 or q.args[1:4] != k.args[1:4]:  # type: ignore[union-attr]
        return None
    return (splits.pop().args[0], *q.args[1:4])  # type: ignore[return-value,union-attr]


def insert_kv_cache(gm: GraphModule, scored: Sequence[int]) -> Outcome:
    """Rewrite every attention of a row program; adds `cache_rows` and two caches a layer.

    With `scored` layers also adds `window` (S, w) rows of the step, `spans` (S, 2) cache rows of each sample, and
    `scores`, one fp32 number for each cache row.
    """
    outcome = Outcome()
    mode, ops = fake_mode_of(gm), torch.ops.dllm
    ids = placeholders(gm)[0].meta["val"]
    with mode:
        cache_rows = add_input(gm, "cache_rows", torch.empty_like(ids))
    one_row = torch.zeros(23, dtype=torch.float32, device=ids.device)
    scores = add_input(gm, "scores", symbolic(mode, one_row, 0))
    window = add_input(gm, "window", symbolic(mode, torch.zeros(7, 9, dtype=torch.int64, device=ids.device), 0, 1))
    with mode:
        spans = add_input(
            gm, "spans", window.meta["val"].new_empty((window.meta["val"].shape[0], 2), dtype=torch.int32)
        )
    attentions = find(gm, ops.row_attention.default)
    # In front of everything, so that no layer differs from the others by making them.
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    arrived = call(gm, aten.new_zeros.default, (attentions[0].args[3], [ARRIVALS]), like=first)
    by_head = _zeros_by_head(gm, scores, attentions[0], first) if scored else None
    for layer, attention in enumerate(attentions):
        q, k, v, tiles, tile_rows = attention.args
        key = k.meta["val"]  # type: ignore[union-attr]
        caches = []
        for kind in ("k", "v"):
            with mode:
                value = key.new_empty((scores.meta["val"].shape[0], *key.shape[1:]))
            caches.append(add_input(gm, f"{kind}_cache_{layer}", value))
        packed = packed_projection(attention)
        if packed is not None:
            heads = (int(q.meta["val"].shape[1]), int(key.shape[1]))  # type: ignore[union-attr]
            args = (*packed, cache_rows, *caches, *heads)
            q = call(gm, ops.qkv_rope_cache_write.default, args, like=attention)
        else:
            for cache, fresh in zip(caches, (k, v), strict=True):
                call(gm, ops.write_rows.default, (cache, cache_rows, fresh), like=attention)
        reading = (q, *caches, tiles, tile_rows)
        if layer in scored:
            tracking = (window, spans, by_head, arrived)
            reads = call(gm, ops.row_attention_scored.default, (*reading, *tracking), like=attention)
        else:
            reads = call(gm, ops.cached_attention.default, (*reading, arrived), like=attention)
        attention.replace_all_uses_with(reads)
        gm.graph.erase_node(attention)
        outcome.accept()
    if by_head is not None:
        end = output_node(gm)
        summed = call(gm, aten.sum.dim_IntList, (by_head, [0]), like=end)
        call(gm, aten.add_.Tensor, (scores, summed), like=end)
    for node in (window, spans, scores):
        if not node.users:
            gm.graph.erase_node(node)
    return outcome


def _zeros_by_head(gm: GraphModule, scores: Node, attention: Node, first: Node) -> Node:
    """(H, K) fp32 zeros."""
    heads = int(attention.args[0].meta["val"].shape[1])  # type: ignore[union-attr]
    rows = call(gm, aten.sym_size.int, (scores, 0), like=first)
    return call(gm, aten.new_zeros.default, (scores, [heads, rows]), like=first)


def insert_kv_cache_pass(scored: Sequence[int] = ()) -> GraphPass:
    """The pass, with the layers that contribute to the tracking score."""
    scored = tuple(scored)
    return GraphPass(
        "insert_kv_cache",
        Level.EXACT,
        lambda gm: insert_kv_cache(gm, scored),
        required=lambda layers: layers,
        saves="every layer for rows that are not in the step",
    )
