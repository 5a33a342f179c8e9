# SPDX-License-Identifier: Apache-2.0
"""Own LLaDA against a forward written separately, with plain loops, from a state dict."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_compile.errors import PaddingError, PromptTooLongError, UnsupportedModelError
from dllm_compile.models.llada import LLaDAForMaskedDiffusion
from dllm_compile.models.llada_config import LLaDAConfig

BASE: dict[str, Any] = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "vocab_size": 96,
    "max_sequence_length": 24,
    "mlp_hidden_size": 80,
    "mask_token_id": 95,
    "rope_theta": 500.0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "gqa": {"n_kv_heads": 2},
    "multi_query": {"multi_query_attention": True},
    "qkv_bias": {"include_qkv_bias": True},
    "all_bias": {"include_bias": True},
    "no_norm_bias": {"include_bias": True, "bias_for_layer_norm": False},
    "tied": {"weight_tying": True},
    "scale_logits": {"scale_logits": True},
    "emb_norm": {"input_emb_norm": True},
    "qk_norm": {"attention_layer_norm": True, "n_kv_heads": 2},
    "gemma_rms": {"layer_norm_type": "gemma_rms"},
    "groups": {"block_group_size": 2},
    "mlp_ratio": {"mlp_hidden_size": None, "mlp_ratio": 2},
    "embedding_size": {"embedding_size": 128},
    "no_affine": {"layer_norm_with_affine": False},
}


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> LLaDAForMaskedDiffusion:
    """A small model whose every parameter, norms and biases too, is random."""
    model = LLaDAForMaskedDiffusion(LLaDAConfig(**{**BASE, **changes})).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1) * 0.7)
    return model.to(dtype)


def plain_forward(config: LLaDAConfig, state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, V] of one sequence, one head and one position at a time, in the state's dtype."""
    prefix = "model.transformer."
    dtype = state[prefix + "wte.weight"].dtype
    hd = config.d_model // config.n_heads

    def norm(x: Tensor, name: str) -> Tensor:
        x32 = x.float()
        y = (x32 * torch.rsqrt((x32**2).mean(-1, keepdim=True) + config.rms_norm_eps)).to(x.dtype)
        weight = state.get(prefix + name + ".weight")
        if weight is not None:
            y = y * (1 + weight) if config.layer_norm_type == "gemma_rms" else y * weight
        bias = state.get(prefix + name + ".bias")
        return y if bias is None else y + bias

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ state[prefix + name + ".weight"].T
        bias = state.get(prefix + name + ".bias")
        return y if bias is None else y + bias

    def rotate(head: Tensor) -> Tensor:
        rows = []
        for position in range(head.shape[0]):
            x = head[position].float()
            y = torch.empty_like(x)
            for i in range(hd // 2):
                angle = position * config.rope_theta ** (-2 * i / hd)
                a, b = x[i], x[i + hd // 2]
                y[i] = a * math.cos(angle) - b * math.sin(angle)
                y[i + hd // 2] = b * math.cos(angle) + a * math.sin(angle)
            rows.append(y)
        return torch.stack(rows).to(dtype)

    x = state[prefix + "wte.weight"][ids]
    if config.input_emb_norm:
        x = x * math.sqrt(config.d_model)
    for layer in range(config.n_layers):
        g = config.block_group_size
        name = f"block_groups.{layer // g}.{layer % g}." if g > 1 else f"blocks.{layer}."
        h = norm(x, name + "attn_norm")
        q, k, v = (linear(h, name + part) for part in ("q_proj", "k_proj", "v_proj"))
        if config.attention_layer_norm:
            q, k = norm(q, name + "q_norm"), norm(k, name + "k_norm")
        heads = []
        for head in range(config.n_heads):
            shared = head * config.kv_heads // config.n_heads
            mine, other = slice(head * hd, (head + 1) * hd), slice(shared * hd, (shared + 1) * hd)
            scores = rotate(q[:, mine]).float() @ rotate(k[:, other]).float().T / math.sqrt(hd)
            heads.append((torch.softmax(scores, -1) @ v[:, other].float()).to(dtype))
        x = x + linear(torch.cat(heads, -1), name + "attn_out")
        h = norm(x, name + "ff_norm")
        gate = linear(h, name + "ff_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, name + "up_proj"), name + "ff_out")
    x = norm(x, "ln_f")
    logits = x @ state[prefix + "wte.weight"].T if config.weight_tying else linear(x, "ff_out")
    return logits / math.sqrt(config.d_model) if config.scale_logits else logits


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_equals_plain_forward(changes: dict[str, Any]) -> None:
    model = build(**changes)
    ids = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = model(ids).logits
    for row in range(2):
        expected = plain_forward(model.config, model.state_dict(), ids[row])
        torch.testing.assert_close(got[row], expected, rtol=2e-4, atol=2e-4)


def test_rope_in_low_precision_differs_only_in_bfloat16() -> None:
    ids = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    full, low = build(), build(rope_full_precision=False)
    assert torch.equal(full(ids).logits, low(ids).logits)
    assert not torch.equal(full.bfloat16()(ids).logits, low.bfloat16()(ids).logits)


def test_norm_casts_before_the_weight() -> None:
    model = build(torch.bfloat16)
    norm = model.model.transformer["ln_f"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x32 = x.float()
    rounded = (x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(norm(x), rounded * norm.weight)
    late = (x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + 1e-5) * norm.weight.float()).bfloat16()
    assert not torch.equal(norm(x), late)


def test_state_dict_names() -> None:
    names = set(build(n_layers=1).state_dict())
    block = "model.transformer.blocks.0."
    parts = ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out")
    expected = {block + part + ".weight" for part in parts}
    expected |= {f"model.transformer.{part}.weight" for part in ("wte", "ln_f", "ff_out")}
    assert names == expected
    assert "model.transformer.ff_out.weight" not in build(weight_tying=True).state_dict()
    grouped = build(block_group_size=2).state_dict()
    assert "model.transformer.block_groups.1.0.q_proj.weight" in grouped
    assert not any(".blocks." in name for name in grouped)
    assert block + "q_norm.weight" in build(attention_layer_norm=True).state_dict()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_equals_unpadded(side: str) -> None:
    model = build(n_kv_heads=2)
    ids = torch.randint(0, 90, (1, 9), generator=torch.Generator().manual_seed(2))
    pad = torch.full((1, 5), 7)
    ones, zeros = torch.ones(1, 9, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)
    plain = model(ids).logits
    if side == "right":
        padded = model(torch.cat((ids, pad), 1), attention_mask=torch.cat((ones, zeros), 1)).logits
        torch.testing.assert_close(padded[:, :9], plain, rtol=1e-5, atol=1e-5)
    else:
        # Positions are shifted by the padding; rotary attention depends on their differences alone.
        padded = model(torch.cat((pad, ids), 1), attention_mask=torch.cat((zeros, ones), 1)).logits
        torch.testing.assert_close(padded[:, 5:], plain, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(padded).all()


def test_an_all_padding_row_is_finite_and_a_wrong_mask_is_refused() -> None:
    model = build()
    ids = torch.zeros(2, 4, dtype=torch.long)
    assert torch.isfinite(model(ids, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])).logits).all()
    with pytest.raises(PaddingError, match=r"\(2, 3\)"):
        model(ids, attention_mask=torch.ones(2, 3))


def test_all_ones_mask_equals_none() -> None:
    model, ids = build(), torch.arange(12)[None]
    torch.testing.assert_close(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


def test_tables_stay_fp32_and_the_same() -> None:
    model = build()
    rotary = next(model.model.layers()).rotary_emb
    before = rotary.cos.clone()
    for target in (torch.bfloat16, torch.float16, torch.float64, torch.device("meta")):
        model.to(target)
        assert rotary.cos.dtype == torch.float32
        if rotary.cos.device.type != "meta":
            assert torch.equal(rotary.cos, before)
    with torch.device("meta"):
        lazy = LLaDAForMaskedDiffusion(LLaDAConfig(**BASE))
    assert next(lazy.model.layers()).rotary_emb.cos.device.type == "cpu"


def test_length_limit() -> None:
    model = build()
    assert model(torch.zeros(1, 24, dtype=torch.long)).logits.shape == (1, 24, 96)
    with pytest.raises(PromptTooLongError, match="25 tokens exceed max_sequence_length=24"):
        model(torch.zeros(1, 25, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_type": "sequential"}, "block_type"),
        ({"alibi": True}, "alibi"),
        ({"rope": False}, "rope"),
        ({"activation_type": "swiglu"}, "activation_type"),
        ({"layer_norm_type": "default"}, "layer_norm_type"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"n_kv_heads": 2, "multi_query_attention": True}, "n_kv_heads"),
        ({"n_heads": 5}, "n_heads"),
        ({"block_group_size": 3}, "block_group_size"),
        ({"embedding_size": 64}, "embedding_size"),
    ],
)
def test_unsupported_fields_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        LLaDAConfig(**{**BASE, **changes})


def test_dropout_is_refused_in_train_mode_only() -> None:
    model, ids = build(residual_dropout=0.1), torch.zeros(1, 3, dtype=torch.long)
    model(ids)
    with pytest.raises(UnsupportedModelError, match="dropout"):
        model.train()(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [False, True])
def test_export_counts_and_values(dtype: torch.dtype, inner: bool) -> None:
    model = build(dtype)
    layers = model.config.n_layers
    module = model.model if inner else model
    dynamic = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    program = torch.export.export(module, (ids,), dynamic_shapes=dynamic, strict=False).run_decompositions({})
    graph_module = program.module()
    counts = Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
    assert counts["aten.scaled_dot_product_attention.default"] == layers
    assert counts["aten.silu.default"] == layers
    assert counts["aten.rsqrt.default"] == 2 * layers + 1
    assert counts["aten.linear.default"] == 7 * layers + 1
    assert counts["aten.unbind.int"] == 2 * layers
    assert counts["aten._to_copy.default"] == (6 * layers + 2 if dtype is torch.bfloat16 else 0)
    other = torch.randint(0, 96, (3, 23), generator=torch.Generator().manual_seed(1))
    assert torch.equal(graph_module(other).logits, module(other).logits)
