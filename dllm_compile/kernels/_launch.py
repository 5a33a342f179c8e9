# SPDX-License-Identifier: Apache-2.0
"""What the launchers of Triton kernels ask about a device and about the layout of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_compile._compat import interprets_triton


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def stages_that_fit(stages: int, stage_bytes: int, device: torch.device) -> int:
    """As many pipeline stages, up to `stages`, as the shared memory of a block holds on the device; at least 2.

    Configurations are measured on an H200 (227 KiB); other cards have 99 to 163 KiB.
    """
    if device.type != "cuda":
        return stages
    properties: Any = torch.cuda.get_device_properties(device)  # typed without the field
    available = properties.shared_memory_per_block_optin - 2048  # barriers, conversions of layout
    return max(2, min(stages, available // stage_bytes))


def has_tensor_descriptors(device: torch.device) -> bool:
    """Whether loads through tensor descriptors (TMA) are native on the device; the interpreter plays them."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return interprets_triton()


def describable(x: Tensor) -> bool:
    """Whether `x`, its leading dimension kept and the others flattened, is a matrix a tensor descriptor can read.

    That needs contiguous rows and a base and a row stride that are multiples of 16 bytes.
    """
    size = 1
    for length, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return x.numel() > 0 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
