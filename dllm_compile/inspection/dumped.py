# SPDX-License-Identifier: Apache-2.0
"""What a dumped graph imports: its weights by name, and the inputs recorded beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import CheckpointError
from ..passes.graph import lookup

if TYPE_CHECKING:
    from ..optimized import OptimizedModel

WEIGHTS_FILE = "weights.safetensors"


class Weights:
    """Weights of a dumped graph, by their paths in it.

    Args:
        file: the dumped module's own `__file__`.
        names: paths that it reads.
    """

    def __init__(self, file: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._folder = Path(file).parent
        self._tensors: dict[str, Tensor] = {}

    def load(
        self, state: Mapping[str, Tensor] | OptimizedModel | None = None, device: torch.device | str | None = None
    ) -> None:
        """Take the weights.

        Args:
            state: an optimized model of the same kind, or tensors by path; None: the file beside the graph, which is
                written for small models.
            device: move them there.

        Raises:
            CheckpointError: there is no such file, or names are missing.
        """
        if state is None:
            state = _read(self._folder / WEIGHTS_FILE)
        elif not isinstance(state, Mapping):
            state = tensors_of(state)
        missing = [name for name in self.names if name not in state]
        if missing:
            raise CheckpointError(f"{len(missing)} weights are missing, the first is {missing[0]}")
        self._tensors = {name: state[name] if device is None else state[name].to(device) for name in self.names}

    def __getitem__(self, name: str) -> Tensor:
        """One weight; reads the file beside the graph when nothing was loaded."""
        if not self._tensors:
            self.load()
        return self._tensors[name]


def recorded(
    file: str, example: str, names: Sequence[str], device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Recorded inputs of a dumped graph.

    Args:
        file: the dumped module's own `__file__`.
        example: name of the file with them, without its ending.
        names: inputs of the graph.
        device: move them there.
    """
    tensors = _read(Path(file).parent / f"{example}.safetensors")
    return {name: tensors[f"input.{name}"].to(device or "cpu") for name in names}


def recorded_outputs(folder: str | Path, example: str) -> list[Tensor]:
    """What the graph returned for the recorded inputs."""
    tensors = _read(Path(folder) / f"{example}.safetensors")
    count = sum(name.startswith("output.") for name in tensors)
    return [tensors[f"output.{index}"] for index in range(count)]


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if not path.exists():
        raise CheckpointError(f"{path} is not there (it is written for small models): call load(fast) or load(mapping)")
    return load_file(path)


def tensors_of(fast: OptimizedModel) -> dict[str, Tensor]:
    """Everything that the graphs of an optimized model read, by path."""
    whole = fast._captured.gm
    paths: dict[str, Tensor] = {}
    for gm in (whole, *(gm for _, gm in reversed(fast._snapshots)), *(program.gm for program in fast.programs.built)):
        for path in read_paths(gm):
            # A snapshot may hold what was planned and not what was made: the graph that was rewritten comes first.
            paths.setdefault(path, lookup(whole if _has(whole, path) else gm, path).detach())
    return paths


def read_paths(gm: GraphModule) -> list[str]:
    """Paths of the tensors that a graph reads."""
    return [str(node.target) for node in gm.graph.nodes if node.op == "get_attr"]


def _has(gm: GraphModule, path: str) -> bool:
    try:
        lookup(gm, path)
    except AttributeError:
        return False
    return True
