# SPDX-License-Identifier: Apache-2.0
"""What a step does around its forwards, in stages that can be compiled: once for each kind, for all sizes.

A stage is a function of tensors and plain values, held in frozen dataclasses: it reads nothing on the host and writes
buffers in place. Uncompiled it is some hundred small launches; Inductor makes a few of them.

Everything that tells one kind from another is in a key, and each key has a function of its own, which is compiled with
the plain values as constants and every size as a symbol. So sessions share what is compiled, and nothing is ever
compiled again: not for another number of rows, samples or blocks.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .._compat import constant_numbers, distinct_sizes

RunStage = Callable[..., Any]
"""Called with a stage and its arguments; returns what the stage returns."""

HOST = {"host": True}
"""Metadata of a dataclass field that no stage reads: it may differ between calls of the same kind."""

_LOCK = threading.Lock()
_COMPILED: dict[Hashable, Callable[..., Any]] = {}


def run_plainly(stage: Callable[..., Any], *arguments: Any) -> Any:
    """Run a stage as it is."""
    return stage(*arguments)


def run_compiled(stage: Callable[..., Any], *arguments: Any) -> Any:
    """Run a stage that is compiled at the first call of each kind.

    A kind is the stage, its plain values, and the dtypes, devices and numbers of dimensions of its tensors. Sizes of 0
    and 1 make kinds of their own, since compilers treat them as constants.
    """
    key = (stage, *map(kind, arguments))
    run = _COMPILED.get(key)
    if run is not None:
        return run(*arguments)
    with _LOCK:
        run = _COMPILED.get(key)
        if run is None:
            run = torch.compile(
                _apart(stage), fullgraph=True, dynamic=True, options={"guard_filter_fn": guards_on_inputs}
            )
            with distinct_sizes(), constant_numbers():
                result = run(*arguments)
            _COMPILED[key] = run  # only now: another thread must not compile it without these settings
            return result
    return run(*arguments)


def kind(value: Any) -> Hashable:
    """What a stage is compiled for, where `value` is one of its arguments."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(min(size, 2) for size in value.shape)
    if isinstance(value, tuple):
        return tuple(map(kind, value))
    if dataclasses.is_dataclass(value):
        read = [field.name for field in dataclasses.fields(value) if not field.metadata.get("host")]
        return type(value), getattr(value, "kind", None), *(kind(getattr(value, name)) for name in read)
    return value  # type: ignore[no-any-return]


def guards_on_inputs(guards: Any) -> list[bool]:
    """Leave out the guard on the process (default dtype, threads, determinism): it decides nothing in these graphs.

    Otherwise a caller who changes one of them would have a graph compiled again, for the sizes of that one call.
    Gradients and autocast are off whenever one runs (`plain_mode`).
    """
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def _apart(stage: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: that is what Dynamo files compiled code under."""
    assert isinstance(stage, types.FunctionType)
    return types.FunctionType(
        stage.__code__.replace(), stage.__globals__, stage.__name__, stage.__defaults__, stage.__closure__
    )
