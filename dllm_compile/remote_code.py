# SPDX-License-Identifier: Apache-2.0
"""Loading LLaDA through its own modelling code, under transformers 4.57 and 5.

That code was written for transformers 4. Version 5 asks three things of a model class that it does not do: a
`use_cache` in its configuration, the table `all_tied_weights_keys`, and a `tie_weights` that takes arguments. They are
supplied on the loaded class, where they are missing, before the weights are read; transformers itself is not changed.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import torch
from torch import nn

from .errors import CheckpointError, UnsupportedModelError


def load_remote(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Module:
    """Load a LLaDA with the modelling code that lies beside its weights. **That code is run**: trust it first.

    Under transformers 4 this is what `AutoModel.from_pretrained(path, trust_remote_code=True)` does. Afterwards, plain
    `from_pretrained` calls on the same code work under transformers 5 too, for the life of the process.

    Args:
        path: a folder, or the name of a repository (then it is downloaded, as always with `from_pretrained`).
        dtype: of the parameters; None takes the checkpoint's.
        device: where the model goes; None leaves it on the CPU.
        **options: passed on to `from_pretrained`, e.g. `revision`.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: the configuration names no code (`auto_map`).
        UnsupportedModelError: tied embeddings under transformers 5.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    source = os.fspath(path)
    where = {name: options[name] for name in ("revision", "code_revision", "token", "cache_dir") if name in options}
    # Read before AutoConfig resolves it: a model type unknown to transformers is a ValueError there without code.
    names = PretrainedConfig.get_config_dict(source, **where)[0].get("auto_map") or {}
    reference = names.get("AutoModel") or names.get("AutoModelForCausalLM")
    if reference is None:
        raise CheckpointError(
            f"the config.json of {source!r} names no modelling code: use LLaDAForMaskedDiffusion.from_pretrained"
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=True, **where)
    model_class = get_class_from_dynamic_module(reference, source, **where)
    make_loadable(model_class, config)
    model: nn.Module = model_class.from_pretrained(source, config=config, dtype=dtype or "auto", **options)
    return model.to(device).eval() if device is not None else model.eval()


def make_loadable(model_class: Any, config: Any) -> None:
    """Supply what transformers 5 asks of a model class and its configuration; idempotent, and nothing under 4.

    Args:
        model_class: the remote model class; changed in place.
        config: an instance of its configuration class, which is changed too (`use_cache`, where it is missing).

    Raises:
        UnsupportedModelError: embeddings are tied, for which the supplied table would be wrong.
    """
    from transformers import PreTrainedModel

    if not hasattr(config, "use_cache"):
        type(config).use_cache = False
    if "missing_keys" not in inspect.signature(PreTrainedModel.tie_weights).parameters:
        return
    if getattr(config, "weight_tying", False):
        raise UnsupportedModelError(
            f"{model_class.__name__} ties its embeddings, which its code does not tell transformers 5: "
            "load it with transformers 4.57, or with dllm_compile.models.LLaDAForMaskedDiffusion"
        )
    if not hasattr(model_class, "all_tied_weights_keys"):
        model_class.all_tied_weights_keys = {}
    original = model_class.tie_weights
    if "missing_keys" in inspect.signature(original, follow_wrapped=False).parameters:
        return

    @functools.wraps(original)
    def tie_weights(self: Any, missing_keys: Any = None, recompute_mapping: bool = True, **_: Any) -> None:
        original(self)

    model_class.tie_weights = tie_weights
