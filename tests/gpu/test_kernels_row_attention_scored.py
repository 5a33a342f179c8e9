# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_attention_scored` on a card: attention bit-equal to the unscored one, scores by their definition."""

from __future__ import annotations

import pytest
import torch

from dllm_compile._compat import has_triton
from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.kernels.row_attention_scored import row_attention_scored
from tests.kernels.cache_cases import dense_scores
from tests.kernels.card_cases import assert_within_rounding, cached_inputs, counters, replayed
from tests.kernels.cases import dense_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Samples as (rows, keys), window rows of each.
LAYOUTS = {
    "1 x 1": ([(1, 1)], 1),
    "1 x 32": ([(32, 1280)], 16),
    "1 x 128": ([(128, 1280)], 16),
    "1 x 1280": ([(1280, 1280)], 16),
    "3 x 128": ([(128, 1280), (128, 999), (128, 1001)], 16),
    "8 x 32": ([(32, 700 + 83 * i) for i in range(8)], 7),
    "first passes among steps": ([(1280, 1280), (32, 1100), (128, 1280), (1, 40), (600, 600), (64, 900)], 16),
    "64 samples": ([(1 + 37 * i % 160, 200 + 13 * i) for i in range(64)], 16),
    "a window too long for the kernel": ([(100, 300)], 70),
}


def inputs(layout, heads, kv_heads, head_dim, dtype):
    """Each sample's window among its rows with gaps; the second sample and every fifth have none; an empty sample."""
    samples, width = LAYOUTS[layout]
    q, k, v, tiles = cached_inputs(samples, heads, kv_heads, head_dim, dtype, pad=3)
    generator = torch.Generator().manual_seed(7)
    window, spans, row, key = [], [], 0, 0
    for i, (rows, keys) in enumerate(samples):
        chosen = row + torch.randint(0, rows, (width,), generator=generator)
        chosen[torch.randint(0, width + 1, (width,), generator=generator) == 0] = -1
        window.append(torch.full_like(chosen, -1) if i % 5 == 1 else chosen)
        spans.append((key, key + keys))
        row, key = row + rows, key + keys
    window.append(torch.full((width,), -1))
    spans.append((0, 0))
    scores = torch.randn(heads, len(k), generator=generator).cuda()
    table = torch.tensor(spans, dtype=torch.int32).cuda()
    return q, k, v, tiles, 128, torch.stack(window).cuda(), table, scores, counters()


def assert_scores(before, scores, q, window, k, spans):
    added, magnitude = dense_scores(q, window, k, spans)
    error = ((scores.double() - before.double()).sum(0) - added).abs()
    # Tensor cores cut an addend below 2^-23 of the largest one; a score adds 24 times at most (8 steps, 3 parts).
    assert (error <= 24 * 2**-23 * magnitude + 1e-6 * before.abs().sum(0)).all()
    assert torch.equal(scores[:, magnitude == 0], before[:, magnitude == 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(32, 32, 128), (8, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_definitions(layout, heads, dtype):
    q, k, v, tiles, _, window, spans, scores, arrived = arguments = inputs(layout, *heads, dtype)
    before = scores.clone()
    out = row_attention_scored(*arguments)
    assert_scores(before, scores, q, window, k, spans)
    assert_within_rounding(out, q, k, v, tiles)
    assert arrived.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["1 x 32", "1 x 128", "8 x 32", "first passes among steps"])
def test_layers_and_replays_are_bit_equal(layout, dtype):
    arguments = inputs(layout, 32, 8, 128, dtype)
    scores = arguments[7]

    def layers():
        scores.zero_()
        return [row_attention_scored(*arguments) for _ in range(3)]

    expected = layers()
    total = scores.clone()
    graph, outs = replayed(layers)
    for _ in range(20):
        scores.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(scores, total)
        assert all(torch.equal(out, one) for out, one in zip(outs, expected, strict=True))
    assert arguments[8].count_nonzero() == 0


def test_head_size_the_kernel_does_not_take():
    q, k, v, tiles, _, window, spans, scores, _ = arguments = inputs("8 x 32", 4, 2, 24, torch.bfloat16)
    before = scores.clone()
    out = row_attention_scored(*arguments)
    assert_scores(before, scores, q, window, k, spans)
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles), rtol=0, atol=3e-2)


def test_captured_graph_reads_windows_anew():
    arguments = inputs("3 x 128", 8, 2, 64, torch.bfloat16)
    q, k, window, spans, scores = (arguments[i] for i in (0, 1, 5, 6, 7))
    graph, _ = replayed(lambda: row_attention_scored(*arguments))
    window[0], window[1] = 5, torch.arange(130, 146)
    scores.fill_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert_scores(torch.full_like(scores, 0.5), scores, q, window, k, spans)


def test_a_nan_stays_in_its_sample():
    q, k, v, _, _, _, _, scores, _ = arguments = inputs("3 x 128", 8, 2, 64, torch.bfloat16)
    before = scores.clone()
    clean = row_attention_scored(*arguments)
    expected = scores.clone()
    scores.copy_(before)
    q[256:], k[2279:], v[2279:] = torch.nan, torch.nan, torch.nan
    out = row_attention_scored(*arguments)
    assert torch.equal(out[:256], clean[:256])
    assert torch.equal(scores[:, :2279], expected[:, :2279])
    assert scores[:, 2279:-1].sum(0).isnan().all()
    assert torch.equal(scores[:, -1], before[:, -1])


def test_does_not_wait_for_the_device():
    for layout in ("1 x 32", "a window too long for the kernel"):
        arguments = inputs(layout, 8, 2, 64, torch.bfloat16)
        row_attention_scored(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            row_attention_scored(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    torch.library.opcheck(row_attention_scored, inputs("1 x 32", 6, 2, 64, torch.bfloat16))


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_under_inductor():
    def step(q, k, v, tiles, window, spans, scores):
        arrived, by_head = tiles.new_zeros(ARRIVALS), scores.new_zeros((q.shape[1], len(scores)))
        for _ in range(2):
            out = row_attention_scored(q, k, v, tiles, 128, window, spans, by_head, arrived)
            q = out.view_as(q) * 2
        scores.add_(by_head.sum(0))
        return q

    q, k, v, tiles, _, window, spans, *_ = inputs("8 x 32", 8, 2, 64, torch.bfloat16)
    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        scores = torch.zeros(len(k), device="cuda")
        results.append((run(q, k, v, tiles, window, spans, scores), scores))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-3)
