# SPDX-License-Identifier: Apache-2.0
"""Models of this package's own: LLaDA as plain torch modules, and the small one that is bundled."""

from __future__ import annotations

from dllm_compile.models.llada import LLaDAForMaskedDiffusion, LLaDAModel
from dllm_compile.models.llada_config import LLaDAConfig
from dllm_compile.models.small import load_small, load_small_tokenizer

__all__ = ["LLaDAConfig", "LLaDAForMaskedDiffusion", "LLaDAModel", "load_small", "load_small_tokenizer"]
