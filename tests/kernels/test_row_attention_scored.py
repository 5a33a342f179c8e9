# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_attention_scored` and `dllm::cached_attention` on the CPU: definitions, registration."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_compile.kernels.cached_attention import ARRIVALS, cached_attention
from dllm_compile.kernels.row_attention_scored import row_attention_scored

from .cache_cases import dense_scores
from .cases import dense_attention, packed_heads, tiles_of

# Samples as (rows, keys), heads, key heads, head dim, window.
CASES = [
    ([(1, 1)], 1, 1, 16, [[0]]),
    ([(9, 30), (12, 21)], 6, 2, 16, [[3, -1, 4], [20, 9, -1]]),
    ([(5, 40), (3, 17), (20, 20)], 4, 4, 8, [[4, 0], [-1, -1], [27, 8]]),
]


def inputs(case, dtype=torch.float32):
    samples, heads, kv_heads, head_dim, window = case
    rows, keys = (sum(sample[i] for sample in samples) for i in (0, 1))
    q, k, v = packed_heads(rows, keys + 3, heads, kv_heads, head_dim, dtype)
    ends = torch.tensor([sample[1] for sample in samples]).cumsum(0)
    spans = torch.stack((ends - torch.tensor([sample[1] for sample in samples]), ends), 1).int()
    scores = torch.randn(heads, keys + 3, generator=torch.Generator().manual_seed(1))
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32)
    return q, k, v, tiles_of(samples, 8), 8, torch.tensor(window), spans, scores, arrived


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_dense_definitions(case, dtype):
    q, k, v, tiles, _, window, spans, scores, arrived = arguments = inputs(case, dtype)
    before = scores.clone()
    out = row_attention_scored(*arguments)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles), rtol=0, atol=tolerance)
    added, magnitude = dense_scores(q, window, k, spans)
    error = ((scores.double() - before.double()).sum(0) - added).abs()
    assert (error <= 1e-6 * (magnitude + before.abs().sum(0))).all()
    assert torch.equal(scores[:, magnitude == 0], before[:, magnitude == 0])
    assert torch.equal(cached_attention(*arguments[:5], arrived), out)
    assert arrived.count_nonzero() == 0


def test_layers_accumulate():
    arguments = inputs(CASES[1])
    scores = arguments[-2].zero_()
    row_attention_scored(*arguments)
    once = scores.sum(0)
    row_attention_scored(*arguments)
    torch.testing.assert_close(scores.sum(0), 2 * once)
    assert once.count_nonzero() == 51


@pytest.mark.parametrize("case", CASES[:2])
def test_opcheck(case):
    *rest, arrived = inputs(case)
    torch.library.opcheck(row_attention_scored, (*rest, arrived))
    torch.library.opcheck(cached_attention, (*rest[:5], arrived))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_output_has_the_real_layout(dtype):
    arguments = inputs(CASES[1], dtype)
    real = row_attention_scored(*arguments)
    with FakeTensorMode() as mode:
        fake = row_attention_scored(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    assert real.is_contiguous()
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (0, torch.zeros(21, 5, 16), "no multiple"),
        (2, torch.zeros(54, 3, 16), "must be"),
        (3, torch.zeros(1, 4, dtype=torch.int64), "int32"),
        (5, torch.zeros(2, 3, dtype=torch.int32), "window must be"),
        (6, torch.zeros(3, 2, dtype=torch.int32), "spans must be"),
        (7, torch.zeros(54), "scores must be"),
        (7, torch.zeros(5, 54), "scores must be"),
        (7, torch.zeros(6, 108)[:, ::2], "contiguous"),
        (8, torch.zeros(64), "arrived must be"),
    ],
)
def test_wrong_arguments_are_named(index, value, error):
    arguments = list(inputs(CASES[1]))
    arguments[index] = value
    with pytest.raises((ValueError, TypeError), match=error):
        row_attention_scored(*arguments)
