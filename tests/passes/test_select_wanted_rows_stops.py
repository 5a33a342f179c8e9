# SPDX-License-Identifier: Apache-2.0
"""`select_wanted_rows` in layers of other kinds: what it moves through and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from dllm_compile.passes import flatten_rows_pass
from dllm_compile.passes.graph import aten, call, find, get_attr, output_node, set_buffer, share
from dllm_compile.passes.graph import target_name as name_of
from dllm_compile.passes.select_wanted_rows import select_wanted_rows_pass

from .fp8_pieces import wide
from .pieces import apply, mini, normalized
from .wanted_pieces import GUIDANCE, UNCONDITIONAL, WANTED, close, run, selected

OPS = torch.ops.dllm
FLAT = flatten_rows_pass(0)
SELECT = select_wanted_rows_pass(guided=False)


@pytest.mark.parametrize(
    "options",
    [
        {"ffn_kind": "chunked"},
        {"ffn_kind": "swapped"},
        {"ffn_kind": "gelu"},
        {"ffn_kind": "one projection"},
        {"ffn_kind": "two inputs"},
        {"head": "tied"},
        {"head": "scaled"},
        {"qk_norm": True},
        {"bias": "gate up"},
        {"norm": "late cast"},
    ],
    ids=str,
)
def test_other_feed_forward_parts(options):
    """No form of a layer is looked for: parts that no pass has normalized move as well."""
    _, gm = mini(**options)
    normalized(gm, strict=False)
    apply(gm, FLAT)
    fewer = share(gm)
    apply(fewer, SELECT)
    assert [node.target for node in selected(fewer)] == [OPS.row_attention.default, aten.add.Tensor]
    close(run(fewer), run(gm)[WANTED])


@pytest.mark.parametrize("changes", [{"include_bias": True, "weight_tying": True}, {"weight_tying": True}], ids=str)
def test_biases_and_tied_weights(changes):
    _, gm, layers = wide(**changes)
    apply(gm, FLAT, layers=layers)
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    assert selected(fewer)[0].target is OPS.row_attention.default
    assert len(selected(fewer)) == 2
    close(run(fewer), run(gm)[WANTED])


# --- where it stops -------------------------------------------------------------------------------------------------


def _also_returned(gm: GraphModule, *nodes: Node) -> None:
    end = output_node(gm)
    end.args = ((end.args[0], *nodes),)
    gm.recompile()


def _in_last_layer(gm: GraphModule, target: Any) -> Node:
    return find(gm, target)[-1]


READ_ELSEWHERE: dict[str, tuple[Callable[[GraphModule], Node], list[str]]] = {
    # The value that something else reads, and what wanted rows are taken of then.
    "stream": (lambda gm: _in_last_layer(gm, aten.add.Tensor), ["aten.add"]),
    "activation": (lambda gm: _in_last_layer(gm, OPS.swiglu.default), ["aten.add", "dllm.swiglu"]),
    # One half of a split: the other half needs the split as it is.
    "half of the packed product": (
        lambda gm: _in_last_layer(gm, OPS.swiglu.default).args[0],
        ["aten.add", "getitem", "getitem"],
    ),
    "attention": (lambda gm: _in_last_layer(gm, OPS.row_attention.default), ["dllm.row_attention", "aten.add"]),
    "last norm": (lambda gm: _in_last_layer(gm, OPS.rms_norm.default), ["dllm.rms_norm"]),
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
@pytest.mark.parametrize("guided", [False, True], ids=["", "guided"])
def test_a_value_that_is_read_elsewhere_is_computed_for_all_rows(name, guided):
    read, expected = READ_ELSEWHERE[name]
    _, gm, layers = wide()
    apply(gm, FLAT, layers=layers)
    _also_returned(gm, read(gm))
    fewer = share(gm)
    apply(fewer, select_wanted_rows_pass(guided), layers=layers)
    assert sorted(name_of(node) for node in selected(fewer)) == sorted(expected)
    (every, theirs), (actual, mine) = run(gm), run(fewer)
    assert torch.equal(mine, theirs)
    wanted, other = every[WANTED], every[UNCONDITIONAL]
    close(actual, other + (GUIDANCE + 1) * (wanted - other) if guided else wanted)


def _before_the_last_norm(gm: GraphModule, make: Callable[[Node, Node], Node]) -> None:
    norm = _in_last_layer(gm, OPS.rms_norm.default)
    stream = norm.args[0]
    norm.replace_input_with(stream, make(stream, norm))
    gm.recompile()


@pytest.mark.parametrize("shape", [(128,), (1, 128), (), (1,)], ids=str)
def test_operands_that_are_the_same_for_all_rows(shape):
    """They are not selected: only what has rows is."""
    _, gm, layers = wide()
    apply(gm, FLAT, layers=layers)
    set_buffer(gm, "factor", torch.randn(shape) + 2)

    def scaled(stream: Node, norm: Node) -> Node:
        factor = get_attr(gm, "factor", norm)
        doubled = call(gm, aten.add.Tensor, (factor, factor), like=norm)
        return call(gm, aten.mul.Tensor, (doubled, stream), like=norm)

    _before_the_last_norm(gm, scaled)
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    assert [node.target for node in selected(fewer)] == [OPS.row_attention.default, aten.add.Tensor]
    close(run(fewer), run(gm)[WANTED])


STOPS: dict[str, Callable[[GraphModule, Node, Node], Node]] = {
    "sum over rows": lambda gm, x, norm: call(gm, aten.cumsum.default, (x, 0), like=norm),
    "other rows": lambda gm, x, norm: call(gm, aten.flip.default, (x, [0]), like=norm),
    "rows cut off": lambda gm, x, norm: call(gm, aten.slice.Tensor, (x, 0, 0), like=norm),
    "random": lambda gm, x, norm: call(gm, aten.bernoulli.p, (x, 1.0), like=norm),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_is_not_row_by_row_stops_the_selection(name):
    _, gm, layers = wide()
    apply(gm, FLAT, layers=layers)
    _before_the_last_norm(gm, lambda x, norm: STOPS[name](gm, x, norm))
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    (stop,) = selected(fewer)
    assert stop.target in (aten.cumsum.default, aten.flip.default, aten.slice.Tensor, aten.bernoulli.p)
    close(run(fewer), run(gm)[WANTED])


def test_columns_cut_off_move():
    """The same operator along columns works row by row."""
    _, gm, layers = wide()
    apply(gm, FLAT, layers=layers)
    _before_the_last_norm(gm, lambda x, norm: call(gm, aten.slice.Tensor, (x, 1, 0), like=norm))
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    assert [node.target for node in selected(fewer)] == [OPS.row_attention.default, aten.add.Tensor]
    close(run(fewer), run(gm)[WANTED])
