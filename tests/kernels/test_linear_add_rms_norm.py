# SPDX-License-Identifier: Apache-2.0
"""`dllm::linear_add_rms_norm` and `..._quant` on the CPU: equal to the separate operators, registration."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dllm_compile.kernels.fp8_format import quantize_activation
from dllm_compile.kernels.linear_add_rms_norm import linear_add_rms_norm
from dllm_compile.kernels.linear_add_rms_norm_quant import linear_add_rms_norm_quant
from dllm_compile.kernels.rms_norm import rms_norm

EPS = 1e-5
GROUPS = [128, 0, -1]


def inputs(rows, outs, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width + 8, generator=generator).to(dtype)[:, 8:]
    weight = (torch.randn(outs, width, generator=generator) / width**0.5).to(dtype)
    residual = torch.randn(rows, outs, generator=generator).to(dtype)
    return x, weight, residual, (1 + torch.randn(outs, generator=generator) / 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outs", "width"), [(1, 128, 24), (5, 256, 128), (17, 384, 100)])
def test_equal_the_separate_operators(rows, outs, width, dtype):
    x, weight, residual, gain = inputs(rows, outs, width, dtype)
    expected = residual + F.linear(x, weight)
    expected_normed = rms_norm(expected, gain, EPS)
    total, normed = linear_add_rms_norm(x, weight, residual, gain, EPS)
    assert torch.equal(total, expected)
    assert torch.equal(normed, expected_normed)
    for group in GROUPS:
        total, codes, scales = linear_add_rms_norm_quant(x, weight, residual, gain, EPS, group)
        expected_codes, expected_scales = quantize_activation(expected_normed, group)
        assert torch.equal(total, expected)
        assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
        assert torch.equal(scales, expected_scales)
        assert scales.stride() == expected_scales.stride()


@pytest.mark.parametrize("rows", [1, 5])
def test_opcheck(rows):
    arguments = inputs(rows, 256, 128, torch.bfloat16)
    torch.library.opcheck(linear_add_rms_norm, (*arguments, EPS))
    for group in GROUPS:
        torch.library.opcheck(linear_add_rms_norm_quant, (*arguments, EPS, group))


def test_wrong_arguments_are_named():
    x, weight, residual, gain = inputs(3, 200, 64)
    with pytest.raises(ValueError, match=r"x must be \[M, K\]"):
        linear_add_rms_norm(x[:, :60], weight, residual, gain, EPS)
    with pytest.raises(ValueError, match=r"residual must be \[3, 200\]"):
        linear_add_rms_norm(x, weight, residual[:2], gain, EPS)
    with pytest.raises(TypeError, match="share a dtype"):
        linear_add_rms_norm(x, weight, residual.double(), gain.double(), EPS)
    with pytest.raises(ValueError, match="N = 200 is not a multiple"):
        linear_add_rms_norm_quant(x, weight, residual, gain, EPS, 128)
