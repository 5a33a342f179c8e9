# SPDX-License-Identifier: Apache-2.0
"""`dllm::fp8_linear` and `dllm::fp8_linear_add_rms_norm` on the CPU: the definition, routes, registration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.kernels import _launch, fp8_support
from dllm_compile.kernels.fp8_format import dequantize, padded_weight_scales
from dllm_compile.kernels.fp8_linear import block_scaled_mm, fp8_linear
from dllm_compile.kernels.fp8_linear_add_rms_norm import fp8_linear_add_rms_norm
from dllm_compile.kernels.rms_norm import rms_norm

from .fp8_cases import WITH_CODES, byte_copies, dense_linear, linear_inputs, row_errors

GROUPS = [128, 0, -1]
EPS = 1e-5


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([128, 256]),
    st.sampled_from([128, 640]),
    st.sampled_from(GROUPS),
    st.integers(0, 99),
)
def test_matches_the_definition_in_fp64(rows, outs, width, group, seed):
    arguments = linear_inputs(rows, outs, width, group, seed)
    got = fp8_linear(*arguments, torch.float32)
    assert got.shape == (rows, outs)
    assert row_errors(got, dense_linear(*arguments)).max() < 2e-6
    rounded = fp8_linear(*arguments, torch.bfloat16)
    assert torch.equal(rounded, got.to(torch.bfloat16))


def test_sizes_that_no_group_divides():
    arguments = linear_inputs(3, 24, 40, 0)
    assert row_errors(fp8_linear(*arguments, torch.float32), dense_linear(*arguments)).max() < 2e-6


def test_error_against_the_unquantized_product():
    # FP8's own error; a mistake in a scale would be far larger.
    generator = torch.Generator().manual_seed(0)
    from dllm_compile.kernels.fp8_format import quantize_activation, quantize_weight

    x, weight = torch.randn(16, 1024, generator=generator), torch.randn(256, 1024, generator=generator)
    exact = F.linear(x.double(), weight.double())
    for group in GROUPS:
        got = fp8_linear(*quantize_activation(x, group), *quantize_weight(weight, group), torch.float32)
        assert 0.01 < (got - exact).norm() / exact.norm() < 0.045


def test_a_nan_stays_in_its_row():
    codes, scales, *weight = linear_inputs(3, 128, 256)
    clean = fp8_linear(codes, scales, *weight, torch.float32)
    codes.view(torch.uint8)[1, 3] = 0x7F
    got = fp8_linear(codes, scales, *weight, torch.float32)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck(rows, group):
    arguments = linear_inputs(rows, 128, 256, group)
    residual, weight = torch.randn(rows, 128).bfloat16(), torch.randn(128).bfloat16()
    before = byte_copies((*arguments, residual, weight))
    torch.library.opcheck(fp8_linear, (*arguments, torch.bfloat16), test_utils=WITH_CODES)
    torch.library.opcheck(fp8_linear_add_rms_norm, (*arguments, residual, weight, EPS), test_utils=WITH_CODES)
    after = byte_copies((*arguments, residual, weight))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_fused_equals_the_separate_operators(group, dtype):
    generator = torch.Generator().manual_seed(1)
    arguments = linear_inputs(5, 256, 384, group)
    residual = torch.randn(5, 264, generator=generator).to(dtype)[:, :256]
    weight = (1 + torch.randn(256, generator=generator) / 4).to(dtype)
    total, normed = fp8_linear_add_rms_norm(*arguments, residual, weight, EPS)
    expected = residual + fp8_linear(*arguments, dtype)
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, EPS))
    assert total.is_contiguous()
    assert normed.is_contiguous()


def test_wrong_arguments_are_named():
    codes, scales, weight_codes, weight_scales = linear_inputs(3, 256, 384)
    with pytest.raises(ValueError, match=r"codes must be \[M, K\]"):
        fp8_linear(codes[:, :128], scales, weight_codes, weight_scales, torch.float32)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        fp8_linear(codes.float(), scales, weight_codes, weight_scales, torch.float32)
    with pytest.raises(TypeError, match="scales must be fp32"):
        fp8_linear(codes, scales.double(), weight_codes, weight_scales, torch.float32)
    with pytest.raises(ValueError, match="in no grouping"):
        fp8_linear(codes, scales[:, :2], weight_codes, weight_scales, torch.float32)
    with pytest.raises(ValueError, match="in no grouping"):
        fp8_linear(codes, scales, weight_codes, weight_scales.t(), torch.float32)
    with pytest.raises(ValueError, match="residual must be"):
        fp8_linear_add_rms_norm(codes, scales, weight_codes, weight_scales, torch.zeros(3, 255), torch.zeros(255), EPS)


def play_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """The library product as its own checks describe it."""
    (rows, width), outs = a.shape, b.shape[1]
    length = -(-(width // 128) // 4) * 4
    assert rows % 4 == 0
    assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert b.stride(0) == 1
    assert scale_a.shape == (rows, width // 128)
    assert scale_a.stride() == (1, rows)
    assert scale_b.shape == (length, outs // 128)
    assert scale_b.stride() == (1, length)
    weight = dequantize(b.t(), scale_b[: width // 128].t())
    return (dequantize(a, scale_a) @ weight.T).to(output_dtype)


@pytest.mark.parametrize("width", [128, 512, 640])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 128])
def test_library_gets_what_it_asks_for(rows, width, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", play_scaled_mm)
    codes, scales, weight_codes, weight_scales = linear_inputs(rows, 256, width)
    expected = dense_linear(codes, scales, weight_codes, weight_scales)
    for of_x in (scales, scales.contiguous()):
        for of_weight in (weight_scales, padded_weight_scales(weight_scales)):
            got = block_scaled_mm(codes, of_x, weight_codes, of_weight)
            assert got.shape == (rows, 256)
            assert row_errors(got, expected).max() < 2**-8


@pytest.mark.parametrize(("available", "expected"), [(232_448, 6), (166_912, 5), (101_376, 3), (49_152, 2)])
def test_stages_shrink_to_the_shared_memory(available, expected, monkeypatch):
    card = SimpleNamespace(shared_memory_per_block_optin=available)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert _launch.stages_that_fit(6, 32_768, torch.device("cuda", 0)) == expected
    assert _launch.stages_that_fit(6, 32_768, torch.device("cpu")) == 6


@pytest.mark.parametrize(
    ("capability", "cuda", "torchao", "expected"),
    [
        ((9, 0), "13.0", True, "scaled_mm"),
        ((9, 0), "12.9", True, "scaled_mm"),
        ((9, 0), "12.8", True, "torchao"),
        ((9, 0), "12.8", False, "own"),
        ((8, 9), "13.0", True, "torchao"),
        ((10, 0), "13.0", False, "own"),
        ((8, 0), "13.0", True, "none"),
    ],
)
def test_route_of_a_device(capability, cuda, torchao, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(fp8_support, "has_triton", lambda: True)
    monkeypatch.setattr(fp8_support.importlib.util, "find_spec", lambda name: object() if torchao else None)
    fp8_support._library_of.cache_clear()
    try:
        assert fp8_support.library_of(torch.device("cuda", 0)) == expected
    finally:
        fp8_support._library_of.cache_clear()
