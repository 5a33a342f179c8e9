# SPDX-License-Identifier: Apache-2.0
"""Loading a model and its tokenizer for the command line: the bundled one, or a folder on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import CheckpointError, ConfigError, DllmCompileError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model in eval mode, its tokenizer, and what to call it."""

    model: nn.Module
    tokenizer: Any
    name: str

    def encode(self, prompt: str, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt, through the tokenizer's chat template if it has one and `chat` is set."""
        if chat and getattr(self.tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer(prompt)["input_ids"]


def load(
    path: str | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a checkpoint folder, or the bundled small model. Nothing is downloaded.

    Args:
        path: folder with config.json, safetensors and tokenizer files; None is the bundled model.
        dtype: a key of `DTYPES`; None keeps the checkpoint's (fp32 for the bundled model).
        device: where to load; None takes the first GPU if there is one.
        trust_remote_code: run the modelling code that lies in the folder instead of this package's own LLaDA.

    Raises:
        CheckpointError: the folder is not there, is incomplete or malformed, or has no code that can be run.
        ConfigError: there is no such device.
    """
    target = target_device(device)
    chosen = None if dtype is None else DTYPES[dtype]
    if path is None:
        from .models import load_small, load_small_tokenizer

        small = load_small(dtype=chosen or torch.float32, device=target)
        return Checkpoint(small, load_small_tokenizer(), "the bundled small model")
    folder = Path(path)
    values = _config_values(folder)
    model = _remote_model(folder, values, chosen) if trust_remote_code else _own_model(folder, chosen)
    return Checkpoint(model.to(target).eval(), _tokenizer(folder, trust_remote_code), str(folder))


def target_device(name: str | None) -> str:
    """The device to use: `name`, or the first GPU if there is one and else the CPU.

    Raises:
        ConfigError: there is no such device on this machine.
    """
    target = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=target)
    except Exception as error:  # which kind it is differs from backend to backend
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise ConfigError(f"device {target!r} cannot be used, choose cpu or a GPU that is there: {reason}") from error
    return target


def _config_values(folder: Path) -> dict[str, Any]:
    """What config.json holds, with whichever code the model is loaded.

    Raises:
        CheckpointError: it is not there, cannot be read, or holds no JSON object.
    """
    file = folder / "config.json"
    try:
        if not file.is_file():
            raise CheckpointError(f"{folder} has no config.json: give the folder of a downloaded checkpoint")
        values = json.loads(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no object but {type(values).__name__}: it does not describe a model")
    return values


def _own_model(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    from .models import LLaDAForMaskedDiffusion

    return LLaDAForMaskedDiffusion.from_pretrained(folder, dtype=dtype)


def _remote_model(folder: Path, values: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """Raises `CheckpointError` whatever the folder's code, or transformers on its behalf, raises."""
    if not isinstance(values.get("auto_map"), dict):
        raise CheckpointError(f"{folder}/config.json names no code of its own: leave --trust-remote-code out")
    from .remote_code import load_remote

    try:
        return load_remote(folder, dtype=dtype)
    except DllmCompileError:
        raise
    except Exception as error:  # code of others is run: it may raise anything
        raise CheckpointError(
            f"{folder} cannot be loaded with its own code (dllm_compile.remote_code.load_remote shows where): "
            f"{_in_a_line(error)}"
        ) from error


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Raises `CheckpointError` where files are missing, or are not what transformers can read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not trust_remote_code and not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json: copy the checkpoint's tokenizer files there")
    try:
        if trust_remote_code:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # of tokenizers, a plain Exception
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be loaded, copy the checkpoint's tokenizer files there: "
            f"{_in_a_line(error)}"
        ) from error


def _in_a_line(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ")
