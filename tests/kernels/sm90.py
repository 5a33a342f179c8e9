# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for an H200 without one: a stub driver names the target, `warmup` never launches."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

SHARED_MEMORY_LIMIT = 232_448  # bytes a block may use on sm_90


class Compiled(NamedTuple):
    """What the compiler says about a kernel."""

    ptx: str
    shared: int  # bytes of shared memory
    registers: int
    spilled: int  # bytes
    serialized: bool  # ptxas could not overlap the wgmma instructions (warning C7515)


class _StubDriver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def pretend_h200() -> Iterator[None]:
    """Make Triton compile for sm_90 inside the block."""
    before = driver._active  # `reset_active` looks for a device and fails without one
    driver.set_active(_StubDriver())
    try:
        yield
    finally:
        driver._active = before


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], folder: Path) -> Compiled:
    """Compile `kernel` for these arguments (CPU tensors stand in for device tensors) and assemble the PTX."""
    compiled = kernel.warmup(*arguments, grid=(1,), **constants)
    ptx = compiled.asm["ptx"]
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [ptxas, "-v", "-arch=sm_90a", "-o", folder / "kernel.cubin", source]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores", log)
    assert registers, log
    assert spills, log
    return Compiled(ptx, compiled.metadata.shared, int(registers[0]), max(map(int, spills)), "C7515" in log)
