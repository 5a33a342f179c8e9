# SPDX-License-Identifier: Apache-2.0
"""Codes, scales and groups: against a table of all codes, at the edges, and against torchao."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.kernels.fp8_format import (
    FP8,
    SMALLEST_SCALE,
    dequantize,
    library_weight_scales,
    mend_zero_groups,
    padded_weight_scales,
    quantize_activation,
    quantize_weight,
)
from dllm_compile.kernels.quantize import quantize

from .fp8_cases import finite_codes, is_a_tie, nearest_code, value_steps

GROUPS = [128, 0, -1]


def rows_of(rows, width, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)
    return (torch.randn(rows, width, generator=generator) * magnitude).to(dtype)


def grouped(x, group):
    """x as [lines, groups, numbers]: the numbers that share a scale, by the table of the module."""
    if group == 128:
        return x.unflatten(1, (-1, 128))
    return x.unsqueeze(1) if group == 0 else x.reshape(1, 1, -1)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([128, 256, 384]),
    st.sampled_from(GROUPS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_a_code_is_the_nearest_to_the_scaled_value(rows, width, group, dtype, seed):
    x = rows_of(rows, width, seed, dtype)
    codes, scales = quantize_activation(x, group)
    numbers = grouped(x.float(), group)
    expected_scale = numbers.abs().amax(2) / 448
    assert torch.equal(scales, expected_scale)
    expected = nearest_code(numbers / expected_scale.unsqueeze(2))
    assert torch.equal(grouped(codes.double(), group), expected)
    assert codes.is_contiguous()
    assert scales.stride() == ((1, rows) if group == 128 else (1, 1))


def test_every_code_is_met_and_ties_go_to_even():
    _, values = finite_codes()
    middles = (values[1:] + values[:-1]) / 2
    numbers = torch.cat([values, middles]).float()
    padded = torch.cat([numbers, torch.zeros(-len(numbers) % 128), torch.full((1,), 448.0), torch.zeros(127)])
    # One row: the 448 of its last group makes the scale exactly 1.
    codes, scales = quantize_activation(padded.unsqueeze(0), 0)
    assert scales.item() == 1
    assert torch.equal(codes[0].double(), nearest_code(padded))
    assert is_a_tie(middles).all()
    assert not is_a_tie(values).any()


@pytest.mark.parametrize("group", GROUPS)
def test_dequantized_values_are_near(group):
    x = torch.randn(7, 384, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize_activation(x, group)
    back = dequantize(codes, scales)
    # Half a step: 2^-4 of a normal value, 2^-10 of the scale below the smallest normal code.
    bound = torch.maximum(
        x.abs() * 2**-4, grouped(torch.ones_like(x), group).mul(scales.unsqueeze(2)).view_as(x) * 2**-10
    )
    assert ((back - x).abs() <= bound * (1 + 1e-6)).all()
    assert (back - x).norm() / x.norm() < 0.03


def test_another_group_keeps_its_bytes():
    x = rows_of(4, 512)
    codes, scales = quantize_activation(x, 128)
    x[2, 128:256] *= 1000
    other, other_scales = quantize_activation(x, 128)
    changed = torch.zeros(4, 4, dtype=torch.bool)
    changed[2, 1] = True
    same = (codes.view(torch.uint8) == other.view(torch.uint8)).unflatten(1, (4, 128)).all(2)
    assert (same | changed).all()
    assert torch.equal(scales[~changed], other_scales[~changed])
    assert (other_scales[changed] > scales[changed]).all()


@pytest.mark.parametrize("group", GROUPS)
def test_zeros_have_scale_one(group):
    codes, scales = quantize_activation(torch.zeros(3, 256), group)
    assert (scales == 1).all()
    assert (codes.view(torch.uint8) & 0x7F == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_poisons_its_group_only(poison):
    x = rows_of(3, 256)
    clean, clean_scales = quantize_activation(x, 128)
    x[1, 130] = poison
    codes, scales = quantize_activation(x, 128)
    assert codes[1, 128:].float().isnan().all()
    assert not scales[1, 1].isfinite()
    codes[1, 128:], scales[1, 1] = clean[1, 128:], clean_scales[1, 1]
    assert torch.equal(codes.view(torch.uint8), clean.view(torch.uint8))
    assert torch.equal(scales, clean_scales)


def test_the_ends_of_fp32():
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    x = torch.zeros(2, 128)
    x[0, :3] = torch.tensor([tiny, -tiny / 2, 3 * tiny])
    x[1, :2] = torch.tensor([huge, -huge / 3])
    codes, scales = quantize_activation(x, 128)
    assert scales[0, 0] == SMALLEST_SCALE
    assert codes[0, :3].tolist() == [1.0, -0.5, 3.0]
    assert codes[1, :2].tolist() == [448.0, -144.0]
    assert codes.float().isfinite().all()


def test_values_beyond_the_scale_saturate():
    from dllm_compile.kernels.fp8_format import encode

    values = torch.tensor([448.0, 449.0, 464.1, 1e6, -1e30])
    assert encode(values, torch.tensor(1.0)).tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]


@pytest.mark.parametrize("group", GROUPS)
def test_no_rows(group):
    codes, scales = quantize_activation(torch.zeros(0, 256), group)
    assert codes.shape == (0, 256)
    assert scales.shape == {128: (0, 2), 0: (0, 1), -1: (1, 1)}[group]


@pytest.mark.parametrize(
    ("width", "group", "message"), [(100, 128, "multiple"), (0, 128, "multiple"), (128, 64, "group")]
)
def test_groups_must_divide(width, group, message):
    with pytest.raises(ValueError, match=message):
        quantize_activation(torch.zeros(2, width), group)
    with pytest.raises(ValueError, match=message):
        quantize_weight(torch.zeros(128, width), group)


def test_both_sides_of_a_weight_must_divide():
    with pytest.raises(ValueError, match="N = 100"):
        quantize_weight(torch.zeros(100, 128), 128)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 5])
def test_the_operator(rows, group):
    x = rows_of(rows, 512)[:, 64:320]
    torch.library.opcheck(quantize, (x, group))
    codes, scales = quantize(x, group)
    expected, expected_scales = quantize_activation(x.contiguous(), group)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    with pytest.raises(ValueError, match=r"\[M, K\]"):
        quantize(x[0], group)


def test_weight_blocks():
    weight = rows_of(256, 384)
    codes, scales = quantize_weight(weight, 128)
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert scales[i, j] == weight[block].abs().max() / 448
            assert torch.equal(codes[block].double(), nearest_code(weight[block] / scales[i, j]))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="compares with torchao")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_torchao_gives_the_same_weight(group, dtype):
    from torchao.quantization import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    weight = rows_of(256, 384, dtype=dtype)
    granularity = {128: PerBlock([128, 128]), 0: PerRow(), -1: PerTensor()}[group]
    theirs = Float8Tensor.from_hp(weight.float(), granularity=granularity)
    codes, scales = quantize_weight(weight, group)
    assert torch.equal(theirs.scale, scales)
    assert torch.equal(theirs.qdata.view(torch.uint8), codes.view(torch.uint8))
    # In the weight's own dtype their scale is rounded to it, ours is not.
    rounded = Float8Tensor.from_hp(weight, granularity=granularity)
    assert ((rounded.scale - scales).abs() <= scales * torch.finfo(dtype).eps).all()
    assert (value_steps(rounded.qdata, codes) <= 1).all()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="compares with torchao")
@pytest.mark.filterwarnings("ignore")
def test_zero_blocks_of_torchao_are_mended():
    from torchao.quantization import PerBlock
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    weight = rows_of(256, 384)
    weight[:128, 128:256] = 0
    theirs = Float8Tensor.from_hp(weight, granularity=PerBlock([128, 128]))
    assert theirs.qdata.float().isnan().any()
    codes, scales = mend_zero_groups(theirs.qdata, theirs.scale)
    expected, expected_scales = quantize_weight(weight, 128)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("lines", "columns"), [(3, 4), (3, 5), (1, 1), (2, 6)])
def test_scales_as_the_library_reads_them(lines, columns):
    scales = torch.rand(lines, columns)
    padded = padded_weight_scales(scales)
    length = -(-columns // 4) * 4
    assert torch.equal(padded, scales)
    assert padded.stride() == (length, 1)
    assert (padded.data_ptr() == scales.data_ptr()) == (columns % 4 == 0)
    for layout in (padded, scales, scales.t().contiguous().t()):
        argument = library_weight_scales(layout)
        assert argument.shape == (length, lines)
        assert argument.stride() == (1, length)
        assert torch.equal(argument[:columns].t(), scales)
    assert library_weight_scales(padded).data_ptr() == padded.data_ptr()  # no copy in a call


def test_codes_are_the_ones_of_torch():
    numbers, values = finite_codes()
    assert torch.equal(numbers.to(torch.uint8).view(FP8).double(), values)
