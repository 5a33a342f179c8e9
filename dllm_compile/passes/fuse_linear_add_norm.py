# SPDX-License-Identifier: Apache-2.0
"""A projection back to the residual stream, the residual add and the norm behind it become one operator.

    sum = add(r, linear(x, W));  y = rms_norm(sum, w, eps)
    =>  sum, y = linear_add_rms_norm(x, W, r, w, eps)

    sum, codes, scales = add_rms_norm_quant(linear(x, W), r, w, eps, group)
    =>  sum, codes, scales = linear_add_rms_norm_quant(x, W, r, w, eps, group)

    sum = add(r, fp8_linear(codes, scales, W, S));  y = rms_norm(sum, w, eps)
    =>  sum, y = fp8_linear_add_rms_norm(codes, scales, W, S, r, w, eps)

Anchors: `dllm::rms_norm` behind an add, and `dllm::add_rms_norm_quant`. The operator may split a product over K and
leave the partial sums to the norm: for few rows neither the output projection nor the down projection has tiles for a
whole card, and only a consumer that adds the parts makes splitting pay. The number of parts depends on the rows and
never shows in the graph.

The last layer of a step is like the others: its rows are selected in front of the output projection, so that the down
projection takes the final norm with it. Left alone: products with a bias, products that something else reads, and one
in front of rows that are selected first (LaCache in a layer behind the first). Runs last. In fp32 exact; in lower
precision the product is not rounded before it is added.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from .framework import GraphPass, Level, Outcome
from .fuse_quantization import is_residual_add, summands
from .graph import aten, call, find, get_attr, is_call


def apply(gm: GraphModule) -> Outcome:
    """Fuse every such chain of a row program."""
    outcome = Outcome()
    ops = torch.ops.dllm
    for quant in find(gm, ops.add_rms_norm_quant.default):
        fresh, residual, *rest = quant.args
        if _is_plain(fresh):
            args = (*fresh.args[:2], residual, *rest)
            fused = call(gm, ops.linear_add_rms_norm_quant.default, args, like=quant)
            quant.replace_all_uses_with(fused)
            outcome.accept()
    for norm in find(gm, ops.rms_norm.default):
        if _fuse(gm, norm):
            outcome.accept()
    return outcome


def _fuse(gm: GraphModule, norm: Node) -> bool:
    add, weight, eps = norm.args
    if not is_residual_add(add) or weight.op != "get_attr" or add.meta["val"].dim() != 2:
        return False
    residual, fresh = summands(add)
    if not _is_plain(fresh) and not _is_quantized(fresh):
        return False
    # In front of the add, whose users may come before the norm.
    scale = get_attr(gm, str(weight.target), add)
    if _is_quantized(fresh):
        operator, operands = torch.ops.dllm.fp8_linear_add_rms_norm.default, fresh.args[:4]
    else:
        operator, operands = torch.ops.dllm.linear_add_rms_norm.default, fresh.args[:2]
    both = call(gm, operator, (*operands, residual, scale, eps), like=norm, before=add)
    total, normed = (call(gm, getitem, (both, i), like=norm, before=add) for i in range(2))
    norm.replace_all_uses_with(normed)
    add.replace_all_uses_with(total)
    return True


def _is_plain(node: Any) -> bool:
    """Whether `node` is a linear layer without a bias that one call reads."""
    if not is_call(node, aten.linear.default) or len(node.users) != 1:
        return False
    return len(node.args) < 3 or node.args[2] is None


def _is_quantized(node: Any) -> bool:
    return is_call(node, torch.ops.dllm.fp8_linear.default) and len(node.users) == 1


FUSE_LINEAR_ADD_NORM = GraphPass(
    "fuse_linear_add_norm",
    Level.EXACT,
    apply,
    saves="a pass over the rows a projection, and lets few rows split it over K",
)
