# SPDX-License-Identifier: Apache-2.0
"""The kernels of the FP8 operators in Triton's interpreter; see `interpreted.py`.

FP8 loads and FP8 products are right there, the cast to FP8 is not: where a kernel quantizes, it gets an fp32 buffer for
its codes and is judged by the values before the cast.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile.kernels import add_rms_norm_triton as norm
from dllm_compile.kernels import swiglu_quant_triton as swiglu
from dllm_compile.kernels.fp8_format import FP8, empty_scales, quantize_activation
from dllm_compile.kernels.fp8_linear_triton import Tiling, fp8_linear_parts, fp8_linear_triton
from dllm_compile.kernels.linear_triton import PartTiling, linear_parts_triton
from dllm_compile.kernels.rms_norm import rms_norm_reference
from dllm_compile.kernels.swiglu import swiglu_reference
from tests.kernels.fp8_cases import dense_linear, exact_gates, exact_rows, linear_inputs, row_errors

EPS = 1e-5

# A name, then rows, width, parts (0: a finished product).
NORM = {
    "one group": (3, 128, 0),
    "one row, two parts": (1, 256, 2),
    "one part": (2, 128, 1),
    "width no power of two": (5, 384, 0),
    "four parts, width no power of two": (4, 640, 4),
    "eight parts": (2, 256, 8),
}

# A name, then rows, width, rectangle; None for the chosen one.
SWIGLU = {
    "one row": (1, 128, (8, 128, 4)),
    "ragged rows": (11, 256, (8, 128, 4)),
    "ragged columns": (9, 384, (8, 256, 4)),
    "rectangle larger than all": (2, 128, (8, 512, 8)),
    "chosen rectangle": (10, 384, None),
}

# A name, then rows, outs, width, tiling; None for the chosen one.
LINEAR = {
    "one row, swapped": (1, 128, 128, Tiling(16, 128, 1, 2, 4, True, 0)),
    "ragged rows, swapped, turned": (21, 256, 640, Tiling(16, 64, 1, 2, 4, True, 3)),
    "ragged rows, turned": (37, 256, 384, Tiling(32, 128, 1, 2, 4, False, 3)),
    "parts of unequal length": (5, 128, 896, Tiling(16, 128, 4, 3, 4, True, 3)),
    "parts, several row tiles": (40, 128, 512, Tiling(16, 64, 2, 2, 4, False, 1)),
    "a part of one step": (3, 128, 256, Tiling(16, 128, 2, 2, 4, True, 7)),
    "chosen, 16": (9, 128, 2048, None),
    "chosen, 64": (33, 128, 256, None),
}

# A name, then rows, outs, width, tiling.
PARTS = {
    "one row, swapped": (1, 128, 64, PartTiling(16, 64, 32, 2, 2, 4, True)),
    "ragged everything, swapped": (19, 131, 104, PartTiling(16, 32, 32, 4, 3, 4, True)),
    "ragged everything": (37, 100, 77, PartTiling(32, 64, 16, 2, 2, 4, False)),
    "unequal parts": (3, 64, 112, PartTiling(16, 64, 16, 4, 2, 4, True)),
}


def run_norm(product: Tensor, residual: Tensor, weight: Tensor, quantize: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch with an fp32 buffer for what would be codes."""
    total, normed = torch.full_like(residual, torch.nan), torch.full(residual.shape, torch.nan)
    scales = empty_scales(residual, 128).fill_(torch.nan) if quantize else None
    config = norm.choose_row_config(*residual.shape)
    plan = norm.plan_add_rms_norm(product, residual, weight, EPS, total, normed, scales, config)
    grid, arguments, constants = plan
    norm.add_rms_norm_kernel[grid](*arguments, **constants)
    return total, normed, scales


def code_values(before: Tensor) -> Tensor:
    """What the codes would be worth."""
    return before.to(FP8).float()


