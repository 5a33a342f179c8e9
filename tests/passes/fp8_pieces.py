# SPDX-License-Identifier: Apache-2.0
"""A tiny LLaDA whose widths are multiples of 128, and its graphs with FP8 layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dllm_compile.capture import capture
from dllm_compile.fp8_weights import GROUPS
from dllm_compile.passes import FUSE, NORMALIZE, PassResult, flatten_rows_pass, run_passes
from dllm_compile.passes.graph import share
from dllm_compile.passes.packing import packed
from dllm_compile.passes.quantize_ffn_fp8 import quantize_ffn_fp8_pass
from dllm_compile.runtime.layout import tile_table
from tests.conftest import tiny_model

SIZES: dict[str, Any] = {"d_model": 128, "n_heads": 2, "n_kv_heads": 1, "mlp_hidden_size": 256, "n_layers": 3}


def wide_model(**changes: Any) -> nn.Module:
    return tiny_model(**{**SIZES, **changes})


def canonical_of(model: nn.Module, *, pack: bool = True) -> tuple[GraphModule, int]:
    """The canonical graph with its weights in place, and the number of layers."""
    captured = capture(model, model.config.max_sequence_length, model.config.vocab_size)
    run_passes(captured.gm, (*NORMALIZE, *(FUSE if pack else ())), layers=captured.layers)
    with packed(captured.gm):
        pass
    return captured.gm, captured.layers


@functools.cache
def _wide(options: tuple[tuple[str, Any], ...], pack: bool) -> tuple[nn.Module, GraphModule, int]:
    model = wide_model(**dict(options))
    return model, *canonical_of(model, pack=pack)


def wide(*, pack: bool = True, **changes: Any) -> tuple[nn.Module, GraphModule, int]:
    """A model, its canonical graph and its number of layers. The model is shared: leave it alone."""
    model, gm, layers = _wide(tuple(sorted(changes.items(), key=lambda item: item[0])), pack)
    return model, share(gm), layers


def quantize(
    gm: GraphModule,
    layers: int,
    *,
    granularity: str = "group",
    skip: tuple[int, ...] = (0,),
    linears: str = "ffn",
    strict: bool = True,
) -> PassResult:
    step = quantize_ffn_fp8_pass(GROUPS[granularity], skip, linears, required=True)
    (result,) = run_passes(gm, (step,), layers=layers, strict=strict)
    return result


def flatten(gm: GraphModule, layers: int) -> None:
    run_passes(gm, (flatten_rows_pass(0),), layers=layers)


def rows(*lengths: int, vocab: int = 120) -> dict[str, Tensor]:
    """Inputs of a forward program."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return {
        "ids": torch.randint(0, vocab, (sum(lengths),), generator=generator),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "tiles": tile_table(torch.tensor(lengths), None),
    }
