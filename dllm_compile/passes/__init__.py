# SPDX-License-Identifier: Apache-2.0
"""Graph passes, one a file, and the order in which they run.

`NORMALIZE` turns many spellings into a small canonical vocabulary; `FUSE` are exact rewrites of the canonical graph;
the others make one program for one kind of call. Passes that mutate caches come last.
"""

from __future__ import annotations

import torch

from .flatten_rows import WHOLE_SAMPLE, flatten_rows_pass
from .framework import GraphPass, Level, PassResult, Refusal, RegionError, run_passes
from .fuse_head_confidence import fuse_head_confidence_pass
from .fuse_linear_add_norm import FUSE_LINEAR_ADD_NORM
from .fuse_quantization import FUSE_QUANTIZATION
from .inline_references import INLINE_REFERENCES
from .insert_kv_cache import insert_kv_cache_pass
from .insert_lacache import insert_lacache_pass
from .insert_verify import INSERT_VERIFY
from .normalize_attention import NORMALIZE_ATTENTION
from .normalize_embedding import NORMALIZE_EMBEDDING
from .normalize_head import NORMALIZE_HEAD
from .normalize_norm import NORMALIZE_NORM
from .normalize_swiglu import NORMALIZE_SWIGLU
from .pack_gate_up import PACK_GATE_UP
from .pack_qkv import PACK_QKV
from .select_wanted_rows import select_wanted_rows_pass

__all__ = [
    "FUSE",
    "INLINE_REFERENCES",
    "INSERT_VERIFY",
    "NORMALIZE",
    "OPTIONAL",
    "WHOLE_SAMPLE",
    "GraphPass",
    "Level",
    "PassResult",
    "Refusal",
    "RegionError",
    "finishing_passes",
    "flatten_rows_pass",
    "head_passes",
    "insert_kv_cache_pass",
    "insert_lacache_pass",
    "run_passes",
]

# Norms first: the walk from attention to its projections stops at a norm (QK-norm) as well as at a linear layer.
NORMALIZE: tuple[GraphPass, ...] = (
    NORMALIZE_NORM,
    NORMALIZE_ATTENTION,
    NORMALIZE_SWIGLU,
    NORMALIZE_EMBEDDING,
    NORMALIZE_HEAD,
)
FUSE: tuple[GraphPass, ...] = (PACK_QKV, PACK_GATE_UP)

OPTIONAL: tuple[str, ...] = tuple(
    graph_pass.name for graph_pass in (*FUSE, FUSE_QUANTIZATION, FUSE_LINEAR_ADD_NORM, INLINE_REFERENCES)
)
"""Passes that can be left out: the result is the same, only slower."""


def head_passes(
    mask_token_id: int, *, sampled: bool = False, guided: bool = False, given: bool = False
) -> tuple[GraphPass, ...]:
    """Passes that end a row program in the wanted rows' tokens and confidences, and the probabilities of given ones."""
    return (select_wanted_rows_pass(guided), fuse_head_confidence_pass(mask_token_id, sampled, given))


def finishing_passes(
    device: torch.device, dtype: torch.dtype, *, fp8: bool, disable: tuple[str, ...] = ()
) -> tuple[GraphPass, ...]:
    """Passes that run last in every row program, where they pay.

    Args:
        device, dtype: of the parameters. A projection and the norm behind it are fused where kernels stand behind that:
            on a card, in 16 bit.
        fp8: whether linear layers are quantized.
        disable: names of passes to leave out.
    """
    passes: tuple[GraphPass, ...] = (FUSE_QUANTIZATION,) if fp8 else ()
    if fp8 or (device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)):
        passes = (*passes, FUSE_LINEAR_ADD_NORM)
    return tuple(graph_pass for graph_pass in passes if graph_pass.name not in disable)
