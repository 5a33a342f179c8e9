# SPDX-License-Identifier: Apache-2.0
"""The tables of `fp8-kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile.kernels import add_rms_norm_triton, fp8_linear_triton, swiglu_quant_triton
from dllm_compile.kernels.fp8_format import FP8, quantize_activation, quantize_weight
from dllm_compile.kernels.fp8_linear import block_scaled_mm
from dllm_compile.kernels.fp8_support import has_block_scaled_mm
from dllm_compile.kernels.rms_norm import rms_norm_reference

from .timing import interleaved, replayable

WIDTH, FFN = 4096, 12288
SHAPES = {"gate+up": (2 * FFN, WIDTH), "down": (WIDTH, FFN), "QKV": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
ROWS = (16, 32, 64, 128, 160, 256, 512, 1024, 4096)
DRAM_TBPS = 4.35  # what a sum over 4 GiB reads on an H200
EPS = 1e-5
BF16 = torch.bfloat16
Call = Callable[[], Any]


def random_rows(*shape: int) -> Tensor:
    """bf16 numbers on the card."""
    return torch.randn(shape, device="cuda", dtype=BF16)


def sets_for(nbytes: int, least: int = 2) -> int:
    """How many copies of operands of that size together are far larger than the L2."""
    return max(least, min(32, 2**28 // nbytes + 1))


def fp8_weights(outs: int, width: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of weights that differ."""
    first = quantize_weight(random_rows(outs, width) / width**0.5, 128)
    numbers = first[0].view(torch.uint8)  # torch does not roll FP8
    return [(numbers.roll(128 * index, 0).view(FP8), first[1].roll(index, 0)) for index in range(count)]


def bf16_weights(outs: int, width: int, count: int) -> list[Tensor]:
    """Weights that differ."""
    first = random_rows(outs, width) / width**0.5
    return [first.roll(index, 0) for index in range(count)]


def timed(variants: dict[str, list[Call]], rounds: int) -> dict[str, float]:
    """Microseconds of one call of each variant, from graph replays that make all its calls in turn."""

    def in_turn(calls: list[Call]) -> Call:
        def call() -> None:
            for one in calls:
                one()

        return call

    graphs = {name: replayable(in_turn(calls)) for name, calls in variants.items()}
    figures = interleaved(graphs, rounds=rounds, inner=3)
    return {name: 1e3 * figure["median_ms"] / len(variants[name]) for name, figure in figures.items()}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3 if value < 10 else 2) for name, value in figures.items()}


