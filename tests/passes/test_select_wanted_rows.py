# SPDX-License-Identifier: Apache-2.0
"""`select_wanted_rows`: where the selection ends up, that numbers stay, and what it saves."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from dllm_compile.costs import program_costs
from dllm_compile.passes import (
    INSERT_VERIFY,
    GraphPass,
    flatten_rows_pass,
    head_passes,
    insert_kv_cache_pass,
    insert_lacache_pass,
)
from dllm_compile.passes.framework import Level
from dllm_compile.passes.graph import aten, find, placeholders, share
from dllm_compile.passes.graph import target_name as name_of
from dllm_compile.passes.select_wanted_rows import select_wanted_rows_pass

from .fp8_pieces import quantize, wide
from .pieces import apply, count
from .wanted_pieces import (
    GUIDANCE,
    UNCONDITIONAL,
    WANTED,
    R,
    behind,
    calls,
    close,
    has_rows_of,
    inputs_of,
    run,
    selected,
)

OPS = torch.ops.dllm
FLAT = flatten_rows_pass(0)
SELECT = select_wanted_rows_pass(guided=False)

# What stands in front of the head, and the attention of the last of three layers.
INSERTED: dict[str, tuple[tuple[GraphPass, ...], str]] = {
    "step": ((), "row_attention"),
    "cached": ((insert_kv_cache_pass(),), "cached_attention"),
    "scored": ((insert_kv_cache_pass((1, 2)),), "row_attention_scored"),
    "verify": ((INSERT_VERIFY,), "verify_attention"),
    "lacache first": ((insert_lacache_pass((0,), "first"),), "row_attention"),
    "lacache step": ((insert_lacache_pass((0,), "step"),), "row_attention"),
    "lacache, all layers": ((insert_lacache_pass((0, 1, 2), "step"),), "facache_step"),
}
BEHIND_ATTENTION = [
    "aten.index_select", "aten.linear", "aten.index_select", "aten.add", "dllm.rms_norm", "aten.linear",
    "aten.split_with_sizes", "getitem", "getitem", "dllm.swiglu", "aten.linear", "aten.add", "dllm.rms_norm",
    "dllm.head",
]  # fmt: skip


def program(inserted: tuple[GraphPass, ...] = (), *, guided: bool = False) -> tuple[GraphModule, GraphModule]:
    """A program with all rows' logits, and the one with those of wanted rows."""
    _, gm, layers = wide()
    apply(gm, FLAT, *inserted, layers=layers)
    fewer = share(gm)
    (result,) = apply(fewer, select_wanted_rows_pass(guided), layers=layers)
    assert (result.matches, result.required, result.level) == (1, 1, Level.EXACT)
    return gm, fewer


@pytest.mark.parametrize("name", INSERTED)
def test_all_that_follows_the_last_attention(name):
    """The selection stands right behind attention, and on the stream that enters the last layer."""
    inserted, attention = INSERTED[name]
    whole, fewer = program(inserted)
    anchor = find(fewer, getattr(OPS, attention).default)[-1]
    chain = [node for node in behind(fewer, anchor) if name_of(node) not in ("aten.sum", "aten.add_")]
    assert [name_of(node) for node in chain] == BEHIND_ATTENTION
    (wanted,) = (node for node in placeholders(fewer) if node.target == "wanted")
    size = wanted.meta["val"].shape[0]
    assert all(has_rows_of(node, size) for node in chain)
    of_attention, of_stream = selected(fewer)
    assert of_attention is anchor
    assert name_of(of_stream) == "aten.add"
    assert len(of_stream.users) == 2, "the last layer's attention reads it"
    # Everything in front of the last attention is as it was.
    before = [name_of(node) for node in calls(whole)]
    kept = [name_of(node) for node in calls(fewer)]
    assert kept[: kept.index(name_of(anchor))] == before[: before.index(name_of(anchor))]
    assert len(kept) == len(before) + 2


