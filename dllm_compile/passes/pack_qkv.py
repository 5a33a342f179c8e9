# SPDX-License-Identifier: Apache-2.0
"""The q, k and v projections of a layer become one.

    linear(x, W_q), linear(x, W_k), linear(x, W_v)
    =>  split(linear(x, W_qkv), [H*hd, H_kv*hd, H_kv*hd])

Anchor: `dllm::attention`; the three projections are found through its arguments. Norms between projection and rotation
(QK-norm) stay where they are. Refused: projections of different inputs, biases on some only, shared weights.
Saves two GEMM launches a layer; the packed weight shares storage with the three parameters.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .framework import GraphPass, Level, Outcome
from .graph import aten, find, is_biased_norm, is_call
from .packing import merge_linears


def _projection(head: Node) -> Node | None:
    ops = torch.ops.dllm
    node = head
    while is_call(node, ops.rope.default, ops.rms_norm.default, aten.unflatten.int) or is_biased_norm(node):
        node = node.args[0]  # type: ignore[assignment]
    return node if is_call(node, aten.linear.default) else None


def apply(gm: GraphModule) -> Outcome:
    """Pack the projections of every attention of `gm`."""
    outcome = Outcome()
    for attention in find(gm, torch.ops.dllm.attention.default):
        linears = [_projection(head) for head in attention.args[:3]]  # type: ignore[arg-type]
        if any(linear is None for linear in linears):
            outcome.refuse(attention, "a head is not computed from one linear layer")
            continue
        name = str(linears[0].args[1].target).rsplit(".", 2)[0]  # type: ignore[union-attr]
        reason = merge_linears(gm, linears, f"{name}.qkv_proj")  # type: ignore[arg-type]
        if reason is None:
            outcome.accept()
        else:
            outcome.refuse(attention, reason)
    return outcome


PACK_QKV = GraphPass("pack_qkv", Level.EXACT, apply, saves="2 GEMM launches a layer")
