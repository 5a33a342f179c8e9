# SPDX-License-Identifier: Apache-2.0
"""LaCache's merge of states to the bound that is promised (section 9, T2 and T3): 1e-5, with scores of up to 80."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.kernels.facache import facache_first, facache_step, merge_partials, normalised, partial_attention

from .cache_cases import block_tiles, empty_state, outside_rows
from .cases import dense_attention, packed_heads

HEADS, HEAD_DIM = 2, 16  # the scale is 1/4: scores that are multiples of 1/8 stay exact in fp32


def exact_scores(scores, seed):
    """q [R, H, hd], k and v [K, H, hd] whose products are `scores` (K,), with both signs among the queries."""
    generator = torch.Generator().manual_seed(seed)
    keys = len(scores)
    q, k = torch.zeros(4, HEADS, HEAD_DIM), torch.zeros(keys, HEADS, HEAD_DIM)
    q[:, :, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    k[:, :, 0] = math.sqrt(HEAD_DIM) * scores[:, None]
    return q, k, torch.randn(keys, HEADS, HEAD_DIM, generator=generator)


def assert_near(got, expected):
    """1e-5 of the largest value of a row and head."""
    assert ((got.double() - expected).abs() <= 1e-5 * expected.abs().amax(-1, keepdim=True)).all()


def dense(q, k, v):
    """Softmax attention in fp64."""
    tiles = torch.tensor([[0, q.shape[0], 0, k.shape[0]]], dtype=torch.int32)
    return dense_attention(q, k, v, tiles).view(q.shape)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_any_split_is_dense_attention(data, seed):
    """T2: scores spread over +-80, parts in any order, some of them empty or hopelessly far below the others."""
    scores = torch.tensor(data.draw(st.lists(st.integers(-640, 640), min_size=1, max_size=40))) / 8
    q, k, v = exact_scores(scores, seed)
    parts = data.draw(st.integers(1, 5))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, parts - 1), min_size=len(k), max_size=len(k))))
    state = partial_attention(q, k[:0], v[:0])
    for part in data.draw(st.permutations(range(parts))):
        state = merge_partials(state, partial_attention(q, k[owner == part], v[owner == part]))
    assert_near(normalised(state), dense(q, k, v))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_the_operators_are_dense_attention(data, seed):
    """T2 through `first` and `step`: the block's scores far above those of the state, far below, and between."""
    rows = data.draw(st.integers(3, 24))
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    tiles, outside = block_tiles([(rows, begin, end)], 8), outside_rows([(rows, begin, end)])
    state = empty_state(rows, HEADS, HEAD_DIM)
    kept: tuple[torch.Tensor, ...] = ()
    for step in range(3):
        levels = st.integers(*data.draw(st.sampled_from([(-640, -480), (-640, 640), (480, 640)])))
        scores = torch.tensor(data.draw(st.lists(levels, min_size=rows, max_size=rows))) / 8
        _, k, v = exact_scores(scores, seed + step)
        q = torch.zeros_like(k)
        q[:, :, 0] = torch.where(torch.arange(rows) % 2 == step % 2, 1.0, -1.0)[:, None]
        for new, old in zip((q, k, v), kept, strict=False):  # outside the block nothing may change
            new[outside] = old[outside]
        kept = (q, k, v)
        operator = facache_step if step else facache_first
        out = operator(q, k, v, *state, tiles, 8)
        assert_near(out.view(q.shape), dense(q, k, v))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
@pytest.mark.parametrize(("keys", "block"), [((2, 4), (2, 4)), ((3, 4), (3, 4)), ((0, 6), (0, 6)), ((0, 6), (5, 6))])
def test_rows_outside_the_block_without_keys_of_their_own(heads, kv_heads, keys, block):
    """T3: every key outside the block is masked out (the state is empty), nothing is outside, the block is one row."""
    q, k, v = packed_heads(6, 6, heads, kv_heads, HEAD_DIM, torch.float32, 3)
    tiles, outside = block_tiles([(6, *block)], None), outside_rows([(6, *block)])
    tiles[:, 2:4] = torch.tensor(keys)
    state = empty_state(6, heads, HEAD_DIM)
    out = facache_first(q, k, v, *state, tiles, 64)
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles[:, :4]), rtol=0, atol=2e-6)
    if keys == block:
        assert (state[0][outside] == -math.inf).all()
        assert (state[1][outside] == 0).all()
    again = packed_heads(6, 6, heads, kv_heads, HEAD_DIM, torch.float32, 4)
    for old, new in zip((q, k, v), again, strict=True):
        old[~outside] = new[~outside]
    out = facache_step(q, k, v, *state, tiles, 64)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles[:, :4]), rtol=0, atol=2e-6)
