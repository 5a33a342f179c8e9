# SPDX-License-Identifier: Apache-2.0
"""The two kernels of a cached step against what they replace, at the 8B shape, in one run.

`qkv`: packed projection, rotation and cache write: one GEMM and `dllm::qkv_rope_cache_write`, against three GEMMs,
rotation and two index writes, eager and compiled. `attention`: `dllm::row_attention` over the cache, against
`scaled_dot_product_attention` of a rectangular batch, by back end. Weights and caches rotate among several sets, so
that the L2 does not help.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dllm_compile.kernels.rope import rope_reference
from dllm_compile.runtime.layout import tile_table

from .timing import interleaved, replayable

HEADS, HEAD_DIM, WIDTH, KEYS = 32, 128, 4096, 1280
# (samples, query rows of each)
CASES = ((1, 32), (1, 128), (8, 128), (32, 128))
SETS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tile-rows", type=int, default=64)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time both kernels for every case."""
    if not torch.cuda.is_available():
        raise SystemExit("cache-kernels measures CUDA kernels: run it on a card")
    rows = []
    for samples, query in CASES:
        for measure in (_qkv, _attention):
            rows.append(measure(samples, query, arguments))
            print(rows[-1], flush=True)
    return rows


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1


def _tables() -> tuple[Tensor, Tensor]:
    angles = torch.arange(KEYS, device="cuda")[:, None] * 1e4 ** (
        -torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM
    )
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def _unfused(
    x: Tensor, weights: list[Tensor], tables: tuple[Tensor, Tensor], rows: Tensor, caches: list[Tensor]
) -> Tensor:
    cos, sin, positions = *tables, rows % KEYS
    q, k, v = (F.linear(x, weight) for weight in weights)
    q, k = (rope_reference(part, cos, sin, positions, HEADS) for part in (q, k))
    caches[0].index_copy_(0, rows, k)
    caches[1].index_copy_(0, rows, v.unflatten(-1, (HEADS, HEAD_DIM)))
    return q


def _in_turn(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    def call() -> None:
        for one in calls:
            one()

    return call


@torch.no_grad()
def _qkv(samples: int, query: int, arguments: argparse.Namespace) -> dict[str, Any]:
    count = samples * query
    tables = _tables()
    rows = torch.cat([torch.randperm(KEYS, device="cuda")[:query] + KEYS * s for s in range(samples)])
    positions = rows % KEYS
    x = _random(count, WIDTH)
    packed = [_random(3 * WIDTH, WIDTH) for _ in range(SETS)]
    caches = [[_random(samples * KEYS, HEADS, HEAD_DIM) for _ in range(2)] for _ in range(SETS)]
    compiled = torch.compile(_unfused, dynamic=False)
    operator = torch.ops.dllm.qkv_rope_cache_write

    def fused(weight: Tensor, cache: list[Tensor]) -> Tensor:
        return operator(F.linear(x, weight), *tables, positions, rows, *cache, HEADS, HEADS)

    separate = [list(weight.chunk(3)) for weight in packed]
    variants: dict[str, Callable[[int], Callable[[], Any]]] = {
        "unfused, eager": lambda i: lambda: _unfused(x, separate[i], tables, rows, caches[i]),
        "unfused, compiled": lambda i: lambda: compiled(x, separate[i], tables, rows, caches[i]),
        "packed GEMM alone": lambda i: lambda: F.linear(x, packed[i]),
        "packed GEMM + fused write": lambda i: lambda: fused(packed[i], caches[i]),
    }
    times = _timed(variants, arguments)
    extra = times["packed GEMM + fused write"] - times["packed GEMM alone"]
    moved = count * WIDTH * 2 * 6
    return _row("qkv", samples, query, times, {"fused_write_us": extra, "fused_write_TBps": moved / extra / 1e6})


@torch.no_grad()
def _attention(samples: int, query: int, arguments: argparse.Namespace) -> dict[str, Any]:
    q = _random(samples * query, HEADS, HEAD_DIM)
    caches = [[_random(samples * KEYS, HEADS, HEAD_DIM) for _ in range(2)] for _ in range(SETS)]
    tiles = tile_table(torch.full((samples,), query), arguments.tile_rows)
    span = tiles[:, 2].div(query, rounding_mode="floor") * KEYS
    tiles = torch.stack((tiles[:, 0], tiles[:, 1], span, span + KEYS), dim=1).int().cuda()

    def rectangular(x: Tensor) -> Tensor:
        return x.view(samples, -1, HEADS, HEAD_DIM).transpose(1, 2)

    def sdpa(backend: SDPBackend, cache: list[Tensor]) -> Callable[[], Any]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*map(rectangular, (q, *cache)))

        return call

    variants: dict[str, Callable[[int], Callable[[], Any]]] = {
        "SDPA flash": lambda i: sdpa(SDPBackend.FLASH_ATTENTION, caches[i]),
        "SDPA cuDNN": lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, caches[i]),
        "row_attention": lambda i: lambda: torch.ops.dllm.row_attention(q, *caches[i], tiles, arguments.tile_rows),
    }
    times = _timed(variants, arguments)
    moved = 2 * samples * (KEYS + query) * WIDTH * 2
    return _row("attention", samples, query, times, {"row_attention_TBps": moved / times["row_attention"] / 1e6})


def _timed(variants: dict[str, Callable[[int], Callable[[], Any]]], arguments: argparse.Namespace) -> dict[str, float]:
    """Microseconds of one call of each variant, from graph replays over all sets."""
    graphs = {name: replayable(_in_turn([make(i) for i in range(SETS)])) for name, make in variants.items()}
    figures = interleaved(graphs, rounds=arguments.rounds, inner=5)
    return {name: 1e3 * figure["median_ms"] / SETS for name, figure in figures.items()}


def _row(kind: str, samples: int, query: int, times: dict[str, float], extra: dict[str, float]) -> dict[str, Any]:
    rounded = {name: round(value, 2) for name, value in {**times, **extra}.items()}
    return {"kernel": kind, "samples": samples, "rows": samples * query, "keys": KEYS, "unit": "us", **rounded}
