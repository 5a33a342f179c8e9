# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are alike as modules, and a copy of the model with few of them.

Alike: class, attributes and buffers the same (except a layer's own number), parameters equal in shape and kind, no
hooks, and no tensor that belongs to some of the layers only. What a forward does with the layers is not seen here.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

TRACED = 4
"""Layers that are traced: the first, two to compare, and the last."""

MIN_LAYERS = 6
"""Fewer are traced all."""

_DEPTHS = ("n_layers", "num_hidden_layers", "num_layers", "n_layer")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, Enum)


class NotAlike(Exception):
    """Why a model cannot be stamped; it is captured whole."""


@dataclass(frozen=True)
class Repeated:
    """The list of alike layers of a model.

    Attributes:
        source: the model.
        layers: the list in it.
        path: the list's name.
        own: ids of the tensors that belong to one layer each; what else the layers read is one tensor for all.
    """

    source: nn.Module
    layers: nn.ModuleList
    path: str
    own: frozenset[int]

    def shallow(self) -> nn.Module:
        """A copy of the model with the first `TRACED` layers: modules are copied, tensors and settings shared."""
        return _copied(self.source, self.layers, {})

    def prefix(self, layer: int) -> str:
        """What the names of a layer's parameters begin with."""
        return f"{self.path}.{layer}."


def find_repeated(source: nn.Module) -> Repeated:
    """The outermost list of six or more layers that are alike, as modules (groups of layers count as one).

    Raises:
        NotAlike: there is none, or they differ; says in what.
    """
    lists = [entry for entry in source.named_modules() if isinstance(entry[1], nn.ModuleList)]
    long = [(path, layers) for path, layers in lists if len(layers) >= MIN_LAYERS]
    if not long:
        raise NotAlike(f"no list of {MIN_LAYERS} or more layers")
    path, layers = long[0]
    hooked = [name or "the model" for name, m in source.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    if hooked:
        raise NotAlike(f"{hooked[0]} has a hook")
    patched = [name or "the model" for name, m in source.named_modules() if "forward" in vars(m)]
    if patched:
        raise NotAlike(f"the forward of {patched[0]} was replaced")
    first = layers[0]
    in_one = len(first) if isinstance(first, nn.ModuleList) else 1
    for number, other in enumerate(layers):
        _check_alike(first, other, number * in_one, in_one, f"{path}.{number}")
    return Repeated(source, layers, path, _ownnamed_tensors(source, layers, path))


def _copied(module: nn.Module, layers: nn.ModuleList, memo: dict[int, nn.Module]) -> nn.Module:
    """`module` over copies of its submodules, with `layers` cut wherever it occurs."""
    if id(module) in memo:
        return memo[id(module)]
    new = type(module).__new__(type(module))
    new.__dict__.update(vars(module))
    memo[id(module)] = new
    for name in vars(nn.Module()):
        new.__dict__[name] = copy.copy(vars(module)[name])
    children = module._modules if module is not layers else {str(i): layers[i] for i in range(TRACED)}
    new.__dict__["_modules"] = {
        name: None if child is None else _copied(child, layers, memo) for name, child in children.items()
    }
    if "config" in vars(module) and module is not layers and any(child is layers for child in module.modules()):
        new.__dict__["config"] = _cut_config(vars(module)["config"], len(layers))
    return new


def _cut_config(config: Any, layers: int) -> Any:
    """A configuration of the shallow model, for code that counts its layers there."""
    counts = {name: getattr(config, name, None) for name in _DEPTHS}
    stale = {name: n // layers * TRACED for name, n in counts.items() if type(n) is int and n and n % layers == 0}
    if stale:
        config = copy.copy(config)
        for name, count in stale.items():
            setattr(config, name, count)
    return config


def _check_alike(first: nn.Module, other: nn.Module, shift: int, in_one: int, where: str) -> None:
    """Whether `other` computes what `first` computes, from parameters of its own; `shift` layers lie between them."""
    if first is other:
        return
    if type(first) is not type(other):
        raise NotAlike(f"{where} is {type(other).__name__} and not {type(first).__name__}")
    special = {"_parameters", "_buffers", "_modules"}
    mine, theirs = ({k: v for k, v in vars(m).items() if k not in special} for m in (first, other))
    if mine.keys() != theirs.keys():
        raise NotAlike(f"{where} has other attributes")
    for name, value in mine.items():
        if not (_same(value, theirs[name]) or _is_number(value, theirs[name], shift, in_one)):
            raise NotAlike(f"{where}.{name} differs from the first layer's")
    for kind in ("_parameters", "_buffers"):
        _checknamed_tensors(getattr(first, kind), getattr(other, kind), where)
    if list(first._modules) != list(other._modules):
        raise NotAlike(f"{where} has other parts")
    for name, child in first._modules.items():
        their_child = other._modules[name]
        if child is None or their_child is None:
            if child is not their_child:
                raise NotAlike(f"{where}.{name} differs from the first layer's")
        else:
            _check_alike(child, their_child, shift, in_one, f"{where}.{name}")


def _checknamed_tensors(mine: dict[str, Tensor | None], theirs: dict[str, Tensor | None], where: str) -> None:
    if list(mine) != list(theirs):
        raise NotAlike(f"{where} has other parameters or buffers")
    for name, tensor in mine.items():
        if kind_of(tensor) != kind_of(theirs[name]):
            raise NotAlike(f"{where}.{name} has another shape, dtype or kind than the first layer's")


def kind_of(tensor: Tensor | None) -> Any:
    """What code made for a tensor may depend on, besides its values."""
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _same(mine: Any, theirs: Any) -> bool:
    """One object, or plain values that are equal."""
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, functools.partial):
        return all(_same(getattr(mine, part), getattr(theirs, part)) for part in ("func", "args", "keywords"))
    if isinstance(mine, dict):
        return list(mine) == list(theirs) and all(_same(value, theirs[key]) for key, value in mine.items())
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(mine, set | frozenset):
        return mine == theirs
    return isinstance(mine, _PLAIN) and bool(mine == theirs)


def _is_number(mine: Any, theirs: Any, shift: int, in_one: int) -> bool:
    """Whether the two are the numbers of two layers."""
    return type(mine) is int and type(theirs) is int and 0 <= mine < in_one and theirs == mine + shift


def _ownnamed_tensors(source: nn.Module, layers: nn.ModuleList, path: str) -> frozenset[int]:
    """Ids of what each layer has for itself; refuses a tensor that belongs to some of the layers."""
    owners = Counter(id(tensor) for _, tensor in named_tensors(source))
    by_name: dict[str, list[int]] = {}
    for layer in layers:
        for name, tensor in named_tensors(layer):
            by_name.setdefault(name, []).append(id(tensor))
    own: set[int] = set()
    for name, ids in by_name.items():
        if len(set(ids)) > 1:
            own.update(ids)
            if any(owners[tensor] > 1 for tensor in ids):
                raise NotAlike(f"{name} is shared between some of {path}")
    return frozenset(own)


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, once for each name."""
    buffers = module.named_buffers(remove_duplicate=False)
    return [*module.named_parameters(remove_duplicate=False), *buffers]
