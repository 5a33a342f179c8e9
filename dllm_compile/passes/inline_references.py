# SPDX-License-Identifier: Apache-2.0
"""Operators without a kernel of their own are opened up for the compiler.

    dllm.rms_norm(x, w, eps)  =>  rms_norm_reference(x, w, eps)

An opaque operator is a wall to Inductor's fusion. Where no hand-written kernel stands behind it, the compiler does
better with the reference itself, which Dynamo traces through. Runs last, only before `torch.compile`; the graph
computes the same with or without it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ..kernels import INLINED
from .framework import GraphPass, Level, Outcome


def apply(gm: GraphModule) -> Outcome:
    """Point every call of an inlined operator at its reference."""
    outcome = Outcome()
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            reference = INLINED.get(node.target)
            if reference is not None:
                node.target = reference
                outcome.accept()
    return outcome


INLINE_REFERENCES = GraphPass(
    "inline_references", Level.EXACT, apply, saves="opaque calls: Inductor fuses what is inside"
)
