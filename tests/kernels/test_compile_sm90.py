# SPDX-License-Identifier: Apache-2.0
"""The shipped launch configurations compile for an H200: tensor cores used, no spills, shared memory fits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dllm_compile._compat import interprets_triton
from dllm_compile.kernels import head_confidence_triton as head
from dllm_compile.kernels import row_attention_triton as attention
from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.kernels.row_attention_blocks import Work
from dllm_compile.kernels.summed_query import Tracking

from .cases import packed_heads, tiles_of
from .interpreted import noise_kernel
from .sm90 import SHARED_MEMORY_LIMIT, compile_kernel

pytestmark = [
    pytest.mark.usefixtures("h200"),
    pytest.mark.skipif(interprets_triton(), reason="kernels are interpreted in this process"),
]

BF16 = torch.bfloat16
H200_PROCESSORS = 132


# Launches as a step's tables give them: n = R // 128 + S + 1 tiles.
WORK = {
    "1 x 32": Work(32, 2, 128, 32, 1281),
    "1 x 64": Work(64, 2, 128, 32, 1281),
    "1 x 128": Work(128, 3, 128, 32, 1281),
    "1 x 1280": Work(1280, 12, 128, 32, 1281),
    "2 x 128": Work(256, 5, 128, 32, 2561),
    "8 x 32": Work(256, 11, 128, 32, 10241),
    "8 x 64": Work(512, 13, 128, 32, 10241),
    "8 x 128": Work(1024, 17, 128, 32, 10241),
    "32 x 32": Work(1024, 41, 128, 32, 40961),
    "32 x 128": Work(4096, 65, 128, 32, 40961),
    "1 x 128, 4 heads": Work(128, 3, 128, 4, 1281),
}
# Where a program's block has 64 rows or more: below, tensor cores are used by other instructions.
ON_WGMMA = [name for name in WORK if name not in ("1 x 32", "32 x 32")]


def blocks_for(name, dtype=BF16, head_dim=128):
    return attention.choose_blocks(dtype, head_dim, WORK[name], H200_PROCESSORS)


def compile_attention(q, k, v, blocks, folder, tracked=False):
    rows, heads, head_dim = q.shape
    out = torch.empty(rows, heads * head_dim, dtype=q.dtype)
    spans = torch.zeros(3, 2, dtype=torch.int32)
    tracking = Tracking(torch.zeros(3, 16, dtype=torch.int64), spans, torch.zeros(heads, rows)) if tracked else None
    tiles = tiles_of([(rows, rows)], 128)
    _, arguments, constants = attention.plan_row_attention(q, k, v, tiles, 128, out, blocks, tracking)
    return compile_kernel(attention.row_attention_kernel, arguments, constants, folder), constants


# One piece of work for each launch configuration.
CONFIGURATIONS = {(blocks_for(name, head_dim=dim), dim): (name, dim) for dim in (128, 64) for name in WORK}


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(("name", "head_dim"), CONFIGURATIONS.values())
def test_attention_uses_the_tensor_cores_without_spills(name, head_dim, tracked, tmp_path):
    blocks = blocks_for(name, head_dim=head_dim)
    result, constants = compile_attention(*packed_heads(128, 128, 4, 2, head_dim, BF16), blocks, tmp_path, tracked)
    assert constants["DESCRIBED"]
    assert constants["TRACKED"] == tracked
    assert "cp.async.bulk.tensor" in result.ptx
    assert ("wgmma.mma_async.sync.aligned.m64" if name in ON_WGMMA else "mma.sync.aligned.m16") in result.ptx
    assert not result.serialized
    assert result.shared <= SHARED_MEMORY_LIMIT
    # Blocks of 64 x 128 with scores spill a little and are the fastest all the same (H200: 20.8 us whether they spill
    # 60 bytes or 100, 24.2 without).
    assert result.spilled <= (100 if tracked and blocks == (64, 128, 3, 4, 1) and head_dim == 128 else 0)


@pytest.mark.parametrize("tracked", [False, True])
def test_attention_of_one_row_compiles(tracked, tmp_path):
    """Sizes of 1 are constants to the compiler."""
    blocks = attention.choose_blocks(BF16, 128, Work(1, 2, 128, 32, 1281), H200_PROCESSORS)
    assert blocks.splits > 1
    result, _ = compile_attention(*packed_heads(1, 1, 1, 1, 128, BF16), blocks, tmp_path, tracked)
    assert result.spilled == 0


def test_blocks_follow_what_was_measured():
    """Height, keys and programs a tile of the measured shapes; the tallest tiles where they fill the card."""
    assert [blocks_for(name)[:2] for name in ("1 x 128", "8 x 128", "32 x 128")] == [(64, 128), (128, 128), (128, 128)]
    assert [blocks_for(name)[:2] for name in ("8 x 32", "32 x 32")] == [(64, 64), (32, 128)]
    assert [(blocks_for(name).rows, blocks_for(name).splits) for name in ("1 x 32", "1 x 64")] == [(32, 4), (64, 4)]
    assert [name for name in WORK if blocks_for(name).splits > 1] == ["1 x 32", "1 x 64", "1 x 128, 4 heads"]
    assert all(blocks.splits == 1 for blocks in (blocks_for("1 x 128"), blocks_for("2 x 128")))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 127, 128, 160, 1280, 5000])
@pytest.mark.parametrize("samples", [1, 3, 64])
@pytest.mark.parametrize("heads", [1, 8, 32, 64])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_programs_that_share_keys_fill_the_card_at_most(rows, samples, heads, dtype):
    work = Work(rows * samples, rows * samples // 128 + samples + 1, 128, heads, 1280 * samples)
    blocks = attention.choose_blocks(dtype, 128, work, H200_PROCESSORS)
    assert blocks.splits in (1, 2, 4, 8)
    real = heads * samples * -(-rows // blocks.rows)
    parts = -(-min(128, work.rows) // blocks.rows)
    assert blocks.splits == 1 or real * blocks.splits <= H200_PROCESSORS
    assert blocks.splits == 1 or heads * work.tiles * parts <= ARRIVALS


def test_attention_without_descriptors_uses_the_tensor_cores(tmp_path):
    q, k, v = packed_heads(64, 64, 4, 2, 128, BF16)
    heads_outside = k.transpose(0, 1).contiguous().transpose(0, 1)
    result, constants = compile_attention(q, heads_outside, v, blocks_for("8 x 64"), tmp_path)
    assert not constants["DESCRIBED"]
    assert "wgmma.mma_async.sync.aligned.m64" in result.ptx
    assert result.shared <= SHARED_MEMORY_LIMIT


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [("1 x 32", 16, BF16), ("1 x 128", 128, torch.float32), ("1 x 128", 256, BF16), ("8 x 128", 32, BF16)],
)
def test_attention_of_other_shapes_compiles(name, head_dim, dtype, tracked, tmp_path):
    blocks = blocks_for(name, dtype, head_dim)
    result, _ = compile_attention(*packed_heads(128, 128, 4, 2, head_dim, dtype), blocks, tmp_path, tracked)
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
