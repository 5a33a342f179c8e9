# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms become `dllm::rms_norm`.

    x -> [_to_copy f32] -> pow 2 -> mean -> add eps -> rsqrt -> mul(x, .) -> [_to_copy] -> mul(weight, .)
    =>  dllm.rms_norm(x, weight, eps)

Anchor: `rsqrt`. The weight may be any function of parameters (Gemma's `1 + w` too). Refused: a norm without a weight,
a mean over other dimensions, inner values used elsewhere, and everything whose result differs from the operator's by
a single bit. Saves nothing by itself: it gives later passes one node to look for.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..certify import deviation, evaluate, random_like
from .framework import GraphPass, Level, Outcome, Reason
from .graph import CASTS, aten, call, depends_on_input, find, is_call, replace, skip


def _match(rsqrt: Node) -> tuple[Node, Node, Node, float] | Reason:
    """(output, x, weight, eps) of the norm around an `rsqrt`."""
    add = rsqrt.args[0]
    if not is_call(add, aten.add.Tensor) or not isinstance(add.args[1], float | int):
        return Reason("the root is not of a mean plus a constant")
    mean = add.args[0]
    if not is_call(mean, aten.mean.dim) or list(mean.args[1]) != [-1]:
        return Reason("the mean is not over the last dimension (a LayerNorm?)")
    square = mean.args[0]
    if not is_call(square, aten.pow.Tensor_Scalar) or square.args[1] != 2:
        return Reason("the mean is not of squares (a LayerNorm?)")
    wide = square.args[0]
    x = skip(wide, CASTS)
    if len(rsqrt.users) != 1:
        return Reason("the reciprocal root is used elsewhere")
    scaled = next(iter(rsqrt.users))
    if not is_call(scaled, aten.mul.Tensor) or wide not in scaled.args:
        return Reason("the reciprocal root does not scale its own input")
    narrow = scaled
    while len(narrow.users) == 1 and is_call(next(iter(narrow.users)), *CASTS):
        narrow = next(iter(narrow.users))
    if len(narrow.users) != 1 or not is_call(output := next(iter(narrow.users)), aten.mul.Tensor):
        return Reason("the scaled value is not multiplied by a weight")
    weight = output.args[0] if output.args[1] is narrow else output.args[1]
    if not isinstance(weight, Node) or depends_on_input(weight):
        return Reason("the weight is not a parameter")
    return output, x, weight, float(add.args[1])


def apply(gm: GraphModule) -> Outcome:
    """Rewrite every norm of `gm`."""
    outcome = Outcome()
    operator = torch.ops.dllm.rms_norm.default
    for anchor in find(gm, aten.rsqrt.default):
        match = _match(anchor)
        if isinstance(match, Reason):
            outcome.refuse(anchor, match)
            continue
        output, x, weight, eps = match
        sample = random_like(x)
        expected, parameter = evaluate(gm, (output, weight), {x: sample})
        error = deviation(expected, operator(sample, parameter, eps))
        if error:
            outcome.refuse(anchor, f"computes something else than rms_norm (differs by {error:.1e})")
            continue
        replace(output, call(gm, operator, (x, weight, eps), like=anchor, before=output))
        outcome.accept(error)
    return outcome


NORMALIZE_NORM = GraphPass("normalize_norm", Level.EXACT, apply, required=lambda layers: 2 * layers + 1)
