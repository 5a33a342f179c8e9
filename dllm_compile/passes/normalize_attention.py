# SPDX-License-Identifier: Apache-2.0
r"""Head split, rotation and attention become `dllm::rope` (q, k) and `dllm::attention`.

    linear q -> view -> transpose -> [f32] -> t*cos + rotate(t)*sin -> [back] -\
    linear k -> the same with its own table slices -> [repeat_interleave] ------> SDPA -> transpose -> view
    linear v -> view -> transpose -> [repeat_interleave] ----------------------/
    =>  q = dllm.rope(linear q, cos, sin, positions, H);  k = dllm.rope(linear k, ..., H_kv)
        dllm.attention(q, k, v.view)

Anchor: the attention node; q, k and v are told apart by its arguments, never by shape. The walk stops at linears and
at norms (QK-norm sits between the two). Sine and cosine tables are told apart by value: row 0 of the sine is zero.
Refused: a mask, causal attention or a scale of its own; no rotation; tables that are not fp32; a rotation in low
precision or of another layout (the certificate finds it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..certify import deviation, evaluate, random_like
from .framework import GraphPass, Level, Outcome, Reason
from .graph import (
    CASTS,
    VIEWS,
    aten,
    attribute,
    backward_slice,
    call,
    data_inputs,
    find,
    get_attr,
    is_biased_norm,
    is_call,
    lookup,
    placeholders,
    replace,
    set_buffer,
    skip_down,
)

SDPA = aten.scaled_dot_product_attention.default
COS, SIN = "rope_cos", "rope_sin"
_PLAIN = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


@dataclass(frozen=True)
class _Region:
    output: Node
    q: Node
    k: Node
    v: Node
    heads: int
    kv_heads: int
    cos: Node
    sin: Node


def _is_projection(node: Node) -> bool:
    return is_call(node, aten.linear.default, torch.ops.dllm.rms_norm.default) or is_biased_norm(node)


def _source(head: Node) -> tuple[Node, list[Node]] | Reason:
    """The one projection that `head` is computed from, and the tables on the way."""
    region = backward_slice((head,), _is_projection)
    inputs = {source for node in (region or [head]) for source in data_inputs(node) if source not in region}
    projections = [node for node in inputs if _is_projection(node)]
    if len(projections) != 1:
        return Reason(f"a head is computed from {len(projections)} projections instead of one")
    tables = [node for node in inputs if node.op == "get_attr"]
    return projections[0], tables


def _told_apart(gm: GraphModule, tables: list[Node]) -> tuple[Node, Node] | Reason:
    """(cos, sin) of two table nodes."""
    if len(tables) != 2 or any(attribute(gm, node).dim() < 2 for node in tables):
        return Reason(f"{len(tables)} tables instead of a cosine and a sine: not a rotary embedding with stored tables")
    if any(attribute(gm, node).dtype != torch.float32 for node in tables):
        return Reason("the rotary tables are not fp32")
    sines = [node for node in tables if not attribute(gm, node).flatten(0, -2)[0].any()]
    if len(sines) != 1:
        return Reason("the tables are not one cosine and one sine")
    cos = tables[0] if sines[0] is tables[1] else tables[1]
    return cos, sines[0]


def _match(gm: GraphModule, sdpa: Node) -> _Region | Reason:
    options = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), sdpa.args[3:], strict=False)), **sdpa.kwargs}
    wrong = [name for name, value in options.items() if name in _PLAIN and value != _PLAIN[name]]
    if wrong:
        return Reason(f"attention is called with {', '.join(wrong)}")
    sources = [_source(node) for node in sdpa.args[:3]]  # type: ignore[arg-type]
    for source in sources:
        if isinstance(source, Reason):
            return source
    (q, q_tables), (k, k_tables), (v, v_tables) = sources  # type: ignore[misc]
    if set(q_tables) != set(k_tables) or v_tables:
        return Reason("q and k are not rotated by the same tables, or v is rotated too")
    tables = _told_apart(gm, q_tables)
    if isinstance(tables, Reason):
        return tables
    # Export drops the copy of `.contiguous()` where the traced strides make it one; both forms occur.
    output = skip_down(sdpa, VIEWS | CASTS)
    q_value, width = sdpa.args[0].meta["val"], k.meta["val"].shape[-1]  # type: ignore[union-attr]
    head_size = int(q_value.shape[-1])
    if width % head_size or output.meta["val"].dim() != 3:
        return Reason("heads are not merged back into rows")
    return _Region(output, q, k, v, int(q_value.shape[1]), int(width) // head_size, *tables)


def _shared_table(gm: GraphModule, node: Node, path: str, device: torch.device) -> Tensor | Reason:
    """The model's one table of this kind as [T, hd] under `path`; a second, different table is refused."""
    source = attribute(gm, node)
    if hasattr(gm, path):
        table = lookup(gm, path)
        if table.data_ptr() != source.data_ptr() and not torch.equal(table, source.flatten(0, -2).to(device)):
            return Reason("this layer has rotary tables of its own")
        return table
    # A table made on the CPU follows a moved model in its first forward only, or never.
    table = source.detach().flatten(0, -2).to(device)
    set_buffer(gm, path, table)
    return table


