# SPDX-License-Identifier: Apache-2.0
"""Linear layers multiply in FP8: those of the feed-forward part, or all but the head.

    linear(x, W)  =>  quantized_linear(x, W_codes, W_scales, group)

Anchors: `dllm::swiglu` for gate, up (packed or not) and down; with `all`, `dllm::attention` for q, k, v and the output
projection. A region is a layer's feed-forward part or its attention: it is rewritten as a whole or not at all. A bias
is added behind the product. `fuse_quantization` moves the quantization of the input to where that input is made.

Every product is run against the original on the activations of a random batch; the error is kept in the result.
Refused, with the reason: widths that the groups do not divide, a weight that is computed, an error beyond what FP8
explains, and layers in which no such region was found.

Saves half of the bytes of the weights and, from some rows on, half of the time of the products. Numeric: another
rounding (LaCache, section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..certify import decibels, observe, relative_error
from ..fp8_weights import add_quantized, quantize_weight
from .framework import GraphPass, Level, Outcome, Reason, RegionError
from .graph import aten, attribute, call, find, get_attr, is_biased_norm, is_call, replace

Linears = Literal["ffn", "all"]

SQNR_BOUND = 20.0
"""Decibels that a product must keep. E4M3 rounds to 3 bits behind the leading one, 2.6 % of a value on average: two
such operands give 28.7 dB. Less than 20 dB, an error of 10 %, means that few values dwarf the others of their group."""


def quantize_ffn_fp8(gm: GraphModule, group: int, skip: Sequence[int], linears: Linears) -> Outcome:
    """Rewrite the layers of a canonical graph that are not in `skip`; weights must be in place."""
    outcome = Outcome()
    chosen: list[tuple[Node, list[Node]]] = []
    for number, layer in enumerate(_layers(gm)):
        if number in skip:
            continue
        regions = [_feed_forward(layer)] if linears == "ffn" else [_attention(layer[0]), _feed_forward(layer)]
        for region in regions:
            reason = region if isinstance(region, Reason) else _unfit(gm, region, group)
            if reason is not None:
                outcome.refuse(layer[0] if isinstance(region, Reason) else region[0], reason)
            else:
                chosen.append((region[0], region))
    products = [linear for _, region in chosen for linear in region]
    # An earlier region's rewrite must not show in a later one's measurement: everything is observed beforehand.
    inputs: list[Node] = [linear.args[0] for linear in products]  # type: ignore[misc]
    seen = observe(gm, [*products, *inputs]) if products else {}
    for anchor, region in chosen:
        _quantize(gm, anchor, region, group, seen, outcome)
    return outcome


def _layers(gm: GraphModule) -> list[list[Node]]:
    """Calls of each layer: its attention, in canonical form or not, and what follows up to the next one."""
    attentions = find(gm, torch.ops.dllm.attention.default, aten.scaled_dot_product_attention.default)
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    swiglus = find(gm, torch.ops.dllm.swiglu.default)
    layers = []
    for attention, following in zip(attentions, [*attentions[1:], None], strict=True):
        end = len(order) if following is None else order[following]
        layers.append([attention, *(node for node in swiglus if order[attention] < order[node] < end)])
    return layers


def _feed_forward(layer: list[Node]) -> list[Node] | Reason:
    """Gate and up (one node where they are packed) and down."""
    if len(layer) != 2:
        return Reason(f"the layer has {len(layer) - 1} gated feed-forward parts in canonical form, not one")
    swiglu = layer[1]
    inner = _linears_above(swiglu.args)
    outer = [user for user in swiglu.users if is_call(user, aten.linear.default)]
    if inner is None or len(outer) != len(swiglu.users) or len(outer) != 1:
        return Reason("the gated activation does not stand between linear layers")
    return [*inner, *outer]


def _attention(attention: Node) -> list[Node] | Reason:
    """The projections (one node where they are packed) and the output projection."""
    if not is_call(attention, torch.ops.dllm.attention.default):
        return Reason("the attention is not in canonical form")
    inner = _linears_above(attention.args[:3])
    outer = [user for user in attention.users if is_call(user, aten.linear.default)]
    if inner is None or len(outer) != len(attention.users) or len(outer) != 1:
        return Reason("the attention does not stand between linear layers")
    if len(outer[0].args) > 2 and outer[0].args[2] is not None:
        # It would be added by itself, and passes behind take the add next to an attention for the residual one.
        return Reason("the output projection has a bias")
    return [*inner, *outer]


def _linears_above(nodes: Iterable[Any]) -> list[Node] | None:
    """The linear layers that heads, a gate, or parts of a packed product come from, each once."""
    ops = torch.ops.dllm
    between = (getitem, aten.split_with_sizes.default, aten.unflatten.int, ops.rope.default, ops.rms_norm.default)
    found: dict[Node, None] = {}
    for node in nodes:
        while is_call(node, *between) or is_biased_norm(node):
            node = node.args[0]
        if not is_call(node, aten.linear.default):
            return None
        found[node] = None
    return list(found)


def _unfit(gm: GraphModule, region: list[Node], group: int) -> Reason | None:
    """Why a region's weights cannot be quantized, by shape."""
    width = group if group > 0 else 16  # what a group covers, else what FP8 products are made for
    for linear in region:
        weight = linear.args[1]
        if not isinstance(weight, Node) or weight.op != "get_attr":
            return Reason("a weight is computed, not stored")
        rows, columns = attribute(gm, weight).shape
        # Both halves of a packed gate and up become rows of the down projection's input.
        if rows % width or columns % width:
            return Reason(f"a weight of {rows} x {columns} does not divide into groups of {width}")
    return None


