# SPDX-License-Identifier: Apache-2.0
"""`normalize_embedding` and `normalize_head`: the two ends of the graph, with and without their factors."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.errors import PassError
from dllm_compile.passes.graph import find
from dllm_compile.passes.normalize_embedding import NORMALIZE_EMBEDDING
from dllm_compile.passes.normalize_head import NORMALIZE_HEAD

from .pieces import apply, assert_idempotent, assert_refused, assert_same, count, llada, mini

BOTH = (NORMALIZE_EMBEDDING, NORMALIZE_HEAD)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_counts(layers):
    model, gm = llada(n_layers=layers)
    results = apply(gm, *BOTH, layers=layers)
    assert [(result.matches, result.required) for result in results] == [(1, 1), (1, 1)]
    assert count(gm, "dllm.embed") == count(gm, "dllm.head") == 1
    assert count(gm, "aten.linear") == 7 * layers
    assert count(gm, "aten.embedding") == 0
    assert_same(gm, model)
    for graph_pass in BOTH:
        assert_idempotent(gm, graph_pass, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("changes", "embed_scale", "head_scale"),
    [
        ({}, 1.0, 1.0),
        ({"input_emb_norm": True}, 8.0, 1.0),
        ({"scale_logits": True}, 1.0, 0.125),
        ({"weight_tying": True, "scale_logits": True, "input_emb_norm": True}, 8.0, 0.125),
        ({"embedding_size": 192}, 1.0, 1.0),
    ],
    ids=["plain", "emb_norm", "scale", "tied", "more rows"],
)
def test_factors_and_tied_head(dtype, changes, embed_scale, head_scale):
    model, gm = llada(dtype=dtype, **changes)
    apply(gm, *BOTH)
    assert_same(gm, model)
    (embed,) = find(gm, torch.ops.dllm.embed.default)
    (head,) = find(gm, torch.ops.dllm.head.default)
    assert (embed.args[2], head.args[2]) == (embed_scale, head_scale)
    tied = embed.args[1].target == head.args[1].target
    assert tied == ("weight_tying" in changes)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("bias", "the head has a bias"), ("capped", "the logits are not a linear layer's output times a constant")],
)
def test_head_refusals(kind, reason):
    _, gm = mini(head=kind)
    assert_refused(gm, NORMALIZE_HEAD, 2, reason)
    with pytest.raises(PassError, match="normalize_head rewrote 0 of 1 regions"):
        apply(gm, NORMALIZE_HEAD)


@pytest.mark.parametrize("kind", ["plain", "scaled", "tied"])
def test_heads_of_the_miniature(kind):
    model, gm = mini(head=kind)
    apply(gm, NORMALIZE_HEAD)
    assert_same(gm, model)


def test_learned_positions_are_left_alone():
    """The token embedding is rewritten, the one that looks up positions is not."""
    model, gm = mini(embedding="positions")
    (result,) = apply(gm, NORMALIZE_EMBEDDING)
    assert result.matches == 1
    assert [refusal.reason for refusal in result.refusals] == ["looks up something else than the input ids"]
    assert_same(gm, model)


def test_scaled_embedding_of_the_miniature():
    model, gm = mini(embedding="scaled")
    apply(gm, NORMALIZE_EMBEDDING)
    assert_same(gm, model)
    assert find(gm, torch.ops.dllm.embed.default)[0].args[2] == 4.0
