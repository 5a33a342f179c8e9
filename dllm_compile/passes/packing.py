# SPDX-License-Identifier: Apache-2.0
"""Packed weights that share storage with the user's parameters.

A pass plans a packing; `packed` carries it out. The packed tensor is made once and the parameters become views of it:
same objects, names and values, so the user's model still runs, trains and saves, in-place updates reach the compiled
programs, and memory is not doubled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .graph import aten, call, get_attr, lookup, restride, set_buffer

PLANS = "dllm_packings"


@dataclass(frozen=True)
class Packing:
    """Rows of `sources` stacked in `path` (attribute paths of the graph)."""

    path: str
    sources: tuple[str, ...]


def plan(gm: GraphModule, path: str, sources: tuple[str, ...]) -> None:
    """Plan a packing. Until it is carried out, a meta tensor of the right shape and dtype stands in."""
    parts = [lookup(gm, source) for source in sources]
    rows = sum(part.shape[0] for part in parts)
    set_buffer(gm, path, parts[0].new_empty((rows, *parts[0].shape[1:]), device="meta"))
    gm.meta.setdefault(PLANS, []).append(Packing(path, sources))


def plans(gm: GraphModule) -> tuple[Packing, ...]:
    """The packings planned so far."""
    return tuple(gm.meta.get(PLANS, ()))


@contextmanager
def packed(gm: GraphModule) -> Iterator[None]:
    """Make the planned tensors and turn their sources into views of them, one packing at a time.

    When the block raises, parameters that were turned into views here get storage of their own again; those of an
    earlier packing are left to whoever uses it.
    """
    moved: list[Tensor] = []
    try:
        for packing in plans(gm):
            _carry_out(gm, packing, moved)
        yield
    except BaseException:
        for part in moved:
            part.data = part.data.clone()
        raise


def _carry_out(gm: GraphModule, packing: Packing, moved: list[Tensor]) -> None:
    parts = [lookup(gm, source) for source in packing.sources]
    whole = _already_packed(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        offset = 0
        for part in parts:
            part.data = whole[offset : offset + part.shape[0]]
            moved.append(part)
            offset += part.shape[0]
    set_buffer(gm, packing.path, whole)


def _already_packed(parts: list[Tensor]) -> Tensor | None:
    """The packed tensor when `parts` already lie one after the other in one storage (a second `optimize`)."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != offset or not part.is_contiguous():
            return None
        offset += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def merge_linears(gm: GraphModule, linears: list[Node], path: str) -> str | None:
    """Replace linears of one input by one linear and a split; says why where that is not possible."""
    first = linears[0]
    if any(node.args[0] is not first.args[0] for node in linears):
        return "the projections do not read the same input"
    operands = [[node.args[1] for node in linears]]
    biases = [node.args[2] if len(node.args) > 2 else None for node in linears]
    if any(bias is not None for bias in biases):
        if any(bias is None for bias in biases):
            return "some of the projections have a bias and some have none"
        operands.append(biases)
    if any(operand.op != "get_attr" for group in operands for operand in group):  # type: ignore[union-attr]
        return "a weight is computed, not stored"
    sources = [tuple(str(operand.target) for operand in group) for group in operands]  # type: ignore[union-attr]
    taken = [id(lookup(gm, source)) for packing in plans(gm) for source in packing.sources]
    taken += [id(lookup(gm, source)) for group in sources for source in group]
    # A parameter can be a view of one packed tensor only.
    if len(set(taken)) < len(taken):
        return "a weight is shared with another projection"
    path = _free(gm, path)
    operands = []
    for kind, group in zip(("weight", "bias"), sources, strict=False):
        plan(gm, f"{path}.{kind}", group)
        operands.append(_planned(gm, f"{path}.{kind}", group, before=first))
    merged = call(gm, aten.linear.default, (first.args[0], *operands), like=first)
    sizes = [int(node.meta["val"].shape[-1]) for node in linears]
    split = call(gm, aten.split_with_sizes.default, (merged, sizes, -1), like=first)
    parts = [call(gm, getitem, (split, index), like=first) for index in range(len(linears))]
    for node, part in zip(linears, parts, strict=True):
        node.replace_all_uses_with(part)
    # The parts are views of the packed rows: what reads them may have other strides now.
    restride(gm, parts)
    return None


def _free(gm: GraphModule, path: str) -> str:
    """`path`, or that with a number behind it where the graph module has something there."""
    used = {packing.path.rpartition(".")[0] for packing in plans(gm)}
    used |= {name for name, _ in gm.named_modules()}
    number = 2
    free = path
    while free in used:
        free, number = f"{path}_{number}", number + 1
    return free


def _planned(gm: GraphModule, path: str, sources: tuple[str, ...], before: Node) -> Node:
    node = get_attr(gm, path, before)
    value = node.meta["val"]
    device = lookup(gm, sources[0]).device
    with value.fake_mode:
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return node
