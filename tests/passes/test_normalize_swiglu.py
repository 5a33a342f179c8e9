# SPDX-License-Identifier: Apache-2.0
"""`normalize_swiglu`: gated activations of two projections, and what is none."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.errors import PassError
from dllm_compile.passes.graph import find
from dllm_compile.passes.normalize_swiglu import NORMALIZE_SWIGLU

from .pieces import apply, assert_idempotent, assert_refused, assert_same, count, llada, mini


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_counts(layers):
    model, gm = llada(n_layers=layers)
    (result,) = apply(gm, NORMALIZE_SWIGLU, layers=layers)
    assert result.matches == result.required == layers == count(gm, "dllm.swiglu")
    assert result.nodes_before - result.nodes_after == layers, "silu and mul become one node"
    assert result.error == 0.0
    assert count(gm, "aten.silu") == 0
    assert_same(gm, model)
    assert_idempotent(gm, NORMALIZE_SWIGLU, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["silu", "swapped"])
def test_both_orders_and_dtypes(dtype, kind):
    model, gm = mini(ffn_kind=kind, dtype=dtype, bias="gate up")
    (result,) = apply(gm, NORMALIZE_SWIGLU)
    assert result.matches == 2
    assert_same(gm, model)
    for node in find(gm, torch.ops.dllm.swiglu.default):
        gate, up = node.args
        assert (gate.args[1].target.split(".")[-2], up.args[1].target.split(".")[-2]) == ("gate", "up")
        assert node.meta["val"].dtype == dtype
        assert node.meta["val"].is_contiguous()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("chunked", "the gate is not the output of a linear layer (a chunked SwiGLU?)"),
        ("two inputs", "gate and up projections do not read the same input"),
        ("one projection", "the activation is not multiplied by a second projection"),
        ("used twice", "the product does not feed a down projection"),
    ],
)
def test_refusals(kind, reason):
    _, gm = mini(ffn_kind=kind)
    result = assert_refused(gm, NORMALIZE_SWIGLU, 2, reason)
    assert [refusal.where for refusal in result.refusals] == ["blocks.0", "blocks.1"]
    with pytest.raises(PassError, match="normalize_swiglu rewrote 0 of 2 regions"):
        apply(gm, NORMALIZE_SWIGLU)


def test_another_activation_is_no_candidate():
    _, gm = mini(ffn_kind="gelu")
    assert assert_refused(gm, NORMALIZE_SWIGLU, 2).refusals == ()
    with pytest.raises(PassError, match="no region of this kind was found") as caught:
        apply(gm, NORMALIZE_SWIGLU)
    assert "aten.gelu x2" in str(caught.value)


def test_one_projection_for_both():
    """`silu(g) * g` is a gated activation of one linear layer."""
    model, gm = mini(shared="gate and up")
    assert apply(gm, NORMALIZE_SWIGLU)[0].matches == 2
    assert_same(gm, model)