def _canonical(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, region: _Region) -> Tensor:
    ops = torch.ops.dllm
    positions = torch.arange(q.shape[1], device=q.device)
    rotated_q = ops.rope(q, cos, sin, positions, region.heads)
    rotated_k = ops.rope(k, cos, sin, positions, region.kv_heads)
    return ops.attention(rotated_q, rotated_k, v.unflatten(-1, (region.kv_heads, -1)))


def _positions(gm: GraphModule, like: Node) -> Node:
    """`arange(T)`, made once."""
    ids = placeholders(gm)[0]
    for node in find(gm, aten.arange.default):
        if node.meta.get("dllm_positions"):
            return node
    sizes = [node for node in find(gm, aten.sym_size.int) if node.args == (ids, 1)]
    anchor = sizes[0].next if sizes else ids.next
    length = sizes[0] if sizes else call(gm, aten.sym_size.int, (ids, 1), like=anchor)
    node = call(gm, aten.arange.default, (length,), like=anchor)
    node.kwargs = {"device": like.meta["val"].device}
    node.meta["dllm_positions"] = True
    node.meta["val"] = node.meta["val"].to(like.meta["val"].device)
    node.meta.pop("nn_module_stack", None)
    return node


def apply(gm: GraphModule) -> Outcome:
    """Rewrite every attention of `gm`."""
    outcome = Outcome()
    ops = torch.ops.dllm
    for sdpa in find(gm, SDPA):
        region = _match(gm, sdpa)
        if isinstance(region, Reason):
            outcome.refuse(sdpa, region)
            continue
        device = region.q.meta["val"].device
        cos, sin = _shared_table(gm, region.cos, COS, device), _shared_table(gm, region.sin, SIN, device)
        if isinstance(cos, Reason) or isinstance(sin, Reason):
            outcome.refuse(sdpa, str(cos if isinstance(cos, Reason) else sin))
            continue
        q, k, v = (random_like(node, seed) for seed, node in enumerate((region.q, region.k, region.v)))
        (expected,) = evaluate(gm, (region.output,), {region.q: q, region.k: k, region.v: v})
        error = deviation(expected, _canonical(q, k, v, cos, sin, region))
        if error:
            outcome.refuse(sdpa, f"computes something else than rope and attention (differs by {error:.1e})")
            continue
        positions = _positions(gm, like=sdpa)
        tables = (get_attr(gm, COS, before=sdpa), get_attr(gm, SIN, before=sdpa))
        rotated_q = call(gm, ops.rope.default, (region.q, *tables, positions, region.heads), like=sdpa)
        rotated_k = call(gm, ops.rope.default, (region.k, *tables, positions, region.kv_heads), like=sdpa)
        head_size = region.v.meta["val"].shape[-1] // region.kv_heads
        split = call(gm, aten.unflatten.int, (region.v, -1, [region.kv_heads, head_size]), like=sdpa)
        merged = call(gm, ops.attention.default, (rotated_q, rotated_k, split), like=sdpa)
        replace(region.output, merged)
        outcome.accept(error)
    return outcome


NORMALIZE_ATTENTION = GraphPass("normalize_attention", Level.EXACT, apply, required=lambda layers: layers)
