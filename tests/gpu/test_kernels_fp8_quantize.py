# SPDX-License-Identifier: Apache-2.0
"""The quantizing kernels on a card against their references on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from dllm_compile.kernels.add_rms_norm_quant import add_rms_norm_quant, add_rms_norm_quant_reference
from dllm_compile.kernels.add_rms_norm_triton import add_rms_norm_quant_triton, add_rms_norm_triton
from dllm_compile.kernels.fp8_format import dequantize, quantize_activation
from dllm_compile.kernels.quantize import quantize
from dllm_compile.kernels.rms_norm import rms_norm_reference
from dllm_compile.kernels.swiglu_quant import swiglu_quant, swiglu_quant_reference
from tests.kernels.fp8_cases import exact_gates, exact_rows, gated, is_a_tie, value_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with FP8"
    ),
]

BF16 = torch.bfloat16
ROWS = [1, 3, 5, 16, 17, 33, 64, 100, 128, 129, 160, 256, 1000, 4096]
EPS = 1e-5


def assert_codes(codes, scales, values):
    """Scales as the reference has them; codes too, but for values that lie between two codes."""
    expected, expected_scales = quantize_activation(values.cpu(), 128)
    assert torch.equal(scales.cpu(), expected_scales)
    assert scales.stride() == (1, len(values))
    steps = value_steps(codes.cpu(), expected)
    assert steps.max() <= 1
    scaled = (values.cpu().float().unflatten(1, (-1, 128)) / expected_scales.unsqueeze(2)).flatten(1)
    assert is_a_tie(scaled[steps > 0]).all()


def assert_near(got, expected):
    """Numbers whose bf16 roundings differ here and there: at most one step of FP8, in few places."""
    codes, scales = (x.cpu() for x in got)
    expected_codes, expected_scales = expected
    assert ((scales - expected_scales).abs() <= expected_scales * 2**-7).all()
    assert (scales != expected_scales).float().mean() < 2e-3
    steps = value_steps(codes, expected_codes)
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 2e-3


@pytest.mark.parametrize("width", [4096, 256, 384, 3584])
@pytest.mark.parametrize("rows", ROWS)
def test_add_and_norm_of_exact_sums_is_bit_equal(rows, width):
    x, residual, weight = exact_rows(rows, width, BF16)
    wide = torch.nn.functional.pad(x, (8, 8)).cuda()[:, 8:-8]  # rows with gaps
    total, codes, scales = add_rms_norm_quant(wide, residual.cuda(), weight.cuda(), EPS, 128)
    expected = residual + x
    assert torch.equal(total.cpu(), expected)
    assert_codes(codes, scales, rms_norm_reference(expected, weight, EPS))
    same, normed = add_rms_norm_triton(wide, residual.cuda(), weight.cuda(), EPS)
    assert torch.equal(same, total)
    assert torch.equal(normed.cpu(), rms_norm_reference(expected, weight, EPS))


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 17, 128])
@pytest.mark.parametrize("width", [4096, 384])
def test_parts_are_summed(width, rows, parts):
    x, residual, weight = exact_rows(rows, width, BF16)
    pieces = torch.randint(-8, 9, (parts, rows, width), generator=torch.Generator().manual_seed(1)).float()
    pieces[-1] = x.float()
    product = pieces.sum(0).to(BF16)
    expected = residual + product
    arguments = (pieces.cuda(), residual.cuda(), weight.cuda(), EPS)
    total, codes, scales = add_rms_norm_quant_triton(*arguments)
    assert torch.equal(total.cpu(), expected)
    assert_codes(codes, scales, rms_norm_reference(expected, weight, EPS))
    same, normed = add_rms_norm_triton(*arguments)
    assert torch.equal(same, total)
    assert torch.equal(normed.cpu(), rms_norm_reference(expected, weight, EPS))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(128, 4096), (1000, 4096), (129, 256)])
def test_add_and_norm_of_random_rows(rows, width, dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, rows, width, generator=generator).to(dtype)
    weight = (1 + torch.randn(width, generator=generator) / 4).to(dtype)
    total, *got = add_rms_norm_quant(x.cuda(), residual.cuda(), weight.cuda(), EPS, 128)
    expected_total, *expected = add_rms_norm_quant_reference(x, residual, weight, EPS, 128)
    assert torch.equal(total.cpu(), expected_total)
    if dtype == torch.float32:  # no rounding hides the order of the sum: everything differs, by units in the last place
        assert ((got[1].cpu() - expected[1]).abs() <= expected[1] * 1e-6).all()
        assert value_steps(got[0].cpu(), expected[0]).max() <= 1
    else:
        assert_near(got, expected)


@pytest.mark.parametrize(("rows", "width"), [*itertools.product(ROWS, [12288, 384, 128]), (129, 18944)])
def test_swiglu_of_known_values_is_bit_equal(rows, width):
    gate, up = exact_gates(rows, width, BF16)
    packed = torch.cat([gate, up], 1).cuda()
    codes, scales = swiglu_quant(packed[:, :width], packed[:, width:], 128)
    assert_codes(codes, scales, gated(gate, up))
    separate = swiglu_quant(packed[:, :width].contiguous(), packed[:, width:].contiguous(), 128)
    assert torch.equal(separate[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(separate[1], scales)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(64, 12288), (1025, 12288), (33, 384)])
def test_swiglu_of_random_rows(rows, width, dtype):
    packed = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    gate, up = packed[:, :width], packed[:, width:]
    got = swiglu_quant(gate.cuda(), up.cuda(), 128)
    assert_near(got, swiglu_quant_reference(gate, up, 128))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 129, 1500])
@pytest.mark.parametrize("width", [4096, 384])
def test_quantize(width, rows, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width + 8, generator=generator) * 10.0 ** torch.randint(-4, 5, (rows, 1), generator=generator)
    x = x.to(dtype)[:, 8:]
    assert_codes(*quantize(x.cuda(), 128), x)


def test_edges_are_those_of_the_reference():
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(2))
    x[0] = 0
    x[1, 3], x[2, 130], x[3, 200] = torch.nan, torch.inf, -torch.inf
    x[4, :128] = 0
    x[4, :2] = torch.tensor([3 * tiny, -tiny])
    x[5, :2] = torch.tensor([huge, -huge / 3])
    x[6, 1], x[6, 7] = torch.nan, torch.inf
    codes, scales = (part.cpu() for part in quantize(x.cuda(), 128))
    expected, expected_scales = quantize_activation(x, 128)
    assert torch.equal(codes.float().isnan(), expected.float().isnan())
    assert torch.equal(codes.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))
    finite = expected_scales.isfinite()
    assert torch.equal(scales.isfinite(), finite)
    assert torch.equal(scales[finite], expected_scales[finite])


@pytest.mark.parametrize("group", [0, -1])
def test_other_groups(group):
    gate, up = exact_gates(33, 384, BF16)
    got = swiglu_quant(gate.cuda(), up.cuda(), group)
    expected = quantize_activation(gated(gate, up), group)
    assert value_steps(got[0].cpu(), expected[0]).max() == 0
    assert torch.equal(got[1].cpu(), expected[1])
    x, residual, weight = exact_rows(33, 256, BF16)
    total, codes, scales = add_rms_norm_quant(x.cuda(), residual.cuda(), weight.cuda(), EPS, group)
    normed = rms_norm_reference(residual + x, weight, EPS)
    assert torch.equal(total.cpu(), residual + x)
    assert (dequantize(codes, scales).cpu() - normed.float()).norm() < 0.04 * normed.float().norm()


def test_no_rows():
    x = torch.zeros(0, 256, device="cuda", dtype=BF16)
    total, codes, scales = add_rms_norm_quant(x, x, x.new_ones(256), EPS, 128)
    assert (total.shape, codes.shape, scales.shape) == ((0, 256), (0, 256), (0, 2))
    assert swiglu_quant(x, x, 128)[1].shape == (0, 2)


def test_replays_are_bit_equal_and_nothing_waits():
    x, residual, weight = (part.cuda() for part in exact_rows(129, 4096, BF16))
    packed = torch.randn(129, 24576, device="cuda").to(BF16)

    def call():
        total, codes, scales = add_rms_norm_quant(x, residual, weight, EPS, 128)
        more = swiglu_quant(packed[:, :12288], packed[:, 12288:], 128)
        return [part.view(torch.uint8) for part in (total, codes, scales.t(), more[0], more[1].t())]

    expected = [part.clone() for part in call()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    for _ in range(20):
        for output in outputs:
            output.fill_(77)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("group", [128, 0, -1])
def test_opcheck(group):
    x, residual, weight = (part.cuda() for part in exact_rows(5, 256, BF16))
    torch.library.opcheck(add_rms_norm_quant, (x, residual, weight, EPS, group))
    torch.library.opcheck(swiglu_quant, (x, residual, group))
    torch.library.opcheck(quantize, (x, group))
