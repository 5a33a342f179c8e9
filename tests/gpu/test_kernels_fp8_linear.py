# SPDX-License-Identifier: Apache-2.0
"""The products of the FP8 operators on a card, and what is fused with them, against fp64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from dllm_compile.kernels.fp8_format import dequantize, quantize_activation
from dllm_compile.kernels.fp8_linear import block_scaled_mm, fp8_linear
from dllm_compile.kernels.fp8_linear_add_rms_norm import fp8_linear_add_rms_norm
from dllm_compile.kernels.fp8_linear_triton import ANY_ROWS, fp8_linear_triton
from dllm_compile.kernels.fp8_support import has_block_scaled_mm, library_of
from dllm_compile.kernels.linear_add_rms_norm import linear_add_rms_norm
from dllm_compile.kernels.linear_add_rms_norm_quant import linear_add_rms_norm_quant
from dllm_compile.kernels.rms_norm import rms_norm_reference
from tests.kernels.fp8_cases import WITH_CODES, dense_linear, linear_inputs, value_steps
from tests.kernels.norm_checks import wrong_norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with FP8"
    ),
]

BF16 = torch.bfloat16
ROWS = [1, 3, 5, 16, 17, 33, 64, 100, 128, 129, 160, 256, 1000]
SHAPES = [(24576, 4096), (4096, 12288), (12288, 4096), (4096, 4096), (256, 256), (1536, 256), (256, 768), (384, 640)]
EPS = 1e-5


@functools.cache
def weight_of(outs, width, group=128):
    """Codes and scales of a weight; made once, since the large ones take longer than the products."""
    return linear_inputs(1, outs, width, group, seed=1, device="cuda")[2:]


def inputs(rows, outs, width, group=128):
    return *linear_inputs(rows, 128, width, group, seed=rows, device="cuda")[:2], *weight_of(outs, width, group)


# A tensor core adds 32 FP8 products at a time and keeps 13 bits behind the point of the largest addend (14 in all, see
# the DeepSeek-V3 report, arXiv 2412.19437, section 3.5.2): four such sums make a group of 128.
ACCUMULATION = 4 * 2**-13


def sum_of_sizes(codes, scales, weight_codes, weight_scales):
    """(M, N) fp64: the product of absolute values, which bounds every sum on the way."""
    return dense_linear(codes.float().abs(), scales, weight_codes.float().abs(), weight_scales)


def assert_product(got, arguments):
    """One rounding to the dtype, and the accumulation of FP8 tensor cores: of each number, and of each row together."""
    expected = dense_linear(*arguments)
    assert got.isfinite().all()
    unit = torch.finfo(got.dtype).eps / 2
    size = expected.pow(2).mean(1, keepdim=True).sqrt()
    error = (got.double() - expected).abs()
    assert (error <= unit * 1.01 * expected.abs() + ACCUMULATION * sum_of_sizes(*arguments)).all()
    relative = error.pow(2).mean(1).sqrt() / size.squeeze(1)
    assert relative.max() <= (1e-3 if got.dtype == torch.float32 else 1e-3 + unit)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_matches_the_definition(rows, shape):
    arguments = inputs(rows, *shape)
    for dtype in (BF16, torch.float32):  # fp32 results never come from the library
        got = fp8_linear(*arguments, dtype)
        assert got.shape == (rows, shape[0])
        assert got.is_contiguous()
        assert_product(got, arguments)


@pytest.mark.parametrize("rows", [1, 33, 130, 1000])
def test_own_kernel_at_any_row_count(rows):
    arguments = inputs(rows, 4096, 4096)
    assert_product(fp8_linear_triton(*arguments, BF16, ANY_ROWS), arguments)


@pytest.mark.parametrize("rows", [1, 4, 17, 129, 1002])
@pytest.mark.parametrize("shape", [(4096, 4096), (384, 640)], ids=str)
def test_library_at_any_row_count(rows, shape):
    if not has_block_scaled_mm(torch.device("cuda", 0)):
        pytest.skip("torch multiplies with block scales on SM90, CUDA 12.9 or later")
    assert library_of(torch.device("cuda", 0)) == "scaled_mm"
    arguments = inputs(rows, *shape)
    assert_product(block_scaled_mm(*arguments), arguments)


def test_torchao_product_where_the_library_is_not(monkeypatch):
    pytest.importorskip("torchao")
    from dllm_compile.kernels import fp8_linear as module

    monkeypatch.setattr(module, "library_of", lambda device: "torchao")
    arguments = inputs(256, 4096, 4096)
    assert_product(fp8_linear(*arguments, BF16), arguments)


@pytest.mark.parametrize("group", [0, -1])
@pytest.mark.parametrize("rows", [1, 17, 128, 1000])
def test_other_groups(rows, group):
    arguments = inputs(rows, 4096, 4096, group)
    got = fp8_linear(*arguments, BF16)
    assert got.shape == (rows, 4096)
    expected = dense_linear(*arguments)
    # Accumulated over all of K by the tensor cores, whose sums keep fewer bits than fp32.
    assert ((got.double() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 4e-3


def test_a_nan_stays_in_its_row():
    for rows in (16, 64, 128, 256):
        codes, scales, *weight = inputs(rows, 4096, 12288)
        codes = codes.clone()
        clean = fp8_linear(codes, scales, *weight, BF16)
        codes.view(torch.uint8)[3, 7] = 0x7F
        got = fp8_linear(codes, scales, *weight, BF16)
        assert got[3].isnan().all()
        got[3] = clean[3]
        assert torch.equal(got, clean)


def assert_normed(total, normed, weight):
    """Norm of the sum returned: what a rounding explains, and seldom another than the reference's."""
    assert not wrong_norms(total, normed, weight, EPS).any()
    assert (normed != rms_norm_reference(total, weight, EPS)).float().mean() < 1e-2


