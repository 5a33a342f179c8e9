# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_scores` on the CPU: the definition, what is left alone, the registration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_compile.kernels.row_scores import row_scores

from .cache_cases import dense_scores
from .cases import packed_heads

# rows, keys, heads, key heads, head dim, window, spans
CASES = [
    (1, 1, 1, 1, 4, [[0]], [[0, 1]]),
    (9, 31, 6, 2, 16, [[3, 4, -1], [8, -1, -1]], [[0, 11], [14, 31]]),
    (5, 40, 4, 1, 7, [[4, 0], [1, 2], [3, 3]], [[20, 37], [9, 9], [1, 20]]),
    (64, 100, 8, 8, 32, [list(range(16)), list(range(32, 48))], [[0, 50], [50, 100]]),
]


def inputs(case, dtype=torch.float32, seed=0):
    rows, keys, heads, kv_heads, head_dim, window, spans = case
    q, k, _ = packed_heads(rows, keys, heads, kv_heads, head_dim, dtype, seed)
    scores = torch.randn(keys, generator=torch.Generator().manual_seed(seed + 1))
    return q, torch.tensor(window), k, torch.tensor(spans, dtype=torch.int32), scores


def assert_is_dense(arguments):
    *rest, scores = arguments
    before = scores.clone()
    row_scores(*arguments)
    added, magnitude = dense_scores(*rest)
    # fp32 sums: relative to the magnitudes that were summed.
    assert ((scores.double() - before.double() - added).abs() <= 1e-6 * (magnitude + before.abs())).all()
    untouched = magnitude == 0
    assert torch.equal(scores[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_dense_definition(case, dtype):
    assert_is_dense(inputs(case, dtype))


@st.composite
def cases(draw):
    rows, samples, width = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    edges = sorted(draw(st.lists(st.integers(0, 40), min_size=2 * samples, max_size=2 * samples)))
    spans = draw(st.permutations([edges[2 * i : 2 * i + 2] for i in range(samples)]))
    row = st.integers(-1, rows - 1)
    window = draw(st.lists(st.lists(row, min_size=width, max_size=width), min_size=samples, max_size=samples))
    kv_heads = draw(st.integers(1, 3))
    return rows, 41, kv_heads * draw(st.integers(1, 3)), kv_heads, draw(st.sampled_from([2, 5, 16])), window, spans


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_any_window_and_span(case, seed):
    assert_is_dense(inputs(case, seed=seed))


def test_layers_accumulate():
    arguments = inputs(CASES[1])
    arguments[4].zero_()
    row_scores(*arguments)
    once = arguments[4].clone()
    row_scores(*arguments)
    torch.testing.assert_close(arguments[4], 2 * once)
    assert once[:11].count_nonzero() == 11


def test_a_nan_stays_in_its_sample():
    q, window, k, spans, scores = inputs(CASES[1])
    before, q[8], k[14:] = scores.clone(), torch.nan, torch.nan
    row_scores(q, window, k, spans, scores)
    assert torch.isfinite(scores[:11]).all()
    assert torch.equal(scores[11:14], before[11:14])
    assert scores[14:].isnan().all()


def test_nothing_to_do():
    q, window, k, spans, scores = inputs(CASES[1])
    before = scores.clone()
    row_scores(q[:0], torch.full_like(window, -1), k, spans, scores)
    row_scores(q, window[:0], k, spans[:0], scores)
    row_scores(q, torch.full_like(window, -1), k, spans, scores)
    row_scores(q, window, k[:0], torch.zeros_like(spans), scores[:0])
    assert torch.equal(scores, before)


@pytest.mark.parametrize("case", CASES[:3])
def test_opcheck(case):
    torch.library.opcheck(row_scores, inputs(case))


def test_never_reads_the_device():
    # A fake tensor has no data: whatever looks at a value raises.
    from dllm_compile.kernels.row_scores import row_scores_reference

    with FakeTensorMode() as mode:
        row_scores_reference(*(mode.from_tensor(x) for x in inputs(CASES[1])))


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (0, torch.zeros(9, 5, 16), "row_scores: q must be"),
        (2, torch.zeros(31, 2, 16, dtype=torch.float64), "share a dtype"),
        (1, torch.zeros(2, 3, dtype=torch.int32), "int64"),
        (3, torch.zeros(3, 2, dtype=torch.int32), r"\(2, 2\) int32"),
        (3, torch.zeros(2, 2, dtype=torch.int64), "int32"),
        (4, torch.zeros(30), r"\(31,\) fp32"),
        (4, torch.zeros(62)[::2], "contiguous"),
    ],
)
def test_wrong_arguments_are_named(index, value, error):
    arguments = list(inputs(CASES[1]))
    arguments[index] = value
    with pytest.raises((ValueError, TypeError), match=error):
        row_scores(*arguments)
