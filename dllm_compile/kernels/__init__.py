# SPDX-License-Identifier: Apache-2.0
"""Operators of the `dllm::` namespace, one a file: torch reference and registration; Triton kernels in `<op>_triton`.

Importing this package registers each operator once; names are global in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "INLINED",
    "add_rms_norm_quant",
    "attention",
    "cached_attention",
    "embed",
    "facache",
    "fp8_linear",
    "fp8_linear_add_rms_norm",
    "guide",
    "head",
    "head_confidence",
    "head_verify",
    "linear_add_rms_norm",
    "linear_add_rms_norm_quant",
    "qkv_rope_cache_write",
    "quantize",
    "quantized_linear",
    "rms_norm",
    "rope",
    "row_attention",
    "row_attention_scored",
    "row_scores",
    "swiglu",
    "swiglu_quant",
    "upper_bound",
    "verify_attention",
    "write_rows",
]

if __name__ == "dllm_compile.kernels":
    from . import (
        add_rms_norm_quant,
        attention,
        cached_attention,
        embed,
        facache,
        fp8_linear,
        fp8_linear_add_rms_norm,
        guide,
        head,
        head_confidence,
        head_verify,
        linear_add_rms_norm,
        linear_add_rms_norm_quant,
        qkv_rope_cache_write,
        quantize,
        quantized_linear,
        rms_norm,
        rope,
        row_attention,
        row_attention_scored,
        row_scores,
        swiglu,
        swiglu_quant,
        upper_bound,
        verify_attention,
        write_rows,
    )

    INLINED: dict[Any, Callable[..., Any]] = {
        torch.ops.dllm.embed.default: embed.embed_reference,
        torch.ops.dllm.guide.default: guide.guide_reference,
        torch.ops.dllm.head.default: head.head_reference,
        torch.ops.dllm.rms_norm.default: rms_norm.rms_norm_reference,
        torch.ops.dllm.rope.default: rope.rope_reference,
        torch.ops.dllm.swiglu.default: swiglu.swiglu_reference,
    }
    """Operators that have no kernel of their own on any device: a compiler does best with the reference itself."""
else:
    # Found through the link at the repository's top, by somebody who looks for a package named `kernels` (transformers
    # does). Registering the operators a second time would pull them from under those who hold the first ones.
    import dllm_compile.kernels

    sys.modules[__name__] = dllm_compile.kernels
