# SPDX-License-Identifier: Apache-2.0
"""`dllm-compile bench`: a user's model, card and prompts against the plain loop and `torch.compile` alone."""

from __future__ import annotations

from .run import Bench, bench

__all__ = ["Bench", "bench"]
