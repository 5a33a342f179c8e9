# SPDX-License-Identifier: Apache-2.0
"""The last linear layer becomes `dllm::head`.

    linear(x, W) -> [mul 1/sqrt(C)] -> output  =>  dllm.head(x, W, scale)

Anchor: the graph's output. Refused: a head with a bias, or with anything but a constant factor behind it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, is_call, output_node, replace


def apply(gm: GraphModule) -> Outcome:
    """Rewrite the head of `gm`."""
    outcome = Outcome()
    logits: Node = output_node(gm).args[0]  # type: ignore[assignment]
    linear, scale = logits, 1.0
    if is_call(logits, aten.mul.Tensor) and isinstance(logits.args[1], float | int):
        linear, scale = logits.args[0], float(logits.args[1])  # type: ignore[assignment]
    if not is_call(linear, aten.linear.default):
        outcome.refuse(logits, "the logits are not a linear layer's output times a constant")
    elif len(linear.args) > 2 and linear.args[2] is not None:
        outcome.refuse(linear, "the head has a bias")
    else:
        replace(logits, call(gm, torch.ops.dllm.head.default, (*linear.args[:2], scale), like=linear, before=logits))
        outcome.accept()
    return outcome


NORMALIZE_HEAD = GraphPass("normalize_head", Level.EXACT, apply, required=lambda layers: 1)
