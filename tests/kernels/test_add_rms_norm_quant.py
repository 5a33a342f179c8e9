# SPDX-License-Identifier: Apache-2.0
"""`dllm::add_rms_norm_quant` on the CPU: equal to the separate operators, edges, registration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.kernels.add_rms_norm_quant import add_rms_norm_quant
from dllm_compile.kernels.fp8_format import dequantize, quantize_activation
from dllm_compile.kernels.rms_norm import rms_norm

EPS = 1e-5
GROUPS = [128, 0, -1]


def inputs(rows, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, width + 8, generator=generator)
    weight = 1 + torch.randn(width, generator=generator) / 4
    return x.to(dtype)[:, 4 : 4 + width], residual.to(dtype)[:, :width], weight.to(dtype)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(
            a.view(torch.uint8) if a.element_size() == 1 else a, b.view(torch.uint8) if b.element_size() == 1 else b
        )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([128, 256, 640]),
    st.sampled_from(GROUPS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)
def test_equals_the_separate_operators(rows, width, group, dtype, seed):
    x, residual, weight = inputs(rows, width, dtype, seed)
    total = residual + x
    expected = total, *quantize_activation(rms_norm(total, weight, EPS), group)
    assert_same(add_rms_norm_quant(x, residual, weight, EPS, group), expected)


def test_is_near_the_definition_in_fp64():
    x, residual, weight = inputs(6, 512)
    total, codes, scales = add_rms_norm_quant(x, residual, weight, EPS, 128)
    wide = residual.double() + x.double()
    normed = wide / (wide.pow(2).mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    assert (total.double() - wide).abs().max() < 1e-6
    assert ((dequantize(codes, scales).double() - normed).norm(dim=1) / normed.norm(dim=1)).max() < 0.03


def test_layouts():
    x, residual, weight = inputs(5, 256, torch.bfloat16)
    total, codes, scales = add_rms_norm_quant(x, residual, weight, EPS, 128)
    assert total.is_contiguous()
    assert codes.is_contiguous()
    assert scales.shape == (5, 2)
    assert scales.stride() == (1, 5)


def test_a_nan_stays_in_its_row():
    x, residual, weight = inputs(3, 256)
    clean = add_rms_norm_quant(x, residual, weight, EPS, 128)
    x[1, 200] = torch.nan
    got = add_rms_norm_quant(x, residual, weight, EPS, 128)
    assert got[1][1].float().isnan().all()
    assert got[2][1].isnan().all()
    keep = [0, 2]
    assert_same([part[keep].contiguous() for part in got], [part[keep].contiguous() for part in clean])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 5])
def test_opcheck(rows, group):
    torch.library.opcheck(add_rms_norm_quant, (*inputs(rows, 256, torch.bfloat16), EPS, group))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 256)}, ValueError, r"must be \[M, C\]"),
        ({"weight": torch.zeros(255)}, ValueError, r"must be \[M, C\]"),
        ({"weight": torch.zeros(256, dtype=torch.float64)}, TypeError, "share a dtype"),
        ({"group": 64}, ValueError, "group must be"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    x, residual, weight = inputs(3, 256)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": EPS, "group": 128, **change}
    with pytest.raises(error, match=message):
        add_rms_norm_quant(**arguments)


def test_width_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="C = 200 is not a multiple"):
        add_rms_norm_quant(*inputs(2, 200), EPS, 128)
