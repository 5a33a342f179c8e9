# SPDX-License-Identifier: Apache-2.0
"""The shipped launch configurations of the verify pass's kernels compile for an H200."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dllm_compile._compat import interprets_triton
from dllm_compile.kernels import head_confidence_triton as head
from dllm_compile.kernels import verify_attention_triton as attention

from .sm90 import SHARED_MEMORY_LIMIT, compile_kernel
from .verify_cases import verify_case

pytestmark = [
    pytest.mark.usefixtures("h200"),
    pytest.mark.skipif(interprets_triton(), reason="kernels are interpreted in this process"),
]

BF16 = torch.bfloat16
H200_PROCESSORS = 132


def compile_attention(head_dim, tile_rows, dtype, programs, folder):
    case = verify_case([(16, 8, 0, 64, 24)], 4, 2, head_dim, dtype)
    blocks = attention.choose_verify_blocks(dtype, head_dim, tile_rows, programs, H200_PROCESSORS)
    out = torch.empty(32, 4 * head_dim, dtype=dtype)
    _, arguments, constants = attention.plan_verify_attention(*case.arguments, out, blocks)
    return compile_kernel(attention.verify_attention_kernel, arguments, constants, folder), blocks


@pytest.mark.parametrize("programs", [32, 256, 1024])
@pytest.mark.parametrize(("head_dim", "tile_rows"), [(128, 32), (64, 32), (128, 48), (128, 128), (256, 32)])
def test_attention_uses_the_tensor_cores_without_spills(head_dim, tile_rows, programs, tmp_path):
    result, blocks = compile_attention(head_dim, tile_rows, BF16, programs, tmp_path)
    assert (blocks.splits > 1) == (programs == 32)
    assert "mma" in result.ptx
    assert "cp.async.bulk.tensor" in result.ptx  # loads of the next block run while this one is computed
    assert not result.serialized
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert result.spilled == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("tile_rows", [32, 128])
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_whatever_the_kernel_takes_fits(head_dim, tile_rows, dtype, tmp_path):
    if not attention.kernel_takes(torch.empty(1, 1, head_dim, dtype=dtype), tile_rows):
        assert (head_dim, tile_rows, dtype) == (256, 128, torch.float32)
        return
    result, _ = compile_attention(head_dim, tile_rows, dtype, 32, tmp_path)
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert "tf32" not in result.ptx


@pytest.mark.parametrize("rows", [8, 32, 256])
def test_head_with_a_given_token_compiles(rows, tmp_path):
    tiling = head.choose_tiling(BF16, rows)
    x, weight = torch.empty(rows, 4096, dtype=BF16), torch.empty(1024, 4096, dtype=BF16)
    numbers, ids = torch.empty(4, rows, 1024 // tiling.ids), torch.empty(rows, 1024 // tiling.ids, dtype=torch.int32)
    partials = (numbers[0], ids, numbers[1], numbers[2], numbers[3])
    given, logit = torch.zeros(rows, dtype=torch.int64), torch.empty(rows)
    banned = torch.tensor([-1])
    _, arguments, constants = head.plan_tiles(x, weight, 1.0, 336, banned, None, None, partials, tiling, given, logit)
    result = compile_kernel(head.tile_kernel, arguments, constants, tmp_path)
    assert "wgmma.mma_async.sync.aligned.m64" in result.ptx
    assert not result.serialized
    assert result.spilled == 0
    outputs = (logit, torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows))
    merged = compile_kernel(
        head.merge_kernel, (*partials, *outputs, 126464, 1976), {"GIVEN": True, "BLOCK": 1024}, tmp_path
    )
    assert merged.spilled == 0
