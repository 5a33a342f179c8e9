# SPDX-License-Identifier: Apache-2.0
"""The gated activation becomes `dllm::swiglu`.

    linear(h, W_gate) -> silu -> mul(., linear(h, W_up)) -> linear(., W_down)
    =>  dllm.swiglu(gate, up)

Anchor: `silu`. Refused: a gate or partner that is no `linear` of one common input (chunked SwiGLU), a result that does
not feed a `linear`, and a region that differs from the operator by a single bit.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..certify import deviation, evaluate, random_like
from .framework import GraphPass, Level, Outcome, Reason
from .graph import aten, call, find, is_call, replace


def _match(silu: Node) -> tuple[Node, Node, Node] | Reason:
    """(product, gate, up) of the activation around a `silu`."""
    gate = silu.args[0]
    if not is_call(gate, aten.linear.default):
        return Reason("the gate is not the output of a linear layer (a chunked SwiGLU?)")
    if len(silu.users) != 1 or not is_call(product := next(iter(silu.users)), aten.mul.Tensor):
        return Reason("the activation is not multiplied by a second projection")
    up = product.args[1] if product.args[0] is silu else product.args[0]
    if not is_call(up, aten.linear.default) or up.args[0] is not gate.args[0]:
        return Reason("gate and up projections do not read the same input")
    if len(product.users) != 1 or not is_call(next(iter(product.users)), aten.linear.default):
        return Reason("the product does not feed a down projection")
    return product, gate, up


def apply(gm: GraphModule) -> Outcome:
    """Rewrite every gated activation of `gm`."""
    outcome = Outcome()
    operator = torch.ops.dllm.swiglu.default
    for anchor in find(gm, aten.silu.default):
        match = _match(anchor)
        if isinstance(match, Reason):
            outcome.refuse(anchor, match)
            continue
        product, gate, up = match
        sample = {gate: random_like(gate, 1), up: random_like(up, 2)}
        (expected,) = evaluate(gm, (product,), sample)
        error = deviation(expected, operator(sample[gate], sample[up]))
        if error:
            outcome.refuse(anchor, f"computes something else than silu(gate) * up (differs by {error:.1e})")
            continue
        replace(product, call(gm, operator, (gate, up), like=anchor, before=product))
        outcome.accept(error)
    return outcome


NORMALIZE_SWIGLU = GraphPass("normalize_swiglu", Level.EXACT, apply, required=lambda layers: layers)
