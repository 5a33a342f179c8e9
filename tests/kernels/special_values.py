# SPDX-License-Identifier: Apache-2.0
"""Rows with zeros, NaN and infinities for every FP8 operator, and the comparison with the rule. Also used on a card."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile.kernels.add_rms_norm_quant import add_rms_norm_quant
from dllm_compile.kernels.fp8_format import dequantize, quantize_weight
from dllm_compile.kernels.fp8_linear import fp8_linear
from dllm_compile.kernels.fp8_linear_add_rms_norm import fp8_linear_add_rms_norm
from dllm_compile.kernels.linear_add_rms_norm_quant import linear_add_rms_norm_quant
from dllm_compile.kernels.quantize import quantize
from dllm_compile.kernels.quantized_linear import quantized_linear
from dllm_compile.kernels.swiglu_quant import swiglu_quant
from tests.reference import fp8_special as rule

EPS = 1e-5
NEAR = 2**-7
"""A product's rounding to bf16, or the sums of FP8 tensor cores. What is looked at is where NaN and zeros are."""
GROUPS = [128, 0, -1]
VALUES = {"zeros": 0.0, "nan": torch.nan, "inf": torch.inf, "minus inf": -torch.inf}
WIDTH = 256

STEP = 2**-3 * (1 + 2**-6)
"""Normal codes on either side of a tie are at most an eighth apart; and a rounding to bf16 in front of them."""


def rows_with(value: float, rows: int = 5, width: int = WIDTH, seed: int = 0, row: int = 2) -> Tensor:
    """Normal numbers; one number of a row is special, or a whole group of it zero. The last row is zero."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    if value == 0.0:
        x[row, 128:] = 0
    else:
        x[row, 130] = value
    x[-1] = 0
    return x


def assert_follows(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """NaN exactly where the rule says, zeros where it says, everything else near."""
    got = got.double().cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    assert (got[expected == 0] == 0).all()
    clean = expected.nan_to_num(0.0)
    assert ((got.nan_to_num(0.0) - clean).abs() <= tolerance * clean.abs().amax(1, keepdim=True)).all()


def check_quantize(value: float, group: int, dtype: torch.dtype, device: str) -> None:
    x = rows_with(value).to(device, dtype)
    codes, scales = quantize(x, group)
    assert_follows(dequantize(codes, scales), rule.quantized(x.cpu(), group), STEP)


def check_swiglu(value: float, group: int, dtype: torch.dtype, device: str) -> None:
    """A special number in `up`, then in `gate`."""
    plain = 1 + torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(1))
    for gate, up in ((plain, rows_with(value)), (rows_with(value), plain)):
        gate, up = gate.to(device, dtype), up.to(device, dtype)
        codes, scales = swiglu_quant(gate, up, group)
        expected = rule.quantized(rule.gated(gate.cpu(), up.cpu()), group)
        assert_follows(dequantize(codes, scales), expected, STEP)


def check_add_norm(value: float, group: int, dtype: torch.dtype, device: str) -> None:
    """Where the row's mean square is infinite, all finite numbers of its norm are zero."""
    x = rows_with(value).to(device, dtype)
    residual = (torch.zeros_like(x) if value == 0.0 else rows_with(0.0, seed=3).to(x)).contiguous()
    weight = (1 + torch.rand(WIDTH, generator=torch.Generator().manual_seed(2))).to(x)
    total, codes, scales = add_rms_norm_quant(x, residual, weight, EPS, group)
    expected = (residual + x).cpu()
    assert torch.equal(total.cpu().nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
    assert_follows(dequantize(codes, scales), rule.quantized(rule.normed(expected, weight.cpu(), EPS), group), STEP)


def check_linear_add_norm(value: float, group: int, dtype: torch.dtype, device: str) -> None:
    """A special number in what is multiplied reaches its whole row."""
    x = rows_with(value).to(device, dtype)
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)).to(x) / 16
    gain, residual = torch.ones_like(weight[0]), torch.zeros_like(x)
    total, codes, scales = linear_add_rms_norm_quant(x, weight, residual, gain, EPS, group)
    expected = rule.product(x.cpu(), weight.cpu())
    assert torch.equal(total.cpu().isfinite(), expected.isfinite())
    # Norm and codes of the sum that the operator itself returns: a small difference there may become a large one.
    after = rule.quantized(rule.normed(total.cpu(), gain.cpu(), EPS), group)
    assert_follows(dequantize(codes, scales), after, STEP)


def check_products(value: float, group: int, dtype: torch.dtype, device: str, rows: int = 5) -> None:
    """`fp8_linear`, `fp8_linear_add_rms_norm` and `quantized_linear` of quantized rows."""
    x = rows_with(value, rows).to(device, dtype)
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)).to(device) / 16
    codes, scales = quantize(x, group)
    weight_codes, weight_scales = quantize_weight(weight, group)
    values, weight_values = (dequantize(*pair).cpu() for pair in ((codes, scales), (weight_codes, weight_scales)))
    expected = rule.product(values, weight_values)
    got = fp8_linear(codes, scales, weight_codes, weight_scales, dtype)
    assert_follows(got, expected, NEAR)
    assert_follows(quantized_linear(x, weight_codes, weight_scales, group), expected, NEAR)
    residual, gain = torch.ones_like(got), torch.ones_like(got[0])
    total, normed = fp8_linear_add_rms_norm(codes, scales, weight_codes, weight_scales, residual, gain, EPS)
    assert_follows(total, expected + 1, 2 * NEAR)
    assert_follows(normed, rule.normed(total.cpu(), gain.cpu(), EPS), 2 * NEAR)


def check_weight(value: float, group: int, dtype: torch.dtype, device: str) -> None:
    """A special number in the weight reaches the outputs of its block, row or tensor, of every row of x."""
    weight = rows_with(value, WIDTH, seed=6).to(dtype).float()
    x = (1 + torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(7))).to(device, dtype)
    weight_codes, weight_scales = quantize_weight(weight.to(device), group)
    values = dequantize(weight_codes, weight_scales).cpu()
    expected_nan = torch.zeros(WIDTH, dtype=torch.bool)
    if value != 0.0:
        expected_nan |= {128: torch.arange(WIDTH) < 128, 0: torch.arange(WIDTH) == 2, -1: torch.ones(1).bool()}[group]
    assert torch.equal(values.isnan().any(1), expected_nan)
    got = quantized_linear(x, weight_codes, weight_scales, group)
    codes, scales = quantize(x, group)
    expected = rule.product(dequantize(codes, scales).cpu(), values)
    assert_follows(got, expected, NEAR)


CHECKS = {
    "quantize": check_quantize,
    "swiglu_quant": check_swiglu,
    "add_rms_norm_quant": check_add_norm,
    "linear_add_rms_norm_quant": check_linear_add_norm,
    "products": check_products,
    "weight": check_weight,
}
