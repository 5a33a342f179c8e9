# SPDX-License-Identifier: Apache-2.0
"""Zeros, NaN and infinities in every FP8 operator and every grouping, against the rule written out."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dllm_compile.kernels.fp8_format import quantize_weight

from .special_values import CHECKS, GROUPS, VALUES, rows_with


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("check", CHECKS)
def test_special_values(check, value, group, dtype):
    CHECKS[check](VALUES[value], group, dtype, "cpu")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="compares with torchao")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", VALUES)
def test_weights_from_torchao(value, group):
    """What `optimize` stores: NaN and zeros where the definition has them. An infinity makes the whole group NaN."""
    from dllm_compile.fp8_weights import quantize_weight as with_torchao
    from dllm_compile.kernels.fp8_format import dequantize

    weight = rows_with(VALUES[value], 256)
    codes, scales = with_torchao(weight, group)
    expected_codes, expected_scales = quantize_weight(weight, group)
    values, expected = dequantize(codes, scales), dequantize(expected_codes, expected_scales)
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert values.isnan().any() == (value != "zeros")
