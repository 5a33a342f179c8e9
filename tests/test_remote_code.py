# SPDX-License-Identifier: Apache-2.0
"""Loading through remote code: on a miniature written like the released code, and on the released code itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_compile.errors import CheckpointError, UnsupportedModelError
from dllm_compile.models.small import CHECKPOINT
from dllm_compile.remote_code import load_remote, make_loadable

pytestmark = pytest.mark.usefixtures("remote_modules")

# What trips transformers 5: the configuration passes nothing on, the model never calls `post_init`, its `tie_weights`
# takes no arguments, and `forward` reads `config.use_cache`.
CONFIGURATION = """
from transformers import PretrainedConfig

class MiniConfig(PretrainedConfig):
    model_type = "mini-llada"

    def __init__(self, width=8, weight_tying=False, **kwargs):
        self.width = width
        self.weight_tying = weight_tying
        passed = {name: kwargs[name] for name in ("architectures", "auto_map") if name in kwargs}
        super().__init__(**passed)
"""
MODELLING = """
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_mini import MiniConfig

class MiniModel(PreTrainedModel):
    config_class = MiniConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = torch.nn.Linear(config.width, config.width, bias=False)

    def forward(self, x, use_cache=None):
        if use_cache is None:
            use_cache = self.config.use_cache
        return CausalLMOutputWithPast(logits=self.model(x))

    def tie_weights(self):
        if self.config.weight_tying:
            raise RuntimeError("not in this test")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    folder = tmp_path / "mini_checkpoint"
    folder.mkdir()
    (folder / "configuration_mini.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_mini.py").write_text(MODELLING, encoding="utf-8")
    auto_map = {"AutoConfig": "configuration_mini.MiniConfig", "AutoModel": "modeling_mini.MiniModel"}
    config = {"model_type": "mini-llada", "width": 8, "auto_map": auto_map, "architectures": ["MiniModel"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    save_file({"model.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_loads_and_runs(folder: Path):
    from safetensors.torch import load_file

    model = load_remote(folder)
    weight = load_file(folder / "model.safetensors")["model.weight"]
    x = torch.randn(3, 8)
    assert not model.training
    assert torch.equal(model.model.weight, weight)
    assert torch.equal(model(x).logits, x @ weight.T)


def test_dtype_and_a_second_load(folder: Path):
    load_remote(folder)
    model = load_remote(folder, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_plain_from_pretrained_works_afterwards(folder: Path):
    from transformers import AutoModel

    first = load_remote(folder)
    second = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(first.model.weight, second.model.weight)


@pytest.mark.parametrize("model_type", ["bert", "mini-llada", None])
def test_no_code_is_said(folder: Path, model_type: str | None):
    """Whether transformers knows the model type or not."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["auto_map"], config["model_type"]
    if model_type is not None:
        config["model_type"] = model_type
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="names no modelling code"):
        load_remote(folder)


def test_code_without_a_model_is_said(folder: Path):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["auto_map"]["AutoModel"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="names no modelling code"):
        load_remote(folder)


def test_a_checkpoint_of_this_package_names_no_code():
    with pytest.raises(CheckpointError, match=r"LLaDAForMaskedDiffusion\.from_pretrained"):
        load_remote(CHECKPOINT)


def test_tied_embeddings_are_refused_where_they_would_be_wrong():
    import transformers

    class Config:
        use_cache = False
        weight_tying = True

    class Model(transformers.PreTrainedModel):
        def tie_weights(self) -> None:  # type: ignore[override]
            pass

    if transformers.__version__.startswith("4."):
        make_loadable(Model, Config())
        return
    with pytest.raises(UnsupportedModelError, match=r"4\.57"):
        make_loadable(Model, Config())


@pytest.mark.remote
def test_the_released_code_loads(remote_path: Path):
    model: Any = load_remote(remote_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
