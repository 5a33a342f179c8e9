# SPDX-License-Identifier: Apache-2.0
"""The shipped launch configurations compile for an H200: tensor cores used, no spills, shared memory fits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dllm_compile._compat import interprets_triton
from dllm_compile.kernels import head_confidence_triton as head
from dllm_compile.kernels import row_attention_triton as attention

from .cases import packed_heads, tiles_of
from .interpreted import noise_kernel
from .sm90 import SHARED_MEMORY_LIMIT, compile_kernel

pytestmark = [
    pytest.mark.usefixtures("h200"),
    pytest.mark.skipif(interprets_triton(), reason="kernels are interpreted in this process"),
]

BF16 = torch.bfloat16
H200_PROCESSORS = 132


def compile_attention(q, k, v, blocks, folder):
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
    _, arguments, constants = attention.plan_row_attention(q, k, v, tiles_of([(64, 64)], 64), 64, out, blocks)
    return compile_kernel(attention.row_attention_kernel, arguments, constants, folder), constants


@pytest.mark.parametrize(
    ("head_dim", "tile_rows", "programs"),
    [(128, 64, 64), (128, 64, 4096), (64, 64, 64), (64, 64, 4096), (128, 128, 4096), (256, 64, 64), (32, 64, 4096)],
)
def test_attention_uses_the_tensor_cores_without_spills(head_dim, tile_rows, programs, tmp_path):
    blocks = attention.choose_blocks(BF16, head_dim, tile_rows, programs, H200_PROCESSORS)
    result, constants = compile_attention(*packed_heads(64, 64, 4, 2, head_dim, BF16), blocks, tmp_path)
    assert constants["DESCRIBED"]
    assert "cp.async.bulk.tensor" in result.ptx
    assert "wgmma.mma_async.sync.aligned.m64" in result.ptx
    assert not result.serialized
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert result.spilled == 0


def test_attention_without_descriptors_uses_the_tensor_cores(tmp_path):
    q, k, v = packed_heads(64, 64, 4, 2, 128, BF16)
    heads_outside = k.transpose(0, 1).contiguous().transpose(0, 1)
    blocks = attention.choose_blocks(BF16, 128, 64, 64, H200_PROCESSORS)
    result, constants = compile_attention(q, heads_outside, v, blocks, tmp_path)
    assert not constants["DESCRIBED"]
    assert "wgmma.mma_async.sync.aligned.m64" in result.ptx
    assert result.shared <= SHARED_MEMORY_LIMIT


@pytest.mark.parametrize(("tile_rows", "head_dim", "dtype"), [(16, 128, BF16), (64, 128, torch.float32)])
def test_attention_of_other_shapes_compiles(tile_rows, head_dim, dtype, tmp_path):
    blocks = attention.choose_blocks(dtype, head_dim, tile_rows, 64, H200_PROCESSORS)
    result, _ = compile_attention(*packed_heads(64, 64, 4, 2, head_dim, dtype), blocks, tmp_path)
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert "tf32" not in result.ptx


def compile_head(dtype, rows, width, sampled, folder):
    tiling = head.choose_tiling(dtype, rows)
    x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(1024, width, dtype=dtype)
    numbers, ids = torch.empty(4, rows, 1024 // tiling.ids), torch.empty(rows, 1024 // tiling.ids, dtype=torch.int32)
    partials = (numbers[0], ids, numbers[1], numbers[2], numbers[3])
    noise = (torch.empty(rows, dtype=torch.int64), torch.tensor(1.0)) if sampled else (None, None)
    _, arguments, constants = head.plan_tiles(x, weight, 0.5, 336, torch.tensor([-1]), *noise, partials, tiling)
    return compile_kernel(head.tile_kernel, arguments, constants, folder), constants


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_head_uses_the_tensor_cores_without_spills(rows, sampled, tmp_path):
    result, constants = compile_head(BF16, rows, 4096, sampled, tmp_path)
    assert constants["DESCRIBED"]
    assert "cp.async.bulk.tensor" in result.ptx
    # The vocabulary is the 64-row side: the other side can be as narrow as the rows of x.
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16" in result.ptx
    assert not result.serialized
    assert result.spilled == 0
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert "cvt.rn.bf16" in result.ptx  # logits are rounded before the softmax
    assert "lg2.approx" not in result.ptx


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4096), (BF16, 129)])
def test_head_of_other_inputs_compiles(dtype, width, tmp_path):
    result, constants = compile_head(dtype, 16, width, True, tmp_path)
    assert not constants["DESCRIBED"]
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert "tf32" not in result.ptx


def test_noise_compiles(tmp_path):
    arguments = (torch.zeros(6, dtype=torch.int64), torch.zeros(6, 1024, dtype=torch.int64), torch.zeros(6, 1024))
    result = compile_kernel(noise_kernel, arguments, {"COUNT": 1024}, tmp_path)
    assert "lg2.approx" not in result.ptx  # its absolute error near 1 would ruin log(-log(u))


def test_head_merge_compiles(tmp_path):
    numbers, ids = torch.empty(4, 16, 2048), torch.empty(16, 2048, dtype=torch.int32)
    partials = (numbers[0], ids, numbers[1], numbers[2], numbers[3])
    outputs = (torch.empty(16, dtype=torch.int64), torch.empty(16))
    result = compile_kernel(
        head.merge_kernel, (*partials, None, *outputs, None, 126464, 1976), {"GIVEN": False, "BLOCK": 1024}, tmp_path
    )
    assert result.spilled == 0