@pytest.mark.parametrize("shape", [(4096, 12288), (4096, 4096), (256, 768)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_fp8_product_add_and_norm(rows, shape):
    arguments = inputs(rows, *shape)
    generator = torch.Generator("cuda").manual_seed(0)
    product = dense_linear(*arguments)
    size = product.pow(2).mean().sqrt().item()
    residual = (torch.randn(rows, shape[0], generator=generator, device="cuda") * size).to(BF16)
    weight = (1 + torch.randn(shape[0], generator=generator, device="cuda") / 4).to(BF16)
    total, normed = fp8_linear_add_rms_norm(*arguments, residual, weight, EPS)
    expected = residual.double() + product
    # The product is rounded, then the sum.
    bound = 2**-8 * (product.abs() + expected.abs()) + ACCUMULATION * sum_of_sizes(*arguments)
    assert ((total.double() - expected).abs() <= bound).all()
    assert_normed(total, normed, weight)


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 12288), (256, 256), (384, 1000)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_16_bit_product_add_and_norm(rows, shape):
    # Integers: every sum is exact in fp32 in whatever order, so that the sum that is returned is known exactly.
    generator = torch.Generator("cuda").manual_seed(0)
    outs, width = shape
    x = torch.randint(-2, 3, (rows, width), generator=generator, device="cuda").to(BF16)
    weight = torch.randint(-1, 2, (outs, width), generator=generator, device="cuda").to(BF16)
    residual = torch.randint(-99, 100, (rows, outs), generator=generator, device="cuda").to(BF16)
    gain = (1 + torch.randn(outs, generator=generator, device="cuda") / 4).to(BF16)
    expected = residual + (x.double() @ weight.double().T).to(BF16)
    total, normed = linear_add_rms_norm(x, weight, residual, gain, EPS)
    assert torch.equal(total, expected)
    assert_normed(total, normed, gain)
    total, codes, scales = linear_add_rms_norm_quant(x, weight, residual, gain, EPS, 128)
    assert torch.equal(total, expected)
    expected_codes, expected_scales = quantize_activation(normed, 128)  # of the same kernel's norm
    assert torch.equal(scales, expected_scales)
    assert value_steps(codes, expected_codes).max() <= 1
    assert (value_steps(codes, expected_codes) > 0).float().mean() < 1e-4


def test_random_16_bit_product_add_and_norm():
    for rows in (16, 64, 128, 300):
        x, weight = (
            torch.randn(rows, 4096, device="cuda").to(BF16),
            torch.randn(4096, 4096, device="cuda").to(BF16) / 64,
        )
        residual, gain = torch.randn(rows, 4096, device="cuda").to(BF16), torch.rand(4096, device="cuda").to(BF16) + 0.5
        product = x.double() @ weight.double().T
        total, normed = linear_add_rms_norm(x, weight, residual, gain, EPS)
        bound = 2**-8 * (product.abs() + (residual.double() + product).abs()) + 1e-5
        assert ((total.double() - residual.double() - product).abs() <= bound).all()
        assert_normed(total, normed, gain)
        _, codes, scales = linear_add_rms_norm_quant(x, weight, residual, gain, EPS, 128)
        assert ((dequantize(codes, scales) - normed.float()).norm() / normed.float().norm()).item() < 0.03


@pytest.mark.parametrize("rows", [16, 64, 128, 129, 1000])
def test_replays_are_bit_equal_and_nothing_waits(rows):
    down, out = inputs(rows, 4096, 12288), torch.randn(4096, 4096, device="cuda").to(BF16)
    gate_up = inputs(rows, 24576, 4096)
    residual, gain = torch.randn(rows, 4096, device="cuda").to(BF16), torch.rand(4096, device="cuda").to(BF16)

    def call():
        total, codes, scales = linear_add_rms_norm_quant(residual, out, residual, gain, EPS, 128)
        packed = fp8_linear(codes, scales, *gate_up[2:], BF16)
        more = fp8_linear_add_rms_norm(*down, total, gain, EPS)
        return [part.view(torch.uint8) for part in (total, codes, scales.t(), packed, *more)]

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


def test_no_copy_of_the_weight():
    for rows in (16, 64, 128, 1024):
        arguments = inputs(rows, 24576, 4096)
        out = fp8_linear(*arguments, BF16)  # whatever is allocated once, such as a work space
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        again = fp8_linear(*arguments, BF16)
        grown = torch.cuda.max_memory_allocated() - before - out.numel() * 2
        assert grown < arguments[2].numel() // 2  # a work space of the library may be among it
        assert torch.equal(again, out)


def test_opcheck():
    for group in (128, 0, -1):
        arguments = inputs(17, 256, 256, group)
        residual, gain = torch.randn(17, 256, device="cuda").to(BF16), torch.rand(256, device="cuda").to(BF16)
        torch.library.opcheck(fp8_linear, (*arguments, BF16), test_utils=WITH_CODES)
        torch.library.opcheck(fp8_linear_add_rms_norm, (*arguments, residual, gain, EPS), test_utils=WITH_CODES)
    torch.library.opcheck(linear_add_rms_norm, (residual, F.pad(residual, (0, 0, 0, 239)), residual, gain, EPS))
    torch.library.opcheck(
        linear_add_rms_norm_quant, (residual, F.pad(residual, (0, 0, 0, 239)), residual, gain, EPS, 128)
    )


def test_no_rows():
    arguments = inputs(0, 256, 256)
    assert fp8_linear(*arguments, BF16).shape == (0, 256)
    residual, gain = torch.zeros(0, 256, device="cuda", dtype=BF16), torch.ones(256, device="cuda", dtype=BF16)
    assert fp8_linear_add_rms_norm(*arguments, residual, gain, EPS)[1].shape == (0, 256)
    assert (
        linear_add_rms_norm(residual, torch.zeros(256, 256, device="cuda", dtype=BF16), residual, gain, EPS)[0].numel()
        == 0
    )
