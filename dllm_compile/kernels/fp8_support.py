# SPDX-License-Identifier: Apache-2.0
"""Which FP8 routes a device and this torch have: the one place where the FP8 operators' routes are chosen."""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F

from dllm_compile._compat import has_triton, interprets_triton


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on the device can convert to and multiply `float8_e4m3fn` (SM89 on); the interpreter can."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return interprets_triton()


def library_of(device: torch.device) -> str:
    """Which product with 1 x 128 and 128 x 128 scales serves the row counts that the own kernels do not win.

    "scaled_mm": torch's (cuBLASLt), on SM90 with CUDA 12.9 or later. "torchao": torchao's Triton kernel, elsewhere from
    SM89 on, if torchao is installed; it tunes itself when first called for a shape, so call it before a graph is
    captured. "own": this package's kernel at all row counts. "none": the reference, which dequantizes and multiplies in
    fp32. Results that are not bf16 never come from a library.
    """
    return _library_of(device) if has_triton() and has_fp8(device) else "none"


@functools.cache
def _library_of(device: torch.device) -> str:
    if has_block_scaled_mm(device):
        return "scaled_mm"
    return "torchao" if importlib.util.find_spec("torchao") is not None else "own"


def has_block_scaled_mm(device: torch.device) -> bool:
    """Whether `torch.nn.functional.scaled_mm` multiplies with 1 x 128 and 128 x 128 scales on the device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or torch.version.cuda is None:
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return version >= (12, 9) and hasattr(F, "scaled_mm")
