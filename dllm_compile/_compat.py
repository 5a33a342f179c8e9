# SPDX-License-Identifier: Apache-2.0
"""Every difference between torch and triton versions and machines, in one place."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator

import torch

TORCH_VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


@functools.cache
def has_triton() -> bool:
    """Whether Triton kernels can be defined (the package is importable)."""
    return importlib.util.find_spec("triton") is not None


def interprets_triton() -> bool:
    """Whether Triton's interpreter is on, so that kernels run on CPU tensors too (slow; for tests)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def has_cxx_compiler() -> bool:
    """Whether Inductor's CPU back end finds a C++ compiler."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return any(name and shutil.which(name) for name in candidates)


def can_compile(device: torch.device) -> bool:
    """Whether `torch.compile` can generate code for `device` here: Triton for CUDA, a C++ compiler for CPU."""
    if device.type == "cuda":
        return has_triton()
    return device.type == "cpu" and has_cxx_compiler()


def has_fp8(device: torch.device) -> bool:
    """Whether `device` multiplies FP8 numbers in hardware: CUDA from compute capability 8.9 on (Ada, Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@contextlib.contextmanager
def distinct_sizes() -> Iterator[None]:
    """While a graph is compiled, two dimensions that happen to be equal stay two symbols."""
    from torch.fx.experimental import _config

    with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield
