# SPDX-License-Identifier: Apache-2.0
"""The gate and up projections of a layer become one.

    swiglu(linear(x, W_gate), linear(x, W_up))  =>  swiglu(*split(linear(x, W_gate_up), [F, F]))

Anchor: `dllm::swiglu`. Refused: projections of different inputs, a bias on one only, shared weights.
Saves one GEMM launch a layer; the packed weight shares storage with the two parameters.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from .framework import GraphPass, Level, Outcome
from .graph import aten, find, is_call
from .packing import merge_linears


def apply(gm: GraphModule) -> Outcome:
    """Pack the projections of every feed-forward layer of `gm`."""
    outcome = Outcome()
    for swiglu in find(gm, torch.ops.dllm.swiglu.default):
        gate, up = swiglu.args
        if not is_call(gate, aten.linear.default) or not is_call(up, aten.linear.default):
            outcome.refuse(swiglu, "gate and up are not both linear layers")
            continue
        name = str(gate.args[1].target).rsplit(".", 2)[0]  # type: ignore[union-attr]
        reason = merge_linears(gm, [gate, up], f"{name}.gate_up_proj")  # type: ignore[list-item]
        if reason is None:
            outcome.accept()
        else:
            outcome.refuse(swiglu, reason)
    return outcome


PACK_GATE_UP = GraphPass("pack_gate_up", Level.EXACT, apply, saves="1 GEMM launch a layer")
