# SPDX-License-Identifier: Apache-2.0
"""Activations are quantized where they are made.

    sum = add(r, y);  quantized_linear(rms_norm(sum, w, eps), W)
    =>  sum, codes, scales = add_rms_norm_quant(y, r, w, eps);  fp8_linear(codes, scales, W)

    quantized_linear(swiglu(gate, up), W)
    =>  codes, scales = swiglu_quant(gate, up);  fp8_linear(codes, scales, W)

    quantized_linear(x, W)
    =>  codes, scales = quantize(x);  fp8_linear(codes, scales, W)           (any other x)

Anchor: `dllm::quantized_linear` in a row program, where rows are one axis. All products of one input share its codes.
The norm or the activation in full precision is not stored, unless something else reads it, and then it is quantized by
itself. Runs when rows are selected and caches are in place: those look for adds and norms. Exact: the same operations
in the same order (LaCache, section 3.4).
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, find, get_attr, is_call


def apply(gm: GraphModule) -> Outcome:
    """Rewrite every quantized linear layer of a row program."""
    outcome = Outcome()
    products: dict[tuple[Node, int], list[Node]] = {}
    for node in find(gm, torch.ops.dllm.quantized_linear.default):
        products.setdefault((node.args[0], node.args[3]), []).append(node)
    for (x, group), users in products.items():
        if x.meta["val"].dim() != 2:
            outcome.refuse(users[0], "its input is a batch of sequences, not rows (no row program could be made)")
            continue
        codes, scales = _quantized(gm, x, group, users)
        for user in users:
            weights = user.args[1:3]
            args = (codes, scales, *weights, x.meta["val"].dtype)
            user.replace_all_uses_with(call(gm, torch.ops.dllm.fp8_linear.default, args, like=user))
            gm.graph.erase_node(user)
            outcome.accept()
    return outcome


def _quantized(gm: GraphModule, x: Node, group: int, users: list[Node]) -> tuple[Node, Node]:
    """Codes and scales of `x`, made with it where nothing else reads it."""
    ops = torch.ops.dllm
    alone = len(x.users) == len(users)
    if alone and is_call(x, ops.swiglu.default):
        both = call(gm, ops.swiglu_quant.default, (*x.args, group), like=x)
        return _parts(gm, both, x)
    add, weight = x.args[:2] if is_call(x, ops.rms_norm.default) else (None, None)
    if alone and is_residual_add(add) and weight.op == "get_attr":
        # In front of the add, whose users may come before the norm.
        residual, fresh = summands(add)
        scale = get_attr(gm, str(weight.target), add)
        args = (fresh, residual, scale, x.args[2], group)
        all_three = call(gm, ops.add_rms_norm_quant.default, args, like=x, before=add)
        total, codes, scales = _parts(gm, all_three, add)
        add.replace_all_uses_with(total)
        return codes, scales
    after = x.next if x.op == "call_function" else users[0]
    return _parts(gm, call(gm, ops.quantize.default, (x, group), like=users[0], before=after), after)


def _parts(gm: GraphModule, several: Node, before: Node) -> tuple[Node, ...]:
    """The outputs of a call that returns several."""
    count = len(several.meta["val"])
    return tuple(call(gm, getitem, (several, i), like=several, before=before) for i in range(count))


def is_residual_add(node: Any) -> bool:
    """Whether `node` adds two tensors of one shape, as a residual connection does."""
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return False
    first, second = node.args[:2]
    if not isinstance(first, Node) or not isinstance(second, Node):
        return False
    shapes = first.meta["val"].shape, second.meta["val"].shape
    return len(shapes[0]) == len(shapes[1]) and all(statically_known_true(a == b) for a, b in zip(*shapes, strict=True))


def summands(add: Node) -> tuple[Node, Node]:
    """The residual stream and what is added to it; of two products the later one is added."""
    first, second = add.args[:2]
    products = (aten.linear.default, torch.ops.dllm.quantized_linear.default, torch.ops.dllm.fp8_linear.default)
    if is_call(first, *products) and not is_call(second, *products):
        return second, first
    return first, second


FUSE_QUANTIZATION = GraphPass(
    "fuse_quantization", Level.EXACT, apply, saves="the inputs of FP8 products in full precision"
)
