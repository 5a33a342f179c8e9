# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_scores` on a card against the fp64 definition."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.kernels.row_scores import row_scores, row_scores_reference
from tests.kernels.cache_cases import dense_scores
from tests.kernels.cases import packed_heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Samples as (key rows, gap behind them), window rows.
LAYOUTS = {
    "1": ([(1, 0)], 1),
    "17": ([(17, 3)], 16),
    "1280": ([(1280, 1)], 16),
    "4096": ([(1280, 0), (1, 7), (1000, 0), (0, 0), (1024, 50)], 16),
    "many": ([(1280, 1)] * 8, 16),
}


def inputs(layout, heads, kv_heads, head_dim, dtype):
    samples, width = LAYOUTS[layout]
    keys, rows = sum(map(sum, samples)), 2 * width * len(samples)
    generator = torch.Generator().manual_seed(7)
    window = torch.randint(-1, rows, (len(samples), width), generator=generator)
    sizes = torch.tensor(samples)
    begin = sizes.sum(1).cumsum(0) - sizes.sum(1)
    spans = torch.stack((begin, begin + sizes[:, 0]), 1).int()
    q, k, _ = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype)
    # k stays a column slice; a cache is contiguous, see below.
    wide = torch.nn.functional.pad(k.flatten(1), (16, 0)).cuda()
    scores = torch.randn(keys, generator=generator).cuda()
    return q.cuda(), window.cuda(), wide[:, 16:].unflatten(1, (kv_heads, head_dim)), spans.cuda(), scores


def assert_is_dense(arguments, implementation):
    *rest, scores = arguments
    before = scores.clone()
    implementation(*arguments)
    added, magnitude = dense_scores(*rest)
    error = (scores.double() - before.double() - added).abs()
    assert (error <= 1e-6 * (magnitude + before.abs())).all()
    untouched = magnitude == 0
    assert torch.equal(scores[untouched], before[untouched])


@pytest.mark.parametrize("implementation", [row_scores, row_scores_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 8, 128), (8, 2, 64), (3, 1, 24)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_definition(layout, heads, kv_heads, head_dim, dtype, implementation):
    arguments = inputs(layout, heads, kv_heads, head_dim, dtype)
    assert_is_dense(arguments, implementation)
    q, window, k, *rest = arguments
    assert_is_dense((q, window, k.contiguous(), *rest), implementation)


def test_full_width():
    assert_is_dense(inputs("1280", 32, 32, 128, torch.bfloat16), row_scores)


def test_a_nan_stays_in_its_sample():
    q, window, k, spans, scores = inputs("many", 8, 2, 64, torch.bfloat16)
    clean = scores.clone()
    row_scores(q, window, k, spans, clean)
    k[1281:2561] = torch.nan
    row_scores(q, window, k, spans, scores)
    assert scores[1281:2561].isnan().all()
    scores[1281:2561] = clean[1281:2561]
    assert torch.equal(scores, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_bit_equal(dtype):
    q, window, k, spans, scores = inputs("many", 32, 8, 128, dtype)
    results = []
    for _ in range(4):
        results.append(scores.clone())
        for _ in range(3):  # layers
            row_scores(q, window, k, spans, results[-1])
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], scores)


def test_captured_graph_reads_windows_and_spans_anew():
    arguments = inputs("4096", 8, 2, 64, torch.bfloat16)
    _, window, _, spans, scores = arguments
    for _ in range(3):
        row_scores(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_scores(*arguments)
    window.copy_(window.roll(1, 0))
    spans[0, 0], spans[4, 1] = 100, spans[4, 1] - 50
    scores.fill_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    replayed = scores.clone()
    scores.fill_(0.5)
    assert_is_dense(arguments, row_scores)
    assert torch.equal(replayed, scores)


def test_does_not_wait_for_the_device():
    arguments = inputs("4096", 8, 2, 64, torch.bfloat16)
    for implementation in (row_scores, row_scores_reference):
        implementation(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            implementation(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    torch.library.opcheck(row_scores, inputs("17", 6, 2, 24, torch.bfloat16))


def test_under_inductor():
    def score(q, window, k, spans, scores):
        row_scores(q * 2, window, k, spans, scores)
        row_scores(q, window, k, spans, scores)
        return scores + 1

    arguments = inputs("17", 8, 2, 64, torch.bfloat16)
    expected = [x.clone() for x in arguments]
    got = torch.compile(score, fullgraph=True)(*arguments)
    assert torch.equal(got, score(*expected))
    assert torch.equal(arguments[4], expected[4])
