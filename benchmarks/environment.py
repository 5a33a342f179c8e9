# SPDX-License-Identifier: Apache-2.0
"""Where a figure was measured."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch
import transformers

import dllm_compile


def environment(commit: str | None = None) -> dict[str, Any]:
    """Card, versions and commit (asked from git unless given)."""
    cuda = torch.cuda.is_available()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "card": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dllm_compile": dllm_compile.__version__,
        "commit": commit or _commit(),
    }


def _commit() -> str | None:
    try:
        out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return out.stdout.strip()
