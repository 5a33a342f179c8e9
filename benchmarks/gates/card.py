# SPDX-License-Identifier: Apache-2.0
"""Figures that only a card has: generated Triton kernels, and steps captured as CUDA graphs.

The file of expected figures is one for each compute capability and torch version.
"""

from __future__ import annotations

from typing import Any

import torch

import dllm_compile
from dllm_compile import DecodingConfig, OptimizedModel

from ..models import random_llada
from .compiled import DECODINGS, code_figures
from .expected import Figures
from .graphs import LAYERS

PROMPT_LENGTHS = (40, 24)


def has_card() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def card_figures() -> Figures:
    """Compile for the card, warm up, decode twice, and count."""
    fast = dllm_compile.optimize(random_llada("tiny", LAYERS[-1], "cuda"), compile=True)
    figures: Figures = {}
    for name, options in DECODINGS.items():
        figures |= code_figures(fast, name, options)
    for name, options in DECODINGS.items():
        figures |= _captures(fast, name, options)
    return figures


def _captures(fast: OptimizedModel, name: str, options: dict[str, Any]) -> Figures:
    """Steps captured by a warm-up, and those that two calls of the sizes it named still capture."""
    config = DecodingConfig(max_new_tokens=32, block_length=8, eos="none", **options)
    fast.free_buffers()
    warm = fast.warm_up(PROMPT_LENGTHS, config)
    prompts = [torch.arange(3, 3 + length) for length in PROMPT_LENGTHS]
    for _ in range(2):
        fast.generate(prompts, config)
    return {f"{name}/captures": warm.graphs, f"{name}/captured again": _captured(fast) - warm.graphs}


def _captured(fast: OptimizedModel) -> int:
    """Graphs of all sessions that are kept."""
    pool = fast._sessions
    sessions = [] if pool is None else [session for idle in pool._idle.values() for session in idle]
    return sum(len(session.captured) for session in sessions if session.captured is not None)
