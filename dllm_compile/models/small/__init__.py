# SPDX-License-Identifier: Apache-2.0
"""The bundled small model: where its files lie and how to load them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dllm_compile.models.llada import LLaDAForMaskedDiffusion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHECKPOINT = Path(__file__).parent / "checkpoint"


def load_small(dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> LLaDAForMaskedDiffusion:
    """The bundled model in eval mode; fp32 unless another dtype is asked for (its file holds half precision)."""
    return LLaDAForMaskedDiffusion.from_pretrained(CHECKPOINT, dtype=dtype, device=device)


def load_small_tokenizer() -> PreTrainedTokenizerFast:
    """The bundled model's tokenizer, as transformers knows it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
