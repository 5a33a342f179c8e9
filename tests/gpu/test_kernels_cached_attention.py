# SPDX-License-Identifier: Apache-2.0
"""`dllm::cached_attention` on a card: programs that share keys, tiles of 128 rows, tables of all kinds of samples."""

from __future__ import annotations

import pytest
import torch

from dllm_compile._compat import has_triton
from dllm_compile.kernels import _launch
from dllm_compile.kernels.cached_attention import ARRIVALS, cached_attention
from dllm_compile.kernels.row_attention import row_attention
from tests.kernels.card_cases import assert_within_rounding, cached_inputs, counters, replayed, step_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]

HEADS = [(32, 32, 128), (8, 2, 64), (3, 1, 128)]
# Samples as (rows, keys), pad rows.
LAYOUTS = {
    "1 x 32": ([(32, 1280)], 0),
    "1 x 33, 15 pad rows": ([(33, 1111)], 15),
    "1 x 128": ([(128, 1280)], 0),
    "1 x 1280": ([(1280, 1280)], 0),
    "2 x 128": ([(128, 1280), (128, 999)], 0),
    "8 x 128": ([(128, 700 + 83 * i) for i in range(8)], 24),
    "8 x 32": ([(32, 700 + 83 * i) for i in range(8)], 0),
    "first passes among steps": ([(1280, 1280), (32, 1100), (128, 1280), (1, 40), (600, 600), (64, 900)], 7),
    "64 samples": ([(1 + 37 * i % 160, 200 + 13 * i) for i in range(64)], 19),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_definition(layout, heads, dtype):
    samples, pad = LAYOUTS[layout]
    q, k, v, tiles = cached_inputs(samples, *heads, dtype, pad=pad)
    arrived = counters()
    out = cached_attention(q, k, v, tiles, 128, arrived)
    assert_within_rounding(out, q, k, v, tiles)
    assert pad == 0 or out[-pad:].count_nonzero() == 0
    assert arrived.count_nonzero() == 0
    assert torch.equal(row_attention(q, k, v, tiles, 128), out), "counters of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "splits"), [(16, 8), (32, 2), (32, 3), (32, 4), (32, 8), (64, 2), (64, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_number_of_shares(head_dim, rows, splits, dtype):
    from dllm_compile.kernels.row_attention_blocks import Blocks
    from dllm_compile.kernels.row_attention_triton import row_attention_triton

    samples = [(70, 1280), (1, 3), (40, 129), (90, 64 * splits)]
    q, k, v, tiles = cached_inputs(samples, 4, 2, head_dim, dtype, pad=9)
    blocks = Blocks(rows, 64, 3, 4, splits) if dtype.itemsize == 2 else Blocks(min(rows, 32), 32, 2, 8, splits)
    out = row_attention_triton(q, k, v, tiles, 128, blocks)
    assert_within_rounding(out, q, k, v, tiles)
    for _ in range(20):
        assert torch.equal(row_attention_triton(q, k, v, tiles, 128, blocks), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["1 x 32", "1 x 33, 15 pad rows", "1 x 128", "first passes among steps"])
def test_twenty_replays_are_bit_equal(layout, dtype):
    samples, pad = LAYOUTS[layout]
    q, k, v, tiles = cached_inputs(samples, 32, 8, 128, dtype, pad=pad)
    arrived = counters()
    expected = cached_attention(q, k, v, tiles, 128, arrived)

    def layers():
        return [cached_attention(q, k, v, tiles, 128, arrived) for _ in range(4)]

    graph, outs = replayed(layers)
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)
        assert arrived.count_nonzero() == 0


def test_captured_graph_reads_the_tile_table_anew():
    """A table of the same size with other samples in it, one of which brings no rows."""
    q, k, v, tiles = cached_inputs([(20, 600), (12, 680)], 32, 32, 128, torch.bfloat16)
    arrived = counters()
    graph, out = replayed(lambda: cached_attention(q, k, v, tiles, 128, arrived))
    for samples in ([(20, 600), (12, 680)], [(32, 1280), (0, 0)], [(1, 100), (31, 1180)]):
        tiles.copy_(step_table(samples, 128)[: len(tiles)])
        graph.replay()
        torch.cuda.synchronize()
        assert_within_rounding(out, q, k, v, tiles)


def test_streams_with_counters_of_their_own_do_not_meet():
    cases = [cached_inputs([(32, 1280 - 50 * i)], 32, 32, 128, torch.bfloat16) for i in range(2)]
    arrived = [counters() for _ in cases]
    expected = [cached_attention(*case, 128, own) for case, own in zip(cases, arrived, strict=True)]
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in cases], [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(cached_attention(*cases[i], 128, arrived[i]))
    torch.cuda.synchronize()
    for many, one in zip(outs, expected, strict=True):
        assert all(torch.equal(out, one) for out in many)


def test_a_sample_does_not_depend_on_its_neighbours():
    """The same sample elsewhere in a table of the same sizes: the same blocks, hence the same bits."""
    samples = [(128, 1280), (64, 900), (128, 1000), (100, 1111)]
    q, k, v, tiles = cached_inputs(samples, 8, 2, 128, torch.bfloat16)
    out = cached_attention(q, k, v, tiles, 128, counters())
    other = torch.cat([tiles[[3]], tiles[:3], tiles[4:]])
    assert torch.equal(cached_attention(q, k, v, other, 128, counters()), out)


def test_a_nan_stays_in_its_sample():
    q, k, v, tiles = cached_inputs([(20, 600), (12, 680)], 32, 8, 128, torch.bfloat16)
    clean = cached_attention(q, k, v, tiles, 128, counters())
    q[20:], k[600:], v[600:] = torch.nan, torch.nan, torch.nan
    arrived = counters()
    out = cached_attention(q, k, v, tiles, 128, arrived)
    assert torch.equal(out[:20], clean[:20])
    assert out[20:].isnan().all()
    assert arrived.count_nonzero() == 0


def test_few_rows_are_shared_here():
    """On a card with room for more programs the shared path is the one that the other tests went through."""
    from dllm_compile.kernels.row_attention_blocks import Work, choose_blocks

    processors = _launch.processors(torch.device("cuda"))
    blocks = choose_blocks(torch.bfloat16, 128, Work(32, 2, 128, 32, 1281), processors)
    assert blocks.splits > 1 or processors < 64


def test_does_not_wait_for_the_device():
    q, k, v, tiles = cached_inputs([(32, 1280)], 32, 32, 128, torch.bfloat16)
    arrived = counters()
    cached_attention(q, k, v, tiles, 128, arrived)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cached_attention(q, k, v, tiles, 128, arrived)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    inputs = cached_inputs([(17, 40)], 4, 2, 64, torch.bfloat16)
    torch.library.opcheck(cached_attention, (*inputs, 128, counters()))


def test_under_inductor():
    def attend(q, k, v, tiles):
        arrived = tiles.new_zeros(ARRIVALS)
        first = cached_attention(q, k, v, tiles, 128, arrived)
        return cached_attention(first.view_as(q) * 2, k, v, tiles, 128, arrived)

    arguments = cached_inputs([(20, 600), (12, 680)], 32, 32, 128, torch.bfloat16)
    assert torch.equal(torch.compile(attend, fullgraph=True)(*arguments), attend(*arguments))