def _products(rounds: int) -> list[dict[str, Any]]:
    library = has_block_scaled_mm(torch.device("cuda", torch.cuda.current_device()))
    table = []
    for name, (outs, width) in SHAPES.items():
        count = sets_for(outs * width)
        fp8, bf16 = fp8_weights(outs, width, count), bf16_weights(outs, width, max(2, count // 2))
        for rows in ROWS:
            x = random_rows(rows, width)
            codes, scales = quantize_activation(x, 128)
            variants: dict[str, list[Call]] = {
                "bf16": [lambda w=w, x=x: F.linear(x, w) for w in bf16],
                "fp8_linear": [lambda w=w, c=codes, s=scales: torch.ops.dllm.fp8_linear(c, s, *w, BF16) for w in fp8],
            }
            if library:
                variants["scaled_mm"] = [lambda w=w, c=codes, s=scales: block_scaled_mm(c, s, *w) for w in fp8]
            tiling = fp8_linear_triton.choose_tiling(rows, outs, width)
            if tiling is not None and tiling.parts > 1:
                variants["parts, not summed"] = [
                    lambda w=w, c=codes, s=scales, t=tiling: fp8_linear_triton.fp8_linear_parts(c, s, *w, t)
                    for w in fp8
                ]
            times = timed(variants, rounds)
            floor = (outs * width + rows * width + rows * outs * 2) / DRAM_TBPS / 1e6
            ratios = {"speedup": times["bf16"] / times["fp8_linear"], "memory_floor": floor}
            table.append({"layer": name, "rows": rows, **_rounded({**times, **ratios})})
    return table


def _products_and_norms(rounds: int) -> list[dict[str, Any]]:
    """What follows attention and what follows the activation, with the norm that comes next."""
    ops = torch.ops.dllm
    table = []
    gain = random_rows(WIDTH)
    for name, width in (("out", WIDTH), ("down", FFN)):
        count = sets_for(WIDTH * width)
        fp8, bf16 = fp8_weights(WIDTH, width, count), bf16_weights(WIDTH, width, max(2, count // 2))
        for rows in (16, 32, 64, 128, 160, 1024):
            x, residual = random_rows(rows, width), random_rows(rows, WIDTH)
            codes, scales = quantize_activation(x, 128)

            def separate(w: Tensor, x: Tensor = x, residual: Tensor = residual) -> Any:
                return add_rms_norm_triton.add_rms_norm_triton(F.linear(x, w), residual, gain, EPS)

            def fused(w: Tensor, x: Tensor = x, residual: Tensor = residual) -> Any:
                return ops.linear_add_rms_norm(x, w, residual, gain, EPS)

            def quantized(w: Tensor, x: Tensor = x, residual: Tensor = residual) -> Any:
                return ops.linear_add_rms_norm_quant(x, w, residual, gain, EPS, 128)

            def in_fp8(w: tuple[Tensor, Tensor], c: Tensor = codes, s: Tensor = scales, r: Tensor = residual) -> Any:
                return ops.fp8_linear_add_rms_norm(c, s, *w, r, gain, EPS)

            variants: dict[str, list[Call]] = {
                "bf16 product, then add+norm": [lambda w=w, call=separate: call(w) for w in bf16],
                "linear_add_rms_norm": [lambda w=w, call=fused: call(w) for w in bf16],
                "linear_add_rms_norm_quant": [lambda w=w, call=quantized: call(w) for w in bf16],
                "fp8_linear_add_rms_norm": [lambda w=w, call=in_fp8: call(w) for w in fp8],
            }
            table.append({"layer": name, "rows": rows, **_rounded(timed(variants, rounds))})
    return table


def _bf16_ffn(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=1)
    return F.linear(F.silu(gate) * up, down)


def _bf16_half_layer(x: Tensor, residual: Tensor, gate_up: Tensor, down: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    total = total + _bf16_ffn(rms_norm_reference(total, gain, EPS), gate_up, down)
    return total, rms_norm_reference(total, gain, EPS)


def _feed_forward(rounds: int) -> list[dict[str, Any]]:
    ops = torch.ops.dllm
    count = 2
    bf16 = list(zip(bf16_weights(2 * FFN, WIDTH, count), bf16_weights(WIDTH, FFN, count), strict=True))
    fp8 = list(zip(fp8_weights(2 * FFN, WIDTH, count), fp8_weights(WIDTH, FFN, count), strict=True))
    gain = random_rows(WIDTH)
    compiled_ffn = torch.compile(_bf16_ffn, dynamic=True)
    compiled_half = torch.compile(_bf16_half_layer, dynamic=True)

    def fp8_ffn(x: Tensor, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> Tensor:
        packed = ops.fp8_linear(*ops.quantize(x, 128), *gate_up, BF16)
        return ops.fp8_linear(*ops.swiglu_quant(packed[:, :FFN], packed[:, FFN:], 128), *down, BF16)

    def fp8_half(x: Tensor, residual: Tensor, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> Any:
        total, codes, scales = ops.add_rms_norm_quant(x, residual, gain, EPS, 128)
        packed = ops.fp8_linear(codes, scales, *gate_up, BF16)
        activated = ops.swiglu_quant(packed[:, :FFN], packed[:, FFN:], 128)
        return ops.fp8_linear_add_rms_norm(*activated, *down, total, gain, EPS)

    table = []
    for rows in ROWS:
        x, residual = random_rows(rows, WIDTH), random_rows(rows, WIDTH)
        variants: dict[str, list[Call]] = {
            "bf16 ffn": [lambda w=w, x=x: compiled_ffn(x, *w) for w in bf16],
            "fp8 ffn": [lambda w=w, x=x: fp8_ffn(x, *w) for w in fp8],
            "bf16 with norms": [lambda w=w, x=x, r=residual: compiled_half(x, r, *w, gain) for w in bf16],
            "fp8 with norms": [lambda w=w, x=x, r=residual: fp8_half(x, r, *w) for w in fp8],
        }
        times = timed(variants, rounds)
        ratios = {
            "speedup": times["bf16 ffn"] / times["fp8 ffn"],
            "speedup with norms": times["bf16 with norms"] / times["fp8 with norms"],
        }
        table.append({"rows": rows, **_rounded({**times, **ratios})})
    return table


def _row_kernels(rounds: int) -> list[dict[str, Any]]:
    gain = random_rows(WIDTH)
    table = []
    for rows in (128, 1024, 4096):
        elements = rows * WIDTH
        # Reads and writes of each, once: rows in bf16 2 bytes, codes 1, partial sums 4, scales 4 a group of 128.
        cases: dict[str, tuple[float, Callable[[int], list[Call]]]] = {
            "add_rms_norm": (elements * 8, lambda n, m=rows: _norm_calls(n, m, gain, 0, quantize=False)),
            "add_rms_norm_quant": (elements * (7 + 4 / 128), lambda n, m=rows: _norm_calls(n, m, gain, 0)),
            "swiglu_quant": (rows * FFN * (5 + 4 / 128), lambda n, m=rows: _swiglu_calls(n, m)),
            "quantize": (elements * (3 + 4 / 128), lambda n, m=rows: _quantize_calls(n, m)),
        }
        if rows == 128:
            for parts in (2, 4, 8):
                moved = elements * (5 + 4 * parts + 4 / 128)
                cases[f"add_rms_norm_quant of {parts} parts"] = (
                    moved,
                    lambda n, m=rows, p=parts: _norm_calls(n, m, gain, p),
                )
        times = timed({name: make(sets_for(int(moved))) for name, (moved, make) in cases.items()}, rounds)
        for name, (moved, _) in cases.items():
            floor = moved / DRAM_TBPS / 1e6
            figures = {"time": times[name], "TBps": moved / times[name] / 1e6, "floor": floor}
            table.append({"kernel": name, "rows": rows, **_rounded(figures), "of_floor": round(floor / times[name], 3)})
    return table


def _norm_calls(count: int, rows: int, gain: Tensor, parts: int, quantize: bool = True) -> list[Call]:
    launch = add_rms_norm_triton.add_rms_norm_quant_triton if quantize else add_rms_norm_triton.add_rms_norm_triton
    calls: list[Call] = []
    for _ in range(count):
        residual = random_rows(rows, WIDTH)
        product = torch.randn(parts, rows, WIDTH, device="cuda") if parts else random_rows(rows, WIDTH)
        calls.append(lambda p=product, r=residual: launch(p, r, gain, EPS))
    return calls


def _swiglu_calls(count: int, rows: int) -> list[Call]:
    packed = [random_rows(rows, 2 * FFN) for _ in range(count)]
    return [lambda x=x: swiglu_quant_triton.swiglu_quant_triton(x[:, :FFN], x[:, FFN:]) for x in packed]


def _quantize_calls(count: int, rows: int) -> list[Call]:
    return [
        lambda x=x: swiglu_quant_triton.swiglu_quant_triton(x, None)
        for x in (random_rows(rows, WIDTH) for _ in range(count))
    ]


TABLES: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "product": _products,
    "next": _products_and_norms,
    "ffn": _feed_forward,
    "rows": _row_kernels,
}
"""By name: takes the rounds of each timing, returns rows of figures."""
