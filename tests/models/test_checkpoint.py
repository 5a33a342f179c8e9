# SPDX-License-Identifier: Apache-2.0
"""Folders: save and load, single and sharded, and what is said when one is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_compile.errors import CheckpointError
from dllm_compile.models.llada import LLaDAForMaskedDiffusion
from dllm_compile.models.llada_config import LLaDAConfig


def small(**changes: object) -> LLaDAForMaskedDiffusion:
    values = {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "vocab_size": 96,
        "max_sequence_length": 32,
        "mlp_hidden_size": 96,
        "mask_token_id": 95,
        "eos_token_id": 0,
    }
    model = LLaDAForMaskedDiffusion(LLaDAConfig(**{**values, **changes})).eval()  # type: ignore[arg-type]
    model.model.reset_parameters(0)
    return model


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000, 1])
@pytest.mark.parametrize(
    "changes", [{}, {"weight_tying": True, "n_kv_heads": 2}, {"n_layers": 4, "block_group_size": 2}]
)
def test_roundtrip(tmp_path: Path, shard_bytes: int, changes: dict[str, object]) -> None:
    model = small(**changes)
    model.save_pretrained(tmp_path, max_shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes == 1 << 30)
    loaded = LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    assert not loaded.training
    assert loaded.config.to_dict() == {**model.config.to_dict(), "torch_dtype": "float32"}
    state, again = model.state_dict(), loaded.state_dict()
    assert list(state) == list(again)
    assert all(torch.equal(state[name], again[name]) for name in state)
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    if shard_bytes == 1:
        # Saving over a sharded folder leaves no shard behind.
        model.save_pretrained(tmp_path)
        assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_dtype(tmp_path: Path) -> None:
    small().to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert LLaDAForMaskedDiffusion.from_pretrained(tmp_path).dtype == torch.bfloat16
    loaded = LLaDAForMaskedDiffusion.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in loaded.buffers()} == {torch.float32}


def test_unknown_fields_survive(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoModel": "x.Y"}, "use_cache": False}))
    loaded = LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    assert loaded.config.extra["auto_map"] == {"AutoModel": "x.Y"}
    assert loaded.config.to_dict()["use_cache"] is False


def test_the_released_field_values_are_accepted() -> None:
    config = LLaDAConfig.from_dict(
        {
            "activation_type": "silu", "alibi": False, "attention_dropout": 0.0, "attention_layer_norm": False,
            "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 4096,
            "embedding_dropout": 0.0, "embedding_size": 126464, "eos_token_id": 126081, "flash_attention": False,
            "include_bias": False, "include_qkv_bias": False, "init_device": "meta", "input_emb_norm": False,
            "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 126336,
            "max_sequence_length": 4096, "mlp_hidden_size": 12288, "mlp_ratio": 4, "model_type": "llada",
            "multi_query_attention": None, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "pad_token_id": 126081,
            "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": True,
            "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False, "use_cache": False,
            "vocab_size": 126464, "weight_tying": False,
        }
    )  # fmt: skip
    assert (config.head_dim, config.kv_heads, config.ffn_size, config.embedding_rows) == (128, 32, 12288, 126464)
    with torch.device("meta"):
        model = LLaDAForMaskedDiffusion(config)
    assert sum(parameter.numel() for parameter in model.parameters()) * 2 == 16_031_162_368


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing is fetched"):
        LLaDAForMaskedDiffusion.from_pretrained("GSAI-ML/LLaDA-8B-Instruct")
    with pytest.raises(CheckpointError, match="config.json"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    small().save_pretrained(tmp_path, max_shard_bytes=40_000)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    shard = next(tmp_path.glob("model-00002*"))
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match="model-00002.*not there"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    shard.write_bytes(kept[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    assert text
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"d_model": 3}')
    with pytest.raises(CheckpointError, match="lacks n_heads"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)


def test_wrong_tensors(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    name = "model.transformer.blocks.1.ff_proj.weight"
    save_file({key: value for key, value in state.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*blocks\.1\.ff_proj"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    save_file({**state, name: torch.zeros(3, 64)}, file)
    with pytest.raises(CheckpointError, match=r"\(3, 64\).*\(96, 64\)"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    save_file({**state, "model.extra.weight": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight"):
        LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
