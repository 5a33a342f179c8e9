# SPDX-License-Identifier: Apache-2.0
"""The shipped launch configurations of the caches' kernels compile for an H200."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dllm_compile._compat import interprets_triton
from dllm_compile.kernels import facache_triton as facache
from dllm_compile.kernels import qkv_rope_cache_write_triton as rope_write
from dllm_compile.kernels import row_scores_triton as scores

from .cache_cases import block_tiles, empty_state, rope_write_inputs
from .cases import packed_heads
from .sm90 import SHARED_MEMORY_LIMIT, compile_kernel

pytestmark = [
    pytest.mark.usefixtures("h200"),
    pytest.mark.skipif(interprets_triton(), reason="kernels are interpreted in this process"),
]

BF16 = torch.bfloat16
H200_PROCESSORS = 132


def compile_facache(head_dim, tile_rows, dtype, step, folder):
    q, k, v = packed_heads(64, 64, 4, 2, head_dim, dtype)
    blocks = facache.choose_facache_blocks(dtype, head_dim, tile_rows)
    out, state = torch.empty(64, 4 * head_dim, dtype=dtype), empty_state(64, 4, head_dim)
    tiles = block_tiles([(64, 8, 40)], tile_rows)
    _, arguments, constants = facache.plan_facache(q, k, v, state, tiles, tile_rows, out, blocks, step)
    return compile_kernel(facache.facache_kernel, arguments, constants, folder), constants


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize(("head_dim", "tile_rows"), [(128, 64), (64, 64), (128, 128), (256, 64), (32, 64)])
def test_facache_uses_the_tensor_cores_without_spills(head_dim, tile_rows, step, tmp_path):
    result, constants = compile_facache(head_dim, tile_rows, BF16, step, tmp_path)
    assert constants["DESCRIBED"]
    assert "cp.async.bulk.tensor" in result.ptx
    assert "wgmma.mma_async.sync.aligned.m64" in result.ptx
    assert not result.serialized
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert result.spilled == 0


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize(("head_dim", "tile_rows", "dtype"), [(128, 16, BF16), (128, 64, torch.float32)])
def test_facache_of_other_shapes_compiles(head_dim, tile_rows, dtype, step, tmp_path):
    result, _ = compile_facache(head_dim, tile_rows, dtype, step, tmp_path)
    assert result.shared <= SHARED_MEMORY_LIMIT
    assert "tf32" not in result.ptx


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 128), (32, 8, 128), (4, 2, 24)])
@pytest.mark.parametrize("rows", [32, 128, 1024, 4096])
def test_rope_write_compiles(rows, heads, kv_heads, head_dim, tmp_path):
    arguments = rope_write_inputs(2, heads, kv_heads, head_dim, BF16)[:7]
    q, share = torch.empty(2, heads, head_dim, dtype=BF16), rope_write.choose_share(rows, heads)
    _, arguments, constants = rope_write.plan_rope_write(*arguments, q, share)
    result = compile_kernel(rope_write.rope_write_kernel, arguments, constants, tmp_path)
    assert result.spilled == 0
    assert "fma.rn.f32" not in result.ptx  # products are rounded as the reference's are


def test_rope_write_of_many_heads_moves_16_bytes_at_a_time(tmp_path):
    arguments = rope_write_inputs(2, 32, 32, 128, BF16)[:7]
    q, share = torch.empty(2, 32, 128, dtype=BF16), rope_write.choose_share(1024, 32)
    _, arguments, constants = rope_write.plan_rope_write(*arguments, q, share)
    result = compile_kernel(rope_write.rope_write_kernel, arguments, constants, tmp_path)
    assert "ld.global.v4.b32" in result.ptx
    assert "st.global.v4.b32" in result.ptx


@pytest.mark.parametrize("keys", [1280, 40960])
@pytest.mark.parametrize("kv_heads", [32, 8])
def test_scores_compile(kv_heads, keys, tmp_path):
    q, k, _ = packed_heads(64, 64, 32, kv_heads, 128, BF16)
    cut = scores.choose_cut(keys, H200_PROCESSORS)
    window, spans = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
    plan = scores.plan_scores(q, window, k, spans, torch.zeros(64), torch.zeros(2, kv_heads * 128), cut)
    results = [compile_kernel(kernel, arguments, constants, tmp_path) for kernel, _, arguments, constants in plan]
    assert all(result.spilled == 0 for result in results)
    assert "ld.global.v4.b32" in results[1].ptx  # keys, eight numbers at a time
