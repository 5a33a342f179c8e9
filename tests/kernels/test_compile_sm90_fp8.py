# SPDX-License-Identifier: Apache-2.0
"""The shipped launch configurations of the FP8 operators' kernels compile for an H200."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dllm_compile._compat import interprets_triton
from dllm_compile.kernels import add_rms_norm_triton as norm
from dllm_compile.kernels import fp8_linear_triton as fp8
from dllm_compile.kernels import linear_triton as linear
from dllm_compile.kernels import swiglu_quant_triton as swiglu
from dllm_compile.kernels.fp8_format import FP8, empty_scales

from .sm90 import SHARED_MEMORY_LIMIT, compile_kernel

pytestmark = [
    pytest.mark.usefixtures("h200"),
    pytest.mark.skipif(interprets_triton(), reason="kernels are interpreted in this process"),
]

BF16 = torch.bfloat16
GATE_UP, QKV, DOWN, OUT = (24576, 4096), (12288, 4096), (4096, 12288), (4096, 4096)


def assert_is_pipelined(result, instruction):
    assert "cp.async.bulk.tensor" in result.ptx
    assert instruction in result.ptx
    assert not result.serialized
    assert result.spilled == 0
    assert result.shared <= SHARED_MEMORY_LIMIT


def compile_fp8(rows, outs, width, tiling, folder, row_gap=0):
    codes, weight = torch.empty(rows, width, dtype=FP8), torch.empty(outs, width + row_gap, dtype=FP8)[:, :width]
    out = torch.empty(tiling.parts, rows, outs) if tiling.parts > 1 else torch.empty(rows, outs, dtype=BF16)
    scales, weight_scales = empty_scales(codes, 128), torch.empty(outs // 128, width // 128)
    _, arguments, constants = fp8.plan_fp8_linear(codes, scales, weight, weight_scales, out, tiling)
    return compile_kernel(fp8.fp8_linear_kernel, arguments, constants, folder), constants


@pytest.mark.parametrize("shape", [GATE_UP, QKV, DOWN, OUT])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_few_rows_use_the_fp8_tensor_cores(rows, shape, tmp_path):
    tiling = fp8.choose_tiling(rows, *shape)
    if tiling is None:
        assert rows == 128
        assert shape[0] > 8192
        return
    assert tiling.rows == rows
    assert tiling.parts == {GATE_UP: 1, QKV: 1, DOWN: 4 if rows == 128 else 8, OUT: 4}[shape]
    result, _ = compile_fp8(rows, *shape, tiling, tmp_path)
    # With few rows the weight is the 64-row side, and the other is as narrow as the rows of x.
    narrow = rows if tiling.swap else tiling.outs
    assert_is_pipelined(result, f"wgmma.mma_async.sync.aligned.m64n{narrow}k32.f32.e4m3.e4m3")


def test_many_rows_use_the_fp8_tensor_cores(tmp_path):
    result, _ = compile_fp8(4096, *OUT, fp8.ANY_ROWS, tmp_path)
    assert_is_pipelined(result, "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3")


@pytest.mark.parametrize("rows", [16, 128])
def test_fp8_without_descriptors_compiles(rows, tmp_path):
    tiling = fp8.choose_tiling(rows, *DOWN)
    result, constants = compile_fp8(rows, *DOWN, tiling, tmp_path, row_gap=8)
    assert not constants["DESCRIBED"]
    assert "e4m3.e4m3" in result.ptx
    assert result.shared <= SHARED_MEMORY_LIMIT


@pytest.mark.parametrize(
    ("rows", "outs", "width", "expected"),
    [
        (1, 256, 256, (16, 128, 1)),
        (17, 256, 768, (32, 128, 1)),
        (100, 4096, 2048, (128, 64, 2)),
        (129, 4096, 12288, None),
        (65, 24576, 4096, None),
        (64, 8192, 4096, (64, 64, 1)),
    ],
)
def test_tiling_of_other_shapes(rows, outs, width, expected):
    tiling = fp8.choose_tiling(rows, outs, width)
    assert (tiling and (tiling.rows, tiling.outs, tiling.parts)) == expected


def compile_linear(rows, outs, width, tiling, folder):
    x, weight = torch.empty(rows, width, dtype=BF16), torch.empty(outs, width, dtype=BF16)
    out = torch.empty(tiling.parts, rows, outs)
    _, arguments, constants = linear.plan_linear_parts(x, weight, out, tiling)
    return compile_kernel(linear.linear_parts_kernel, arguments, constants, folder), constants


@pytest.mark.parametrize("shape", [OUT, DOWN])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_parts_use_the_tensor_cores(rows, shape, tmp_path):
    tiling = linear.choose_part_tiling(BF16, rows, *shape)
    assert tiling.rows == rows
    result, _ = compile_linear(rows, *shape, tiling, tmp_path)
    narrow = rows if tiling.swap else tiling.outs
    assert_is_pipelined(result, f"wgmma.mma_async.sync.aligned.m64n{narrow}k16.f32.bf16.bf16")


def test_parts_without_descriptors_compile(tmp_path):
    result, constants = compile_linear(16, 1000, 1028, linear.choose_part_tiling(BF16, 16, *OUT), tmp_path)
    assert not constants["DESCRIBED"]
    assert result.shared <= SHARED_MEMORY_LIMIT


def test_products_that_are_left_to_the_library():
    assert linear.choose_part_tiling(BF16, 129, *OUT) is None
    assert linear.choose_part_tiling(BF16, 16, *QKV) is None
    assert linear.choose_part_tiling(torch.float32, 16, *OUT) is None
    assert linear.choose_part_tiling(BF16, 16, 256, 256) is None


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("parts", [0, 2, 4, 8])
@pytest.mark.parametrize("rows", [128, 4096])
def test_add_and_norm_move_16_bytes_at_a_time(rows, parts, quantize, tmp_path):
    residual = torch.empty(rows, 4096, dtype=BF16)
    product = torch.empty(parts, rows, 4096) if parts else residual
    normed = torch.empty(rows, 4096, dtype=FP8 if quantize else BF16)
    scales = empty_scales(residual, 128) if quantize else None
    weight, config = torch.empty(4096, dtype=BF16), norm.choose_row_config(rows, 4096)
    plan = norm.plan_add_rms_norm(product, residual, weight, 1e-5, torch.empty_like(residual), normed, scales, config)
    _, arguments, constants = plan
    result = compile_kernel(norm.add_rms_norm_kernel, arguments, constants, tmp_path)
    assert result.spilled == 0
    assert result.ptx.count("ld.global") == result.ptx.count("ld.global.v4")
    assert ("satfinite.e4m3x2" in result.ptx) == quantize
    assert "div.full" not in result.ptx
    assert "sqrt.approx" not in result.ptx


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(128, 12288), (4096, 12288), (128, 384)])
def test_swiglu_moves_16_bytes_at_a_time(rows, width, gated, tmp_path):
    packed, codes = torch.empty(rows, 2 * width, dtype=BF16), torch.empty(rows, width, dtype=FP8)
    gate, up = packed[:, :width], packed[:, width:] if gated else None
    plan = swiglu.plan_swiglu_quant(gate, up, codes, empty_scales(codes, 128), swiglu.choose_rectangle(rows))
    _, arguments, constants = plan
    result = compile_kernel(swiglu.swiglu_quant_kernel, arguments, constants, tmp_path)
    assert result.spilled == 0
    assert result.ptx.count("ld.global") == result.ptx.count("ld.global.v4")
    assert "satfinite.e4m3x2" in result.ptx


def test_sum_of_parts_compiles(tmp_path):
    arguments = (torch.empty(8, 128, 4096), torch.empty(128, 4096, dtype=BF16), 128 * 4096)
    result = compile_kernel(fp8.sum_parts_kernel, arguments, {"PARTS": 8, "BLOCK": 1024}, tmp_path)
    assert result.spilled == 0
    assert result.ptx.count("ld.global") == result.ptx.count("ld.global.v4")
