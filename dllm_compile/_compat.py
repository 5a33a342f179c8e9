# SPDX-License-Identifier: Apache-2.0
"""Every difference between torch and triton versions and machines, in one place."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import torch

TORCH_VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


TRITON_VARIABLE = "DLLM_COMPILE_TRITON"
"""Environment variable: 0 makes the package's operators compute with their torch references on a card too."""

_references_only = False

# Settings of the compiler are global: what one thread changes and puts back must not mix with another's.
_COMPILER_SETTINGS = threading.RLock()


@functools.cache
def is_triton_installed() -> bool:
    """Whether the package is importable."""
    return importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether operators use Triton kernels: the package is there, and nobody asked for references instead."""
    return is_triton_installed() and not _references_only and os.environ.get(TRITON_VARIABLE, "1") != "0"


@contextlib.contextmanager
def references_only() -> Iterator[None]:
    """Operators compute with their torch references while the block runs, in all threads; for finding faults."""
    global _references_only  # noqa: PLW0603  (operators are global too)
    before, _references_only = _references_only, True
    try:
        yield
    finally:
        _references_only = before


def interprets_triton() -> bool:
    """Whether Triton's interpreter is on, so that kernels run on CPU tensors too (slow; for tests)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def hold_device_guard() -> None:
    """Keep what fake tensors look devices up by, for as long as the process runs.

    A build of torch for CUDA, on a machine without a card, makes it in the thread that exports first and keeps a
    pointer to it for all: when that thread ends, the next fake tensor of any thread reads freed memory (torch 2.11).
    """
    if torch.version.cuda is None or torch.cuda.is_available() or not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        return
    made = threading.Event()

    def hold() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        made.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="device guard", daemon=True).start()
    made.wait()


def has_cxx_compiler() -> bool:
    """Whether Inductor's CPU back end finds a C++ compiler."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return any(name and shutil.which(name) for name in candidates)


def can_compile(device: torch.device) -> bool:
    """Whether `torch.compile` can generate code for `device` here: Triton for CUDA, a C++ compiler for CPU."""
    if device.type == "cuda":
        return is_triton_installed()
    return device.type == "cpu" and has_cxx_compiler()


def has_fp8(device: torch.device) -> bool:
    """Whether `device` multiplies FP8 numbers in hardware: CUDA from compute capability 8.9 on (Ada, Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@contextlib.contextmanager
def distinct_sizes() -> Iterator[None]:
    """While a graph is compiled, two dimensions that happen to be equal stay two symbols."""
    from torch.fx.experimental import _config

    with _COMPILER_SETTINGS, _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def constant_numbers() -> Iterator[None]:
    """While a function is compiled, plain numbers among its arguments are constants, whatever becomes of sizes."""
    import torch._dynamo.config as dynamo

    with _COMPILER_SETTINGS, dynamo.patch(specialize_int=True, specialize_float=True):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def generated_sources() -> Iterator[list[str]]:
    """Collect what Inductor generates in this thread while the block runs, one text for each graph, in order.

    A graph that comes from Inductor's cache counts as well: both ways end in `CompiledFxGraph.post_compile`.
    """
    from torch._inductor.output_code import CompiledFxGraph

    sources: list[str] = []
    seen: list[Any] = []
    thread = threading.get_ident()
    original = CompiledFxGraph.post_compile

    def post_compile(self: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread and not any(self is one for one in seen):
            seen.append(self)
            sources.append(self.source_code)
        return original(self, *arguments, **options)

    CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign]
    try:
        yield sources
    finally:
        CompiledFxGraph.post_compile = original  # type: ignore[method-assign]