@pytest.mark.parametrize("guided", [False, True], ids=["", "guided"])
@pytest.mark.parametrize("name", INSERTED)
def test_logits_of_wanted_rows_are_those_of_all(name, guided):
    """Rows in any order and twice; with guidance LLaDA's formula on two rows of logits. Caches get the same bytes."""
    whole, fewer = program(INSERTED[name][0], guided=guided)
    mine, theirs = inputs_of(fewer), inputs_of(whole)
    with torch.no_grad():
        every, actual = whole(**theirs), fewer(**mine)
    expected = every[WANTED]
    if guided:
        other = every[UNCONDITIONAL]
        expected = other + (GUIDANCE + 1) * (expected - other)
    assert len(actual) == len(WANTED)
    close(actual, expected)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_guidance_takes_both_halves_through_the_same_calls():
    """One product for wanted and unconditional rows: as many as without guidance."""
    _, fewer = program(guided=True)
    _, plain = program()
    assert count(fewer, "aten.linear") == count(plain, "aten.linear") == 12
    assert count(fewer, "aten.index_select") == 2
    (guide,) = find(fewer, OPS.guide.default)
    (wanted,) = (node for node in placeholders(fewer) if node.target == "wanted")
    assert has_rows_of(guide, size := wanted.meta["val"].shape[0])
    (both,) = find(fewer, aten.cat.default)
    assert has_rows_of(both, 2 * size)
    assert all(has_rows_of(node, 2 * size) for node in find(fewer, aten.linear.default)[-3:])


def test_a_forward_program_has_no_selection():
    whole, _ = program()
    assert count(whole, "aten.index_select") == 0
    assert run(whole).shape[0] == R


@pytest.mark.parametrize("layers", [1, 2])
def test_the_stream_may_be_the_embedding(layers):
    """One layer: its stream is what the embedding gives, and with LaCache the buffer that keeps it, once written."""
    for inserted in ((), (insert_lacache_pass((0,), "step"),)):
        _, gm, _ = wide(n_layers=layers)
        apply(gm, FLAT, *inserted, layers=layers)
        fewer = share(gm)
        apply(fewer, SELECT, layers=layers)
        close(run(fewer), run(gm)[WANTED])
        stream = selected(fewer)[1]
        kept = stream.op == "placeholder"
        assert name_of(stream) if not kept else stream.target == "h"
        assert kept == (layers == 1 and bool(inserted))


# --- FP8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linears", ["ffn", "all"])
@pytest.mark.parametrize("granularity", ["group", "row"])
def test_quantized_products_move_where_a_row_has_its_own_scale(granularity, linears):
    pytest.importorskip("torchao")
    _, gm, layers = wide()
    quantize(gm, layers, granularity=granularity, linears=linears)
    apply(gm, FLAT, insert_kv_cache_pass(), layers=layers)
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    assert [node.target for node in selected(fewer)] == [OPS.cached_attention.default, aten.add.Tensor]
    # Codes may round the other way where a sum is on an edge: by one step of one value, not more.
    torch.testing.assert_close(run(fewer), run(gm)[WANTED], rtol=0, atol=2e-3)


def test_one_scale_for_all_rows_stops_the_selection():
    """Per tensor, the scale of a row comes from all rows: the feed-forward part sees them all."""
    pytest.importorskip("torchao")
    _, gm, layers = wide()
    quantize(gm, layers, granularity="tensor")
    apply(gm, FLAT, layers=layers)
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    stream, down = selected(fewer)
    assert (stream.target, down.target) == (aten.add.Tensor, OPS.quantized_linear.default)
    assert stream.args[1].target is aten.linear.default, "the add behind the out projection"
    close(run(fewer), run(gm)[WANTED])


def test_the_last_layer_may_be_left_out():
    """In the checkpoint's precision behind quantized layers."""
    pytest.importorskip("torchao")
    _, gm, layers = wide()
    quantize(gm, layers, skip=(2,))
    apply(gm, FLAT, layers=layers)
    fewer = share(gm)
    apply(fewer, SELECT, layers=layers)
    assert [node.target for node in selected(fewer)] == [OPS.row_attention.default, aten.add.Tensor]
    close(run(fewer), run(gm)[WANTED])


# --- what it saves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guided", [False, True], ids=["", "guided"])
def test_products_cost_what_the_formula_says(guided):
    """In the last layer q, k, v of all rows, and everything else of the wanted ones."""
    model, gm, layers = wide()
    apply(gm, FLAT, insert_kv_cache_pass(), *head_passes(127, guided=guided), layers=layers)
    costs = program_costs(gm, inputs_of(gm))
    config = model.config
    width, ffn = config.d_model, config.mlp_hidden_size
    qkv = width * (config.n_heads + 2 * config.n_kv_heads) * (width // config.n_heads)
    rest = width * width + 3 * width * ffn
    through = len(WANTED) * (2 if guided else 1)
    expected = 2 * (R * (layers * qkv + (layers - 1) * rest) + through * rest)
    assert sum(cost.flops for cost in costs if cost.operator == "aten.linear") == expected
    head = next(cost for cost in costs if cost.operator == "dllm.head_confidence")
    assert head.flops == 2 * len(WANTED) * width * model.model.transformer.ff_out.weight.shape[0]
