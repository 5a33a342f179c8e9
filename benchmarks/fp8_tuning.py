# SPDX-License-Identifier: Apache-2.0
"""Neighbours of the FP8 operators' launch configurations, timed beside each other (`fp8-kernels --tune`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.errors import OutOfResources

from dllm_compile.kernels import add_rms_norm_triton as norm
from dllm_compile.kernels import fp8_linear_triton as fp8
from dllm_compile.kernels import linear_triton as linear
from dllm_compile.kernels import swiglu_quant_triton as swiglu
from dllm_compile.kernels.fp8_format import quantize_activation

from .fp8_tables import BF16, EPS, FFN, SHAPES, WIDTH, Call, bf16_weights, fp8_weights, random_rows, sets_for, timed

GEMM_ROWS, ROW_KERNEL_ROWS = (16, 32, 64, 128), (128, 1024, 4096)
Candidates = dict[str, Callable[[], list[Call]]]


def tune(shapes: list[str] | None, rows: list[int] | None, rounds: int) -> list[dict[str, Any]]:
    """Time the neighbours for every shape and row count.

    Args:
        shapes: of `SHAPES`, or "out-bf16", "norm", "swiglu"; all if None.
        rows: row counts; the usual ones if None.
        rounds: of each timing.

    Returns:
        One row a shape and row count: the shipped configuration's time, and all others that could be launched, the best
        first. Products whose K is cut are timed without the sum of the parts.
    """
    makers: dict[str, Callable[[int], Candidates]] = {
        **{name: lambda m, name=name: _fp8_candidates(name, m) for name in SHAPES},
        "out-bf16": _bf16_candidates,
        "norm": _norm_candidates,
        "swiglu": _swiglu_candidates,
    }
    table = []
    for name in shapes or makers:
        for count in rows or (ROW_KERNEL_ROWS if name in ("norm", "swiglu") else GEMM_ROWS):
            candidates = makers[name](count)
            variants = {label: calls for label, make in candidates.items() if (calls := _launchable(make)) is not None}
            times = sorted(timed(variants, rounds).items(), key=lambda item: item[1])
            shipped = next((round(time, 2) for label, time in times if label.startswith("shipped")), None)
            found = {label: round(time, 2) for label, time in times}
            table.append({"table": "tune", "shape": name, "rows": count, "unit": "us", "shipped": shipped, **found})
            print(f"{name} {count}: shipped {shipped}, best {times[0][0]} {times[0][1]:.2f}", flush=True)
    return table


def _launchable(make: Callable[[], list[Call]]) -> list[Call] | None:
    """The calls, or None if the configuration does not fit into a multiprocessor."""
    calls = make()
    try:
        calls[0]()
    except OutOfResources:
        return None
    return calls


def _label(config: tuple[Any, ...], shipped: tuple[Any, ...] | None) -> str:
    return ("shipped " if config == shipped else "") + "x".join(str(value) for value in config)


def _fp8_neighbours(base: fp8.Tiling, groups: int) -> Iterator[fp8.Tiling]:
    yield base
    for change in (
        {"stages": base.stages - 1},
        {"stages": base.stages + 1},
        {"stages": base.stages + 2},
        {"warps": 12 - base.warps},  # 4 and 8
        {"outs": 192 - base.outs},  # 64 and 128
        {"swap": not base.swap},
        {"rotate": 0 if base.rotate else 3},
        {"rotate": 1},
        {"parts": base.parts * 2},
        {"parts": max(1, base.parts // 2)},
        {"parts": base.parts * 2, "outs": 64},
    ):
        tiling = base._replace(**change)
        if tiling != base and tiling.parts <= groups and tiling.stages > 1:
            yield tiling


def _fp8_candidates(name: str, rows: int) -> Candidates:
    outs, width = SHAPES[name]
    shipped = fp8.choose_tiling(rows, outs, width)
    base = shipped or fp8.Tiling(min(128, max(16, rows)), 128, 1, 4, 8 if rows > 64 else 4, False, 3)
    weights = fp8_weights(outs, width, sets_for(outs * width))
    codes, scales = quantize_activation(random_rows(rows, width), 128)

    def make(tiling: fp8.Tiling) -> list[Call]:
        if tiling.parts > 1:
            return [lambda w=w: fp8.fp8_linear_parts(codes, scales, *w, tiling) for w in weights]
        return [lambda w=w: fp8.fp8_linear_triton(codes, scales, *w, BF16, tiling) for w in weights]

    tilings = dict.fromkeys(_fp8_neighbours(base, width // 128))
    return {_label(tiling, shipped): lambda t=tiling: make(t) for tiling in tilings}


def _bf16_candidates(rows: int) -> Candidates:
    shipped = linear.choose_part_tiling(BF16, rows, WIDTH, WIDTH)
    base = shipped or linear.PartTiling(128, 64, 64, 2, 8, 4, False)
    weights, x = bf16_weights(WIDTH, WIDTH, sets_for(2 * WIDTH * WIDTH)), random_rows(rows, WIDTH)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"stages": base.stages - 1},
        {"stages": base.stages + 1},
        {"parts": base.parts * 2},
        {"parts": base.parts // 2},
        {"outs": 192 - base.outs},
        {"width": 192 - base.width},
        {"swap": not base.swap},
        {"warps": 8},
    )
    tilings = dict.fromkeys(base._replace(**change) for change in changes)
    return {
        _label(t, shipped): lambda t=t: [lambda w=w: linear.linear_parts_triton(x, w, t) for w in weights]
        for t in tilings
    }


def _norm_candidates(rows: int) -> Candidates:
    shipped, gain = norm.choose_row_config(rows, WIDTH), random_rows(WIDTH)
    moved = rows * WIDTH * 7
    operands = [(random_rows(rows, WIDTH), random_rows(rows, WIDTH)) for _ in range(sets_for(moved))]

    def make(config: norm.RowConfig) -> list[Call]:
        return [lambda o=o: norm.add_rms_norm_quant_triton(*o, gain, EPS, config) for o in operands]

    configs = [norm.RowConfig(warps) for warps in (2, 4, 8, 16)]
    return {_label(config, shipped): lambda c=config: make(c) for config in configs}


def _swiglu_candidates(rows: int) -> Candidates:
    shipped = swiglu.choose_rectangle(rows)
    packed = [random_rows(rows, 2 * FFN) for _ in range(sets_for(rows * FFN * 5))]

    def make(config: swiglu.Rectangle) -> list[Call]:
        return [lambda x=x: swiglu.swiglu_quant_triton(x[:, :FFN], x[:, FFN:], config) for x in packed]

    sizes = ((4, 128, 4), (8, 128, 4), (16, 128, 4), (4, 256, 4), (8, 256, 4), (8, 256, 8), (8, 512, 8), (4, 512, 4))
    configs = [swiglu.Rectangle(*size) for size in (*sizes, (2, 1024, 8), (4, 1024, 8))]
    return {_label(config, shipped): lambda c=config: make(c) for config in configs}
