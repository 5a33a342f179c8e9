# SPDX-License-Identifier: Apache-2.0
"""Running a list of passes: records, strictness, observers, and passes that lie about what they inserted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dllm_compile.errors import PassError
from dllm_compile.passes import FUSE, NORMALIZE, OPTIONAL, GraphPass, Level, finishing_passes, run_passes
from dllm_compile.passes.framework import Outcome
from dllm_compile.passes.graph import aten, call, check_metadata, find, operator_counts, share
from dllm_compile.passes.inline_references import INLINE_REFERENCES

from .pieces import apply, assert_same, count, listing, llada, mini, normalized


def planted(change) -> GraphPass:
    """A pass that does `change` to the first silu of a graph."""

    def run(gm):
        outcome = Outcome()
        for node in find(gm, aten.silu.default)[:1]:
            change(gm, node)
            outcome.accept()
        return outcome

    return GraphPass("planted", Level.EXACT, run)


def test_the_order_and_names_of_passes():
    names = [graph_pass.name for graph_pass in (*NORMALIZE, *FUSE)]
    assert names == [
        "normalize_norm",
        "normalize_attention",
        "normalize_swiglu",
        "normalize_embedding",
        "normalize_head",
        "pack_qkv",
        "pack_gate_up",
    ]
    assert OPTIONAL == (
        "pack_qkv",
        "pack_gate_up",
        "fuse_quantization",
        "fuse_linear_add_norm",
        "inline_references",
    )
    assert all(graph_pass.level is Level.EXACT for graph_pass in (*NORMALIZE, *FUSE))


def test_which_passes_end_a_program():
    """Projections are fused with norms where kernels stand behind that; in fp32 without FP8 nothing is added."""
    cpu, card = torch.device("cpu"), torch.device("cuda")

    def names(device, dtype, fp8, **options):
        return [graph_pass.name for graph_pass in finishing_passes(device, dtype, fp8=fp8, **options)]

    both = ["fuse_quantization", "fuse_linear_add_norm"]
    assert names(cpu, torch.float32, False) == names(cpu, torch.bfloat16, False) == []
    assert names(card, torch.float32, False) == []
    assert names(card, torch.bfloat16, False) == names(card, torch.float16, False) == both[1:]
    assert names(cpu, torch.float32, True) == names(card, torch.bfloat16, True) == both
    assert names(card, torch.bfloat16, True, disable=("fuse_linear_add_norm",)) == both[:1]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_canonical_vocabulary(layers):
    """What is left after normalising, as formulas of N: nothing of the original's spelling survives."""
    model, gm = llada(n_layers=layers)
    seen = []
    results = run_passes(
        gm, NORMALIZE, layers=layers, observe=lambda name, graph: seen.append((name, len(graph.graph.nodes)))
    )
    assert operator_counts(gm) == {
        "dllm.embed": 1,
        "dllm.rms_norm": 2 * layers + 1,
        "dllm.rope": 2 * layers,
        "dllm.attention": layers,
        "dllm.swiglu": layers,
        "dllm.head": 1,
        "aten.linear": 7 * layers,
        "aten.unflatten": layers,
        "aten.add": 2 * layers,
        "aten.sym_size": 1,
        "aten.arange": 1,
    }
    assert seen == [(result.name, result.nodes_after) for result in results]
    assert [result.nodes_before for result in results[1:]] == [result.nodes_after for result in results[:-1]]
    assert all(result.milliseconds > 0 for result in results)
    check_metadata(gm, "test")
    gm.graph.lint()
    assert_same(gm, model)


def test_results_are_frozen():
    _, gm = llada()
    (result,) = apply(gm, NORMALIZE[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.matches = 7


def test_share_leaves_the_first_graph_alone():
    model, gm = llada()
    before = listing(gm)
    copy = share(gm)
    normalized(copy)
    assert listing(gm) == before
    assert_same(gm, model)
    assert_same(copy, model)
    assert {id(p) for p in copy.parameters()} == {id(p) for p in model.parameters()}


def test_strict_names_modules_reasons_and_operators():
    _, gm = mini(ffn_kind="chunked")
    with pytest.raises(PassError) as caught:
        apply(gm, *NORMALIZE)
    text = str(caught.value)
    assert "normalize_swiglu rewrote 0 of 2 regions" in text
    assert "blocks.0: the gate is not the output of a linear layer" in text
    assert "blocks.1: the gate is not the output of a linear layer" in text
    assert "aten.silu x2" in text
    assert "strict=False" in text


def test_not_strict_goes_on_with_the_reason_in_the_result():
    model, gm = mini(ffn_kind="chunked")
    results = {result.name: result for result in apply(gm, *NORMALIZE, strict=False)}
    assert (results["normalize_swiglu"].matches, results["normalize_swiglu"].required) == (0, 2)
    assert len(results["normalize_swiglu"].refusals) == 2
    assert results["normalize_head"].matches == 1
    assert count(gm, "aten.silu") == 2
    assert_same(gm, model)


def wrong_shape(gm, node):
    new = call(gm, aten.silu.default, node.args, like=node)
    new.meta["val"] = new.meta["val"][..., :-1]
    node.replace_all_uses_with(new)


def wrong_dtype(gm, node):
    new = call(gm, aten.silu.default, node.args, like=node)
    new.meta["val"] = new.meta["val"].to(torch.float64)
    node.replace_all_uses_with(new)


def wrong_strides(gm, node):
    new = call(gm, aten.silu.default, node.args, like=node)
    new.meta["val"] = new.meta["val"].transpose(0, 1).contiguous().transpose(0, 1)
    node.replace_all_uses_with(new)


def no_value(gm, node):
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(aten.silu.default, node.args)
    node.replace_all_uses_with(new)


@pytest.mark.parametrize("lie", [wrong_shape, wrong_dtype, wrong_strides, no_value], ids=lambda lie: lie.__name__)
def test_a_pass_that_lies_is_caught(lie):
    _, gm = mini()
    message = (
        "planted inserted .* without a recorded value" if lie is no_value else "planted: .* is recorded as .* but gives"
    )
    with pytest.raises(PassError, match=message):
        apply(gm, planted(lie))


def test_a_pass_that_uses_a_value_before_it_exists_is_caught():
    def early(gm, node):
        first = next(iter(gm.graph.nodes))
        with gm.graph.inserting_before(first):
            new = gm.graph.call_function(aten.silu.default, node.args)
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)

    _, gm = mini()
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        apply(gm, planted(early))


def test_a_change_behind_unchanged_values_is_caught():
    """A node whose inputs were changed under it: its own record is stale."""

    def narrow(gm, node):
        source = node.args[0]
        half = call(gm, aten.slice.Tensor, (source, 2, 0, 3), like=node)
        node.args = (half,)

    _, gm = mini()
    with pytest.raises((PassError, RuntimeError)):
        apply(gm, planted(narrow))


def test_inline_references():
    _, gm = llada()
    normalized(gm)
    apply(gm, *FUSE)
    before = listing(gm)
    gm = share(gm)
    opaque = sum(number for name, number in operator_counts(gm).items() if name.startswith("dllm."))
    (result,) = apply(gm, INLINE_REFERENCES)
    # All but the attentions, which have a kernel of their own.
    assert result.matches == opaque - 2
    assert {name for name in operator_counts(gm) if name.startswith("dllm.")} == {"dllm.attention"}
    assert apply(gm, INLINE_REFERENCES)[0].matches == 0
    assert len(listing(gm)) == len(before)


def test_inlining_computes_the_same():
    model, gm = llada()
    normalized(gm)
    apply(gm, INLINE_REFERENCES)
    assert_same(gm, model)
