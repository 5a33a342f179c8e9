# SPDX-License-Identifier: Apache-2.0
"""`normalize_attention`: rotation and attention of every supported shape, and what must be left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.errors import PassError
from dllm_compile.passes.graph import aten, find
from dllm_compile.passes.normalize_attention import COS, NORMALIZE_ATTENTION, SIN
from dllm_compile.passes.normalize_norm import NORMALIZE_NORM

from .pieces import (
    Mini,
    apply,
    assert_idempotent,
    assert_refused,
    assert_same,
    capture_mini,
    count,
    llada,
    mini,
    tensor,
)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_counts(layers):
    model, gm = llada(n_layers=layers)
    _, result = apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION, layers=layers)
    assert result.matches == result.required == layers == count(gm, "dllm.attention")
    assert result.error == 0.0
    assert count(gm, "dllm.rope") == 2 * layers
    assert count(gm, "aten.scaled_dot_product_attention") == 0
    assert count(gm, "aten.arange") == 1, "positions are made once"
    assert count(gm, "aten.cat") == count(gm, "aten.neg") == count(gm, "aten.slice") == 0
    assert_same(gm, model)
    assert_idempotent(gm, NORMALIZE_ATTENTION, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"include_qkv_bias": True, "n_kv_heads": 1},
        {"attention_layer_norm": True},
        {"attention_layer_norm": True, "include_bias": True},
        {"block_group_size": 2, "n_kv_heads": 4},
        {"layer_norm_type": "gemma_rms"},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()) or "gqa",
)
def test_variants_of_llada(dtype, changes):
    model, gm = llada(dtype=dtype, **changes)
    _, result = apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION)
    assert result.matches == 2
    assert result.error == 0.0
    assert_same(gm, model)


def test_operands_and_recorded_values():
    _, gm = llada()
    apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION)
    for node in find(gm, torch.ops.dllm.attention.default):
        q, k, v = node.args
        assert q.args[4] == 4
        assert k.args[4] == 2
        assert [x.target for x in (q.args[1], q.args[2])] == [x.target for x in (k.args[1], k.args[2])] == [COS, SIN]
        names = [x.args[0].args[1].target.split(".")[-2] for x in (q, k, v)]
        assert names == ["q_proj", "k_proj", "v_proj"]
        assert list(v.meta["val"].shape[2:]) == [2, 16]
        assert node.meta["val"].shape[-1] == 64
        assert node.meta["val"].is_contiguous()
    assert torch.equal(tensor(gm, SIN)[0], torch.zeros(16))
    assert torch.equal(tensor(gm, COS)[0], torch.ones(16))


def test_tables_are_views_of_the_models():
    model, gm = llada()
    apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION)
    rotary = next(model.model.layers()).rotary_emb
    assert tensor(gm, COS).data_ptr() == rotary.cos.data_ptr()
    assert tensor(gm, SIN).data_ptr() == rotary.sin.data_ptr()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attend": "causal"}, "attention is called with is_causal"),
        ({"attend": "masked"}, "attention is called with attn_mask"),
        ({"attend": "scaled"}, "attention is called with scale"),
        ({"attend": "doubled query"}, "computes something else than rope and attention"),
        ({"attend": "mixed projections"}, "a head is computed from 2 projections instead of one"),
        ({"rope": "none"}, "0 tables instead of a cosine and a sine"),
        ({"rope": "offset"}, "computes something else than rope and attention"),
        ({"rope": "other way"}, "computes something else than rope and attention"),
        ({"rope": "double tables"}, "the rotary tables are not fp32"),
        ({"rope": "low precision", "dtype": torch.bfloat16}, "computes something else than rope and attention"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_refusals(changes, reason):
    _, gm = mini(**changes)
    apply(gm, NORMALIZE_NORM)
    result = assert_refused(gm, NORMALIZE_ATTENTION, 2, reason)
    assert len(result.refusals) == 2
    with pytest.raises(PassError, match="normalize_attention rewrote 0 of 2 regions") as caught:
        apply(gm, NORMALIZE_ATTENTION)
    assert f"blocks.0: {reason}" in str(caught.value)


def test_attention_written_out_is_no_candidate():
    _, gm = mini(attend="by hand")
    apply(gm, NORMALIZE_NORM)
    assert assert_refused(gm, NORMALIZE_ATTENTION, 2).refusals == ()


def test_low_precision_rotation_of_llada():
    """The same function in fp32; in bf16 only the certificate can tell."""
    model, gm = llada(rope_full_precision=False)
    assert apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION)[1].matches == 2
    assert_same(gm, model)
    _, gm = llada(rope_full_precision=False, dtype=torch.bfloat16)
    apply(gm, NORMALIZE_NORM)
    assert_refused(gm, NORMALIZE_ATTENTION, 2, "computes something else than rope and attention (differs by")


def test_tables_of_its_own_are_refused_layer_by_layer():
    """The first layer's tables are the model's; a layer with others stays as it was, and the graph stays right."""
    model, gm = mini(tables="own", layers=3)
    apply(gm, NORMALIZE_NORM, layers=3)
    (result,) = apply(gm, NORMALIZE_ATTENTION, layers=3, strict=False)
    assert result.matches == 1
    assert [refusal.where for refusal in result.refusals] == ["blocks.1", "blocks.2"]
    assert {refusal.reason for refusal in result.refusals} == {"this layer has rotary tables of its own"}
    assert_same(gm, model)


def test_equal_tables_of_its_own_are_taken():
    """A layer that made the same tables again shares the model's."""
    model = Mini(tables="own")
    for block in model.blocks:
        block.rotate.cos, block.rotate.sin = (
            t.clone() for t in (model.blocks[0].rotate.cos, model.blocks[0].rotate.sin)
        )
    gm = capture_mini(model).gm
    assert apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION)[1].matches == 2
    assert_same(gm, model)


def test_qk_norm_needs_norms_first():
    _, gm = mini(qk_norm=True)
    before = count(gm, "aten.scaled_dot_product_attention")
    (result,) = apply(gm, NORMALIZE_ATTENTION, strict=False)
    assert result.matches == 0
    assert count(gm, "aten.scaled_dot_product_attention") == before
    model, gm = mini(qk_norm=True)
    assert apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION)[1].matches == 2
    assert_same(gm, model)
    assert not find(gm, aten.scaled_dot_product_attention.default)


@settings(max_examples=3, deadline=None)
@given(
    st.sampled_from([(2, 1), (4, 4), (6, 2), (3, 3)]),
    st.sampled_from([2, 4, 10]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_any_heads(heads, size, dtype, qk_norm):
    model = Mini(heads=heads[0], kv_heads=heads[1], width=heads[0] * size, dtype=dtype, qk_norm=qk_norm, layers=1)
    gm = capture_mini(model).gm
    assert apply(gm, NORMALIZE_NORM, NORMALIZE_ATTENTION, layers=1)[1].matches == 1
    assert_same(gm, model)