def cut(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Partial sums of about x, integers if x has such, and their sum in their order."""
    pieces = torch.randint(-8, 9, (parts, *x.shape), generator=torch.Generator().manual_seed(2)).float()
    pieces[-1] = x
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return pieces, total


def compare_norm() -> dict[str, dict[str, float]]:
    """Differences from the reference: of sums that are exact in any order, and of random numbers."""
    found: dict[str, dict[str, float]] = {}
    for name, (rows, width, parts) in NORM.items():
        for kind in ("exact", "random"):
            x, residual, weight = exact_rows(rows, width, torch.float32)
            if kind == "random":
                x, residual = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(1))
            product = F.pad(x, (0, 3))[:, :width]  # rows with gaps
            if parts:
                product, x = cut(x, parts)
            expected = residual + x
            normed = rms_norm_reference(expected, weight, EPS)
            codes, expected_scales = quantize_activation(normed, 128)
            total, plain, _ = run_norm(product, residual, weight, False)
            same_total, before, scales = run_norm(product, residual, weight, True)
            assert scales is not None
            found[f"{name}, {kind}"] = {
                "total": (total != expected).sum().item() + (same_total != expected).sum().item(),
                "normed": ((plain - normed).abs() / (normed.abs() + 1e-30)).max().item(),
                "scales": ((scales - expected_scales).abs() / expected_scales).max().item(),
                "codes": (code_values(before) != codes.float()).sum().item(),
                "beyond": (before.abs() > 448).sum().item(),
            }
    return found


def run_swiglu(gate: Tensor, up: Tensor | None, rectangle: tuple[int, int, int] | None) -> tuple[Tensor, Tensor]:
    """Launch with an fp32 buffer for what would be codes."""
    before, scales = torch.full(gate.shape, torch.nan), empty_scales(gate, 128).fill_(torch.nan)
    config = swiglu.Rectangle(*rectangle) if rectangle else swiglu.choose_rectangle(gate.shape[0])
    grid, arguments, constants = swiglu.plan_swiglu_quant(gate, up, before, scales, config)
    swiglu.swiglu_quant_kernel[grid](*arguments, **constants)
    return before, scales


def compare_swiglu() -> dict[str, dict[str, float]]:
    """Differences from the reference: of known products, of random ones, and of rows quantized as they are."""
    found: dict[str, dict[str, float]] = {}
    for name, (rows, width, rectangle) in SWIGLU.items():
        packed = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1))
        cases = {
            "known": exact_gates(rows, width, torch.float32),
            "random": (packed[:, :width], packed[:, width:]),
            "as it is": (packed[:, :width], None),
        }
        for kind, (gate, up) in cases.items():
            before, scales = run_swiglu(gate, up, rectangle)
            value = gate if up is None else swiglu_reference(gate, up)
            codes, expected_scales = quantize_activation(value, 128)
            exact = (value.unflatten(1, (-1, 128)) / expected_scales.unsqueeze(2)).flatten(1)
            found[f"{name}, {kind}"] = {
                "scales": ((scales - expected_scales).abs() / expected_scales).max().item(),
                "before": ((before - exact).abs() / exact.abs().clamp(min=2**-9)).max().item(),
                "codes": (code_values(before) != codes.float()).sum().item(),
            }
    return found


def look_at_edges() -> dict[str, bool]:
    """Zeros, what is not finite, the ends of fp32: as the reference has them, in every group of its own."""
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    x[0] = 0
    x[1, 3], x[2, 130], x[3, 200] = torch.nan, torch.inf, -torch.inf
    x[4, :128] = 0
    x[4, :2] = torch.tensor([3 * tiny, -tiny])
    x[5, :2] = torch.tensor([huge, -huge / 3])
    x[6, 1], x[6, 7] = torch.nan, torch.inf
    before, scales = run_swiglu(x, None, (8, 128, 4))
    codes, expected_scales = quantize_activation(x, 128)
    poisoned = ~expected_scales.isfinite()
    got = code_values(before)
    return {
        "poisoned groups": torch.equal(~scales.isfinite(), poisoned) and int(poisoned.sum()) == 4,
        "their codes": bool(torch.equal(got.isnan(), codes.float().isnan())),
        "other codes": torch.equal(got.nan_to_num(7.0), codes.float().nan_to_num(7.0)),
        "other scales": torch.equal(scales[~poisoned], expected_scales[~poisoned]),
    }


def linear_errors() -> dict[str, float]:
    """Largest error of a row against fp64, relative to its largest number; through descriptors and pointers."""
    errors = {}
    for name, (rows, outs, width, tiling) in LINEAR.items():
        arguments = linear_inputs(rows, outs, width)
        expected = dense_linear(*arguments)
        got = fp8_linear_triton(*arguments, torch.float32, tiling)
        errors[f"{name}, descriptors"] = row_errors(got, expected).max().item()
        codes, scales, weight, weight_scales = arguments
        odd = torch.empty(outs, width + 4, dtype=FP8)[:, 4:]  # no descriptor reads rows that far apart
        odd.copy_(weight)
        got = fp8_linear_triton(codes, scales.contiguous(), odd, weight_scales, torch.float32, tiling)
        errors[f"{name}, pointers"] = row_errors(got, expected).max().item()
    return errors


def part_errors() -> dict[str, float]:
    """The same for products of 16-bit and fp32 numbers."""
    errors = {}
    for name, (rows, outs, width, tiling) in PARTS.items():
        for dtype in (torch.float32, torch.float16):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(rows, width, generator=generator).to(dtype)
            weight = torch.randn(outs, width, generator=generator).to(dtype)
            parts = linear_parts_triton(x, weight, tiling)
            assert parts.shape == (tiling.parts, rows, outs)
            expected = x.double() @ weight.double().T
            errors[f"{name}, {dtype}"] = row_errors(parts.double().sum(0), expected).max().item()
    return errors


def chain() -> dict[str, float]:
    """A product cut along K whose parts are summed by the kernel of the add, against the separate steps."""
    rows, outs, width = 5, 256, 1152
    arguments = linear_inputs(rows, outs, width)
    generator = torch.Generator().manual_seed(4)
    residual, gain = torch.randn(rows, outs, generator=generator), 1 + torch.randn(outs, generator=generator) / 4
    parts = fp8_linear_parts(*arguments, Tiling(16, 64, 4, 2, 4, True, 3))
    total, normed, _ = run_norm(parts, residual, gain, False)
    expected = residual.double() + dense_linear(*arguments)
    wide = expected / (expected.pow(2).mean(1, keepdim=True) + EPS).sqrt() * gain.double()
    return {
        "total": row_errors(total, expected).max().item(),
        "normed": row_errors(normed, wide).max().item(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = {
        "norm": compare_norm(),
        "swiglu": compare_swiglu(),
        "edges": look_at_edges(),
        "linear": linear_errors(),
        "parts": part_errors(),
        "chain": chain(),
    }
    json.dump(measured, sys.stdout)
