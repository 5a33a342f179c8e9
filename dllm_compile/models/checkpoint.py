# SPDX-License-Identifier: Apache-2.0
"""Reading and writing LLaDA folders: `config.json` with one or many safetensors files. Local paths only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dllm_compile.errors import CheckpointError
from dllm_compile.models.llada import LLaDAForMaskedDiffusion
from dllm_compile.models.llada_config import LLaDAConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_checkpoint(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LLaDAForMaskedDiffusion:
    """Load a checkpoint folder, tensor by tensor, without holding the weights twice.

    Args:
        path: a folder on disk. Nothing is ever fetched.
        dtype: dtype of the parameters; None keeps each as it is in the file.
        device: where the parameters go; None is the CPU.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: folder, file or tensor missing, unknown tensor, or a shape that does not fit the config.
        UnsupportedModelError: the config describes a model that is not computed here.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"no folder {str(path)!r}: give the local folder of a checkpoint (download it first; nothing is fetched)"
        )
    config = LLaDAConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LLaDAForMaskedDiffusion(config)
    target = torch.device(device if device is not None else "cpu")
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing = set(expected)
    for file in _weight_files(folder):
        for name, tensor in _tensors(file, target):
            if name not in expected:
                if config.weight_tying and name == "model.transformer.ff_out.weight":
                    continue  # some writers store the tied head a second time
                raise CheckpointError(f"{file} holds {name!r}, which {folder / 'config.json'} has no place for")
            if tuple(tensor.shape) != expected[name]:
                raise CheckpointError(
                    f"{name} is {tuple(tensor.shape)} in {file}, but the config asks for {expected[name]}"
                )
            _assign(model, name, tensor if dtype is None else tensor.to(dtype))
            missing.discard(name)
    if missing:
        shown = ", ".join(sorted(missing)[:5])
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors ({shown}, ...): the download may be incomplete")
    return model.to(target).eval()


def save_checkpoint(
    model: LLaDAForMaskedDiffusion, path: str | os.PathLike[str], max_shard_bytes: int = 4 << 30
) -> None:
    """Write `config.json` and the weights, split in files of at most `max_shard_bytes` (one tensor at least)."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    values = {**model.config.to_dict(), "torch_dtype": str(model.dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in model.state_dict().items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor.detach().contiguous()
        room -= tensor.nbytes
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE_FILE, folder / INDEX_FILE):
        stale.unlink(missing_ok=True)
    if len(shards) == 1:
        _write(shards[0], folder / SINGLE_FILE)
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, folder / file)
        index.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
    (folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file that others may read (the library makes files for the owner only)."""
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (other formats are not read)")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not there: the download may be incomplete")
    return [folder / name for name in names]


def _tensors(file: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every entry of a safetensors file, read one at a time."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as handle:
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name, handle.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of the parameter `name`."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
