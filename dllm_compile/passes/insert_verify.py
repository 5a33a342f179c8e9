# SPDX-License-Identifier: Apache-2.0
"""Drafts are checked over a cache that is read and never written.

    qkv = linear(x, W_qkv);  q, k = rope(split 0), rope(split 1);  v = split 2
    row_attention(q, k, v, tiles)
    =>  q = qkv_rope_cache_write(qkv, cos, sin, positions, own_rows, own_k, own_v)
        verify_attention(q, own_k, own_v, k_cache_i, v_cache_i, tiles, views, hidden)

The rows of the pass see each other as `views` says and the keys of their sample in the cache but the `hidden` ones
(Flash-Verify, see `kernels.verify_attention`). Their keys and values go to two buffers that all layers share, by the
operator that writes caches elsewhere; where something stands between projection and rotation, or the projections are
not packed, they stay where they are. Runs after every exact pass, like `insert_kv_cache`.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..kernels.cached_attention import ARRIVALS
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, fake_mode_of, find, placeholders
from .inputs import add_input, symbolic
from .insert_kv_cache import packed_projection

OWN_BUFFERS = ("own_k", "own_v")
"""Inputs [R, H_kv, hd] that are written in place: keys and values of the pass's own rows, one layer after the other."""


def insert_verify(gm: GraphModule) -> Outcome:
    """Rewrite every attention of a row program.

    Adds `views` (R, 3) int32, `hidden` (K,) bool, two caches a layer, and for packed projections `own_rows` (R,) int64
    (0, 1, 2, ...) with two buffers; every program has these inputs, whether a layer needs them or not.
    """
    outcome = Outcome()
    mode, ops = fake_mode_of(gm), torch.ops.dllm
    ids = placeholders(gm)[0].meta["val"]
    one_row = torch.zeros(23, dtype=torch.bool, device=ids.device)
    hidden = add_input(gm, "hidden", symbolic(mode, one_row, 0))
    attentions = find(gm, ops.row_attention.default)
    with mode:
        views = add_input(gm, "views", ids.new_empty((ids.shape[0], 3), dtype=torch.int32))
        own_rows = add_input(gm, "own_rows", torch.empty_like(ids))
        key = attentions[0].args[1].meta["val"]  # type: ignore[union-attr]
        own = [add_input(gm, name, key.new_empty((ids.shape[0], *key.shape[1:]))) for name in OWN_BUFFERS]
    # In front of everything, so that no layer differs from the others by making them.
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    arrived = call(gm, aten.new_zeros.default, (attentions[0].args[3], [ARRIVALS]), like=first)
    for layer, attention in enumerate(attentions):
        q, k, v, tiles, tile_rows = attention.args
        key = k.meta["val"]  # type: ignore[union-attr]
        caches = []
        for kind in ("k", "v"):
            with mode:
                value = key.new_empty((hidden.meta["val"].shape[0], *key.shape[1:]))
            caches.append(add_input(gm, f"{kind}_cache_{layer}", value))
        packed = packed_projection(attention)
        if packed is not None:
            heads = (int(q.meta["val"].shape[1]), int(key.shape[1]))  # type: ignore[union-attr]
            q = call(gm, ops.qkv_rope_cache_write.default, (*packed, own_rows, *own, *heads), like=attention)
            k, v = own
        args = (q, k, v, *caches, tiles, views, hidden, tile_rows, arrived)
        attention.replace_all_uses_with(call(gm, ops.verify_attention.default, args, like=attention))
        gm.graph.erase_node(attention)
        outcome.accept()
    return outcome


INSERT_VERIFY = GraphPass(
    "insert_verify",
    Level.POLICY,
    insert_verify,
    required=lambda layers: layers,
    saves="every row but the drafts, their masks and some context",
)
