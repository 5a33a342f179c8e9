# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_attention` on a card against the fp64 definition, with bounds that follow from the roundings made."""

from __future__ import annotations

import pytest
import torch

from dllm_compile._compat import has_triton
from dllm_compile.kernels.row_attention import row_attention, row_attention_masked
from tests.kernels.card_cases import assert_within_rounding, on_card
from tests.kernels.cases import dense_attention, packed_heads, tiles_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")

# (samples as (rows, keys), pad rows)
LAYOUTS = {
    "1": ([(1, 1)], 0),
    "17": ([(17, 17)], 0),
    "129": ([(100, 100), (29, 29)], 0),
    "1280": ([(1280, 1280)], 0),
    "4096": ([(1280, 1280), (1, 1), (1000, 1000), (767, 767), (1024, 1024)], 24),
    "few rows, many keys": ([(32, 1280), (33, 1000), (64, 64)], 15),
}


def inputs(layout, heads, kv_heads, head_dim, dtype, tile_rows=64):
    samples, pad = LAYOUTS[layout]
    rows, keys = sum(s[0] for s in samples) + pad, sum(s[1] for s in samples)
    keys = rows if keys + pad == rows else keys  # keys that are rows: slices of one packed projection
    q, k, v = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype)
    q, k, v = on_card(q, k, v)
    return q, k, v, tiles_of(samples, tile_rows, pad).cuda()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 128), (8, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_definition(layout, heads, kv_heads, head_dim, dtype):
    q, k, v, tiles = inputs(layout, heads, kv_heads, head_dim, dtype)
    assert len(k) == 1 or k.stride(0) == (heads + 2 * kv_heads) * head_dim  # a slice, where that means anything
    out = row_attention(q, k, v, tiles, 64)
    assert out.is_contiguous()
    assert out.dtype == dtype
    assert_within_rounding(out, q, k, v, tiles)
    pad = LAYOUTS[layout][1]
    assert pad == 0 or out[-pad:].count_nonzero() == 0


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 256])
def test_other_head_sizes(head_dim, dtype):
    q, k, v, tiles = inputs("129", 4, 2, head_dim, dtype)
    assert_within_rounding(row_attention(q, k, v, tiles, 64), q, k, v, tiles)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_rows", [1, 16, 32, 48, 128, 300])
def test_other_tile_sizes(tile_rows, dtype):
    q, k, v, tiles = inputs("few rows, many keys", 4, 2, 128, dtype, tile_rows)
    assert_within_rounding(row_attention(q, k, v, tiles, tile_rows), q, k, v, tiles)


@needs_triton
def test_large_scores():
    q, k, v, tiles = inputs("129", 4, 2, 128, torch.float32)
    q = q * 30
    out = row_attention(q, k, v, tiles, 64)
    # Scores of a few hundred carry fp32 errors of up to 1e-4 into the weights' exponents.
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles), rtol=0, atol=5e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_a_descriptor_cannot_read(dtype):
    q, k, v, tiles = inputs("129", 4, 2, 64, dtype)
    expected = row_attention(q, k, v, tiles, 64)
    heads_outside = k.transpose(0, 1).contiguous().transpose(0, 1)
    odd_rows = torch.nn.functional.pad(v.flatten(1), (0, 3))[:, :128].unflatten(1, (2, 64))
    assert_within_rounding(row_attention(q, heads_outside, odd_rows, tiles, 64), q, k, v, tiles)
    dims_outside = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(row_attention(dims_outside, k, v, tiles, 64), expected)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_stays_in_its_sample(dtype):
    q, k, v, tiles = inputs("129", 4, 2, 128, dtype)
    clean = row_attention(q, k, v, tiles, 64)
    for x in (q, k, v):
        x[100:] = torch.nan
    out = row_attention(q, k, v, tiles, 64)
    assert torch.equal(out[:100], clean[:100])
    assert out[100:].isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_bit_equal_and_do_not_depend_on_the_batch(dtype):
    q, k, v, tiles = inputs("4096", 8, 2, 128, dtype)
    out = row_attention(q, k, v, tiles, 64)
    for _ in range(3):
        assert torch.equal(row_attention(q, k, v, tiles, 64), out)
    # The same sample at another place, among as many programs (the block width depends on their number).
    order = torch.cat([torch.arange(1281, 4096), torch.arange(1281)]).cuda()
    rolled = tiles_of([(1000, 1000), (767, 767), (1024, 1024), (24, 24), (1280, 1280), (1, 1)], 64).cuda()
    again = row_attention(q[order], k[order], v[order], rolled, 64)
    assert torch.equal(again[2815:4095], out[:1280])


@needs_triton
def test_captured_graph_reads_the_tile_table_anew():
    q, k, v, tiles = inputs("129", 4, 2, 128, torch.bfloat16)
    for _ in range(3):
        row_attention(q, k, v, tiles, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = row_attention(q, k, v, tiles, 64)
    for samples in ([(100, 100), (29, 29)], [(60, 60), (69, 69)], [(129, 129)]):
        fresh = tiles_of(samples, 64)
        tiles.zero_()
        tiles[: len(fresh)] = fresh[: len(tiles)].cuda()
        graph.replay()
        torch.cuda.synchronize()
        assert_within_rounding(out, q, k, v, tiles)


def test_does_not_wait_for_the_device():
    q, k, v, tiles = inputs("129", 4, 2, 128, torch.bfloat16)
    for implementation in (row_attention, row_attention_masked):
        implementation(q, k, v, tiles, 64)
        torch.cuda.set_sync_debug_mode("error")
        try:
            implementation(q, k, v, tiles, 64)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("head_dim", "dtype"), [(24, torch.bfloat16), (128, torch.float32), (64, torch.float64)])
def test_fallback(head_dim, dtype):
    q, k, v, tiles = inputs("129", 4, 2, head_dim, dtype)
    expected = dense_attention(q, k, v, tiles)
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-9}[dtype]
    for implementation in (row_attention_masked, row_attention):
        out = implementation(q, k, v, tiles, 64)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


def test_opcheck():
    torch.library.opcheck(row_attention, (*inputs("17", 4, 2, 64, torch.bfloat16), 64))


@needs_triton
def test_under_inductor():
    def attend(packed, tiles):
        q, k, v = (
            packed[:, :512].view(-1, 4, 128),
            packed[:, 512:768].view(-1, 2, 128),
            packed[:, 768:].view(-1, 2, 128),
        )
        return row_attention(q, k, v, tiles, 64)

    packed = torch.randn(129, 1024, device="cuda", dtype=torch.bfloat16)
    tiles = tiles_of([(100, 100), (29, 29)], 64).cuda()
    assert torch.equal(torch.compile(attend, fullgraph=True)(packed, tiles), attend(packed, tiles))
