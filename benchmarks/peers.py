# SPDX-License-Identifier: Apache-2.0
"""Other people's decoding loops, from a checkout given by path, on this project's random model in the same process.

Nothing of a checkout is part of this project: its code is imported from where it lies, **which runs it**. Weights are
those of the model at hand, loaded into the checkout's own model class, since its loop needs that class's caches.

Schedules are forced where the loop allows it: with random weights a threshold says nothing, but a quota commits the
same number of tokens a step on both sides.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dllm_compile.remote_code import make_loadable


class PeerError(Exception):
    """A path is no such checkout, or what lies there cannot be used; the message says what is missing."""


Generate = Callable[[torch.Tensor, int, int, int], tuple[torch.Tensor, int]]
"""(prompt (1, P), answer, block, steps) -> canvas (1, P + G), forwards."""


@dataclass(frozen=True)
class Peer:
    """A checkout that was loaded.

    Attributes:
        name: as given.
        loops: its ways of decoding, each with the cache that does the same here.
    """

    name: str
    loops: dict[str, tuple[str, Generate]]


def check(text: str) -> tuple[Kind, Path]:
    """What NAME=PATH names; the path is that of the folder with the loop.

    Raises:
        PeerError: no such form, no such peer, or no such checkout there.
    """
    name, equals, given = text.partition("=")
    if not equals or name not in KINDS:
        raise PeerError(f"--peer {text}: write NAME=PATH with a name of {', '.join(KINDS)}")
    kind, path = KINDS[name], Path(given).expanduser()
    folder = path / kind.folder if (path / kind.folder).is_dir() else path
    missing = [file for file in kind.files if not (folder / file).is_file()]
    if missing:
        raise PeerError(
            f"--peer {name}={path}: {', '.join(missing)} not found there; give the folder of a checkout of "
            f"{kind.repository}"
        )
    return kind, folder


def load(text: str, model: nn.Module) -> Peer:
    """Load a checkout and give it the weights of `model`.

    Args:
        text: NAME=PATH.
        model: this project's LLaDA.

    Raises:
        PeerError: the path is no such checkout, or its code cannot be imported or run on this model.
    """
    kind, folder = check(text)
    return kind.load(folder, model)


def _fast_dllm(folder: Path, model: nn.Module) -> Peer:
    """NVlabs/Fast-dLLM, its first version: loops without cache, with prefix and dual cache."""
    with _imports_from(folder, "fast-dllm"):
        loops = _module(folder / "generate.py", "dllm_compile_peer_fast_dllm")
        modelling = sys.modules["model.modeling_llada"]
    names = {
        "no cache": ("none", "generate"),
        "prefix cache": ("prefix", "generate_with_prefix_cache"),
        "dual cache": ("dual", "generate_with_dual_cache"),
    }
    missing = [function for _, function in names.values() if not callable(getattr(loops, function, None))]
    if missing:
        raise PeerError(f"{folder}/generate.py has no {', '.join(missing)}: give a checkout of the first version")
    own = _own_model(modelling, model)
    mask = model.config.mask_token_id

    def loop(function: Callable[..., Any]) -> Generate:
        def generate(prompt: torch.Tensor, answer: int, block: int, steps: int) -> tuple[torch.Tensor, int]:
            return function(own, prompt, steps=steps, gen_length=answer, block_length=block, mask_id=mask)

        return generate

    return Peer("fast-dllm", {key: (cache, loop(getattr(loops, name))) for key, (cache, name) in names.items()})


def _llada(folder: Path, model: nn.Module) -> Peer:
    """ML-GSAI/LLaDA: the reference loop, on the model's own forward."""
    with _imports_from(folder, "llada"):
        function = getattr(_module(folder / "generate.py", "dllm_compile_peer_llada"), "generate", None)
    if not callable(function):
        raise PeerError(f"{folder}/generate.py has no function generate: this is no checkout of ML-GSAI/LLaDA")
    mask = model.config.mask_token_id

    def generate(prompt: torch.Tensor, answer: int, block: int, steps: int) -> tuple[torch.Tensor, int]:
        canvas = function(model, prompt, steps=steps, gen_length=answer, block_length=block, mask_id=mask)
        return canvas, steps

    return Peer("llada", {"no cache": ("none", generate)})


@dataclass(frozen=True)
class Kind:
    """A peer that is known.

    Attributes:
        repository: where its checkout comes from.
        folder: inside the checkout.
        files: that must be there.
        load: (folder, model) -> peer.
    """

    repository: str
    folder: str
    files: tuple[str, ...]
    load: Callable[[Path, nn.Module], Peer]


KINDS: dict[str, Kind] = {
    "fast-dllm": Kind(
        "NVlabs/Fast-dLLM",
        "llada",
        ("generate.py", "model/modeling_llada.py", "model/configuration_llada.py"),
        _fast_dllm,
    ),
    "llada": Kind("ML-GSAI/LLaDA", ".", ("generate.py",), _llada),
}


@contextmanager
def _imports_from(folder: Path, name: str) -> Iterator[None]:
    """Absolute imports of the checkout find its own files; what they leave in `sys.modules` is taken out again."""
    shadowed = {key: sys.modules.pop(key) for key in list(sys.modules) if key.split(".")[0] == "model"}
    sys.path.insert(0, str(folder))
    try:
        yield
    except ImportError as error:
        raise PeerError(f"--peer {name}: {folder} needs a package that is not here ({error}); install it") from error
    except (SyntaxError, AttributeError, KeyError) as error:
        raise PeerError(f"--peer {name}: the code in {folder} cannot be loaded: {error!r}") from error
    finally:
        sys.path.remove(str(folder))
        for key in [key for key in sys.modules if key.split(".")[0] == "model"]:
            del sys.modules[key]
        sys.modules.update(shadowed)


def _module(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _own_model(modelling: ModuleType, model: nn.Module) -> nn.Module:
    """The checkout's model class with the sizes and weights of `model`."""
    known = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "torch_dtype")}
    try:
        config = modelling.LLaDAConfig(**known)
        make_loadable(modelling.LLaDAModelLM, config)
        with torch.device("meta"):
            own = modelling.LLaDAModelLM(config)
        own.load_state_dict(model.state_dict(), assign=True)
    except Exception as error:  # whatever a stranger's code raises
        raise PeerError(f"the checkout's model does not take this model's sizes and weights: {error!r}") from error
    return own.eval()
