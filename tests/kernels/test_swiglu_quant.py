# SPDX-License-Identifier: Apache-2.0
"""`dllm::swiglu_quant` on the CPU: equal to the separate operators, known values, registration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.kernels.fp8_format import quantize_activation
from dllm_compile.kernels.swiglu import swiglu
from dllm_compile.kernels.swiglu_quant import swiglu_quant

from .fp8_cases import exact_gates, gated, value_steps

GROUPS = [128, 0, -1]


def inputs(rows, width, dtype=torch.float32, seed=0):
    packed = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return packed[:, :width], packed[:, width:]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([128, 384]),
    st.sampled_from(GROUPS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)
def test_equals_the_separate_operators(rows, width, group, dtype, seed):
    gate, up = inputs(rows, width, dtype, seed)
    codes, scales = swiglu_quant(gate, up, group)
    expected, expected_scales = quantize_activation(swiglu(gate, up), group)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_values(dtype):
    gate, up = exact_gates(6, 256, dtype)
    codes, scales = swiglu_quant(gate, up, 128)
    expected, expected_scales = quantize_activation(gated(gate, up), 128)
    assert (value_steps(codes, expected) == 0).all()
    assert torch.equal(scales, expected_scales)
    assert scales[0, 0] == 1


def test_layouts():
    codes, scales = swiglu_quant(*inputs(5, 384, torch.bfloat16), 128)
    assert codes.is_contiguous()
    assert scales.shape == (5, 3)
    assert scales.stride() == (1, 5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_group(poison):
    gate, up = inputs(3, 256)
    clean, clean_scales = swiglu_quant(gate, up, 128)
    up[1, 5] = poison
    codes, scales = swiglu_quant(gate, up, 128)
    assert codes[1, :128].float().isnan().all()
    codes[1, :128], scales[1, 0] = clean[1, :128], clean_scales[1, 0]
    assert torch.equal(codes.view(torch.uint8), clean.view(torch.uint8))
    assert torch.equal(scales, clean_scales)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 5])
def test_opcheck(rows, group):
    torch.library.opcheck(swiglu_quant, (*inputs(rows, 256, torch.bfloat16), group))


def test_wrong_arguments_are_named():
    gate, up = inputs(2, 256)
    with pytest.raises(ValueError, match=r"must be \[M, F\]"):
        swiglu_quant(gate, up[:1], 128)
    with pytest.raises(TypeError, match="share a dtype"):
        swiglu_quant(gate, up.double(), 128)
    with pytest.raises(ValueError, match="F = 200 is not a multiple"):
        swiglu_quant(gate[:, :200], up[:, :200], 128)
