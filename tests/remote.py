# SPDX-License-Identifier: Apache-2.0
"""A small random checkpoint around modelling code that lies in a folder of the user's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from dllm_compile.remote_code import make_loadable

# The released flags stay; sizes are cut down, and heads are grouped so that queries and keys differ in shape.
SMALL = {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "mlp_hidden_size": 96,
    "vocab_size": 128,
    "embedding_size": 128,
    "max_sequence_length": 64,
    "mask_token_id": 127,
    "eos_token_id": 126,
    "pad_token_id": 126,
}


def make_checkpoint(code: Path, folder: Path, **changes: int) -> Path:
    """Write the code of `code`, its config with small sizes (and `changes`), and random weights to `folder`."""
    folder.mkdir(parents=True)
    for file in code.glob("*.py"):
        shutil.copy(file, folder)
    values = {**json.loads((code / "config.json").read_text(encoding="utf-8")), **SMALL, **changes}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model_class = get_class_from_dynamic_module(config.auto_map["AutoModel"], str(folder))
    make_loadable(model_class, config)
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.2 + (parameter.dim() == 1))
    model.save_pretrained(folder)
    return folder
