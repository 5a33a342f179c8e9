# SPDX-License-Identifier: Apache-2.0
"""`normalize_norm`: what becomes `dllm::rms_norm`, and what only looks like one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.errors import PassError
from dllm_compile.passes.graph import aten, find
from dllm_compile.passes.normalize_norm import NORMALIZE_NORM

from .pieces import Mini, apply, assert_idempotent, assert_refused, assert_same, capture_mini, count, llada, mini


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_counts(layers):
    model, gm = llada(n_layers=layers)
    (result,) = apply(gm, NORMALIZE_NORM, layers=layers)
    assert result.matches == result.required == 2 * layers + 1 == count(gm, "dllm.rms_norm")
    assert result.error == 0.0
    assert result.refusals == ()
    # pow, mean, add, rsqrt, mul, mul become one node (fp32: no casts).
    assert result.nodes_before - result.nodes_after == 5 * (2 * layers + 1)
    assert count(gm, "aten.rsqrt") == count(gm, "aten.pow") == count(gm, "aten.mean") == 0
    assert_same(gm, model)
    assert_idempotent(gm, NORMALIZE_NORM, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_norm_type": "gemma_rms"}, {"attention_layer_norm": True}, {"include_bias": True}],
    ids=["rms", "gemma", "qk_norm", "bias"],
)
def test_variants_of_llada(dtype, changes):
    """Gemma's factor stays a node of its own; QK-norm is two more norms a layer; a bias stays an addition."""
    model, gm = llada(dtype=dtype, **changes)
    (result,) = apply(gm, NORMALIZE_NORM)
    assert result.matches == (9 if "attention_layer_norm" in changes else 5)
    assert result.error == 0.0
    assert not find(gm, aten.rsqrt.default)
    assert_same(gm, model)


def test_recorded_value_and_provenance():
    _, gm = llada(dtype=torch.bfloat16)
    apply(gm, NORMALIZE_NORM)
    nodes = find(gm, torch.ops.dllm.rms_norm.default)
    for node in nodes:
        value = node.meta["val"]
        assert (value.dtype, value.shape[-1], value.is_contiguous()) == (torch.bfloat16, 64, True)
        assert node.args[2] == 1e-5
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes]
    assert [path.rsplit(".", 1)[-1] for path in paths] == ["attn_norm", "ff_norm"] * 2 + ["ln_f"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("centred", "the mean is not of squares (a LayerNorm?)"),
        ("other axis", "the mean is not over the last dimension"),
        ("cube", "the mean is not of squares"),
        ("root used twice", "the reciprocal root is used elsewhere"),
        ("no weight", "the scaled value is not multiplied by a weight"),
        ("computed weight", "the weight is not a parameter"),
    ],
)
def test_refusals(kind, reason):
    _, gm = mini(norm=kind)
    result = assert_refused(gm, NORMALIZE_NORM, 2, reason)
    assert len(result.refusals) == 5
    with pytest.raises(PassError, match=r"normalize_norm rewrote 0 of 5 regions") as caught:
        apply(gm, NORMALIZE_NORM)
    assert reason in str(caught.value)
    assert "blocks.0" in str(caught.value)


def test_a_layer_norm_is_no_candidate():
    _, gm = mini(norm="layer")
    assert assert_refused(gm, NORMALIZE_NORM, 2).refusals == ()
    with pytest.raises(PassError, match="no region of this kind was found") as caught:
        apply(gm, NORMALIZE_NORM)
    assert "aten.layer_norm x5" in str(caught.value)


def test_the_certificate_finds_another_order_of_casts():
    """Weight before the cast back: the same function in fp32, another one in bf16."""
    model, gm = mini(norm="late cast")
    (result,) = apply(gm, NORMALIZE_NORM)
    assert result.matches == 5
    assert_same(gm, model)
    _, gm = mini(norm="late cast", dtype=torch.bfloat16)
    assert_refused(gm, NORMALIZE_NORM, 2, "")
    with pytest.raises(PassError):
        apply(gm, NORMALIZE_NORM)


@settings(max_examples=3, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([8, 12, 40]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_any_width(layers, width, dtype, seed):
    model = Mini(layers=layers, width=width, heads=2, kv_heads=1, dtype=dtype, seed=seed)
    gm = capture_mini(model).gm
    (result,) = apply(gm, NORMALIZE_NORM, layers=layers)
    assert result.matches == 2 * layers + 1
    assert_same(gm, model)
