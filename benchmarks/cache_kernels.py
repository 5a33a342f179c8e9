# SPDX-License-Identifier: Apache-2.0
"""The kernels of a cached step against what they replace, at the 8B shape, in one run.

`qkv`: packed projection, rotation and cache write: one GEMM and `dllm::qkv_rope_cache_write`, against three GEMMs,
rotation and two index writes, eager and compiled. `attention`: `dllm::cached_attention` over the cache, against
`scaled_dot_product_attention` of a rectangular batch, by back end; with scores, inside and by a kernel of their own.
`layer`: all of it, from the normed rows to the attended ones. Weights and caches rotate among several sets, so that
the L2 does not help.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .cached_step import CASES, KEYS, SETS, WIDTH, Step, Variants, random, timed, unfused

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--rounds", type=int, default=15)


@torch.no_grad()
def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the kernels for every case."""
    if not torch.cuda.is_available():
        raise SystemExit("cache-kernels measures CUDA kernels: run it on a card")
    rows = []
    for samples, query in CASES:
        step = Step(samples, query)
        torch._dynamo.reset()  # sizes are constants, as a compiler likes them best
        compiled = torch.compile(unfused, dynamic=False)
        for measure in (_qkv, _attention, _layer):
            rows.append(measure(step, compiled, arguments))
            print(rows[-1], flush=True)
        del step
        torch.cuda.empty_cache()
    return rows


def _qkv(step: Step, compiled: Callable[..., Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    projected = [random(len(step.x), 3 * WIDTH) for _ in range(SETS)]
    variants: Variants = {
        "unfused, eager": lambda i: lambda: step.unfused_write(i, unfused),
        "unfused, compiled": lambda i: lambda: step.unfused_write(i, compiled),
        "packed GEMM alone": lambda i: lambda: step.project(i),
        "packed GEMM + fused write": lambda i: lambda: step.write(step.project(i), i),
        "fused write alone": lambda i: lambda: step.write(projected[i], i),
    }
    times = timed(variants, arguments)
    moved = len(step.x) * WIDTH * 2 * 6
    behind = times["packed GEMM + fused write"] - times["packed GEMM alone"]
    extra = {"fused_write_behind_GEMM_us": behind, "fused_write_TBps": moved / times["fused write alone"] / 1e6}
    return step.row("qkv", times, extra)


def _attention(step: Step, _: Callable[..., Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    q = random(len(step.x), WIDTH).unflatten(1, (-1, 128))

    def scored_apart(i: int) -> Tensor:
        step.score(q, i)
        return step.attend(q, i)

    variants: Variants = {
        "SDPA flash": lambda i: lambda: step.sdpa(q, i, FLASH),
        "SDPA cuDNN": lambda i: lambda: step.sdpa(q, i, CUDNN),
        "cached_attention": lambda i: lambda: step.attend(q, i),
        "row_attention_scored": lambda i: lambda: step.attend_scored(q, i),
        "row_scores + cached_attention": lambda i: lambda: scored_apart(i),
    }
    times = timed(variants, arguments)
    moved = 2 * (step.samples * KEYS + len(q)) * WIDTH * 2
    return step.row("attention", times, {"cached_attention_TBps": moved / times["cached_attention"] / 1e6})


def _layer(step: Step, compiled: Callable[..., Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    def plain(i: int, write: Callable[..., Tensor], backend: SDPBackend, scored: bool = False) -> Tensor:
        q = step.unfused_write(i, write)
        if scored:
            step.unfused_score(q, i)
        return step.sdpa(q, i, backend)

    def fused(i: int, attend: Callable[[Tensor, int], Tensor]) -> Tensor:
        return attend(step.write(step.project(i), i), i)

    variants: Variants = {
        "unfused, eager": lambda i: lambda: plain(i, unfused, FLASH),
        "unfused, compiled": lambda i: lambda: plain(i, compiled, FLASH),
        "unfused, compiled, cuDNN": lambda i: lambda: plain(i, compiled, CUDNN),
        "fused": lambda i: lambda: fused(i, step.attend),
        "fused, cuDNN": lambda i: lambda: fused(i, lambda q, j: step.sdpa(q, j, CUDNN)),
        "unfused, eager, scored": lambda i: lambda: plain(i, unfused, FLASH, scored=True),
        "unfused, compiled, cuDNN, scored": lambda i: lambda: plain(i, compiled, CUDNN, scored=True),
        "fused, scored": lambda i: lambda: fused(i, step.attend_scored),
    }
    times = timed(variants, arguments)
    ratios = {f"{name} / fused": time / times["fused"] for name, time in times.items() if name.startswith("unfused")}
    for name in [name for name in ratios if "scored" in name]:
        ratios[f"{name}, scored"] = times[name.removesuffix(" / fused")] / times["fused, scored"]
        del ratios[name]
    return step.row("layer", times, ratios)