def _quantize(
    gm: GraphModule, anchor: Node, region: list[Node], group: int, seen: dict[Node, Tensor], outcome: Outcome
) -> None:
    """Measure a region and rewrite it where every product keeps enough."""
    operator = torch.ops.dllm.quantized_linear.default
    made: list[tuple[Tensor, Tensor]] = []
    errors = []
    for linear in region:
        x, weight, *bias = linear.args
        codes, scales = quantize_weight(attribute(gm, weight), group)
        actual = operator(seen[x], codes, scales, group)
        if bias and bias[0] is not None:
            actual = actual + attribute(gm, bias[0])
        error = relative_error(seen[linear], actual)
        name = str(weight.target).removesuffix(".weight")
        errors.append(RegionError(name, error, decibels(error)))
        made.append((codes, scales))
    worst = min(errors, key=lambda one: one.sqnr)
    if worst.sqnr < SQNR_BOUND:
        outcome.refuse(
            anchor, f"{worst.where} keeps {worst.sqnr:.1f} dB of its output in FP8, less than {SQNR_BOUND:.0f}"
        )
        return
    for linear, (codes, scales) in zip(region, made, strict=True):
        x, weight, *bias = linear.args
        stored = add_quantized(gm, str(weight.target), group, codes, scales)
        operands = (get_attr(gm, stored.codes, linear), get_attr(gm, stored.scales, linear))
        product = call(gm, operator, (x, *operands, group), like=linear)
        if bias and bias[0] is not None:
            product = call(gm, aten.add.Tensor, (product, bias[0]), like=linear)
        replace(linear, product)
    outcome.regions += errors
    outcome.accept(worst.error)


def quantize_ffn_fp8_pass(group: int, skip: Sequence[int], linears: Linears, *, required: bool) -> GraphPass:
    """The pass for a granularity and a set of layers.

    Args:
        group: 128, 0 or -1 (see `QuantizedWeight`).
        skip: layers that stay as they are, from 0.
        linears: which linear layers.
        required: whether every layer that is not skipped must fit.
    """
    skip = tuple(skip)

    def count(layers: int) -> int:
        return (layers - len(skip)) * (2 if linears == "all" else 1)

    return GraphPass(
        "quantize_ffn_fp8",
        Level.NUMERIC,
        lambda gm: quantize_ffn_fp8(gm, group, skip, linears),
        required=count if required else None,
        saves="half of the bytes of these weights",
    )
