# SPDX-License-Identifier: Apache-2.0
"""What the card tests of attention share: inputs, tables as a step has them, bounds that follow from roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dllm_compile.kernels.cached_attention import ARRIVALS

from .cases import dense_attention, packed_heads, tiles_of


def on_card(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Move to the card and keep the strides (`.cuda()` of a slice makes it contiguous)."""

    def move(x: Tensor) -> Tensor:
        base = x._base if x._base is not None else x
        return base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())

    return tuple(map(move, tensors))


def step_table(samples: list[tuple[int, int]], tile_rows: int, pad: int = 0) -> Tensor:
    """The table of a step: `rows // tile_rows + samples + 1` tiles, of which the last ones are empty."""
    table = tiles_of(samples, tile_rows, pad)
    rows = sum(sample[0] for sample in samples) + pad
    empty = torch.tensor([[rows, rows, 0, 0]], dtype=torch.int32)
    return torch.cat((table, empty.expand(rows // tile_rows + len(samples) + 1 - len(table), -1))).cuda()


def cached_inputs(
    samples: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tile_rows: int = 128,
    pad: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (a slice), contiguous k and v with a spare row, and the table of a step over (rows, keys) of each sample."""
    rows, keys = sum(s[0] for s in samples) + pad, sum(s[1] for s in samples) + 1
    q, k, v = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype)
    return *on_card(q, k.contiguous(), v.contiguous()), step_table(samples, tile_rows, pad)


def assert_within_rounding(out: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor) -> None:
    """Compare with the fp64 definition."""
    expected = dense_attention(q, k, v, tiles)
    # Each weight and each result is rounded to the dtype once: two relative errors of half a unit in the last place,
    # the first weighted by |v|. The rest (fp32 scores, exp2, sums) is a few 1e-6.
    magnitude = dense_attention(q, k, v.abs(), tiles)
    unit = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[out.dtype]
    bound = (unit + 1e-5) * magnitude + 1e-6
    excess = ((out.double() - expected).abs() - bound).max().item()
    assert excess <= 0, f"{excess} above the bound"


def counters() -> Tensor:
    """Zeros for `cached_attention`."""
    return torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")


def replayed(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`call` in a CUDA graph, and what it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out
