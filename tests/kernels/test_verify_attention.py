# SPDX-License-Identifier: Apache-2.0
"""`dllm::verify_attention` and `dllm::head_verify` on the CPU: specification, dense fallback, registration."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.kernels.head_confidence import head_confidence
from dllm_compile.kernels.head_verify import head_verify
from dllm_compile.kernels.verify_attention import (
    verify_attention,
    verify_attention_masked,
    verify_attention_reference,
)

from .cases import dense_head
from .verify_cases import dense_verify, sees, verify_case

# Samples as (context, candidates, padding, keys, hidden), heads, key heads, head dim.
CASES = {
    "one sample": ([(16, 8, 0, 60, 24)], 4, 2, 16),
    "ragged": ([(16, 8, 0, 70, 24), (5, 3, 21, 9, 8), (30, 1, 0, 40, 31)], 4, 4, 8),
    "nothing to verify": ([(0, 0, 32, 20, 0), (3, 2, 25, 20, 5)], 6, 2, 24),
    "no keys": ([(4, 2, 0, 0, 0), (0, 0, 8, 0, 0)], 2, 1, 16),
    "every key is hidden": ([(9, 3, 1, 12, 12)], 4, 1, 32),
    "no context": ([(0, 8, 0, 33, 8)], 2, 2, 16),
}


def operator(*arguments):
    """With counters of its own, which must be zeros again afterwards."""
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32)
    out = verify_attention(*arguments, arrived)
    assert arrived.count_nonzero() == 0
    return out


@pytest.mark.parametrize("implementation", [operator, verify_attention_reference, verify_attention_masked])
@pytest.mark.parametrize("name", CASES)
def test_matches_the_dense_definition(name, implementation):
    case = verify_case(*CASES[name])
    out = implementation(*case.arguments, 32)
    assert out.shape == (case.q.shape[0], case.q.shape[1] * case.q.shape[2])
    torch.testing.assert_close(out.double(), dense_verify(case), rtol=0, atol=2e-6)
    padding = [i for i, (kind, _) in enumerate(case.kinds) if kind == "padding"]
    assert out[padding].count_nonzero() == 0


@pytest.mark.parametrize("candidates", range(9))
def test_views_are_the_table_of_who_sees_whom(candidates):
    """Section 11.2, and T2: every row that is no padding sees each candidate once, and all the context."""
    case = verify_case([(32 - 2 * candidates - 3, candidates, 3, 10, 0)], 1, 1, 16)
    assert len(case.kinds) == 32
    depth, begin, end = case.views.unbind(1)
    seen = (begin <= depth[:, None]) & (depth[:, None] < end)
    for i, row in enumerate(case.kinds):
        assert seen[i].tolist() == [sees(row, key) for key in case.kinds]
        if row[0] != "padding":
            ranks = [case.kinds[j][1] for j in seen[i].nonzero().flatten().tolist() if case.kinds[j][0] != "context"]
            assert sorted(ranks) == list(range(candidates))


def test_reads_no_hidden_row_and_nothing_outside_the_tile():
    case = verify_case([(16, 8, 0, 70, 24), (5, 3, 21, 9, 8)], 4, 2, 16)
    expected = operator(*case.arguments, 32)
    other = case._replace(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    named = torch.zeros_like(case.hidden)
    for _, _, begin, end in case.tiles.tolist():
        named[begin:end] = True
    for cache in (other.k_cache, other.v_cache):
        cache[case.hidden | ~named] = 1e4
    for implementation in (operator, verify_attention_masked):
        torch.testing.assert_close(implementation(*other.arguments, 32), expected, rtol=0, atol=1e-6)


def test_fallback_never_reads_the_device():
    # A fake tensor has no data: whatever looks at a value raises.
    with FakeTensorMode():
        q, k, cache = torch.empty(32, 4, 16), torch.empty(32, 2, 16), torch.empty(50, 2, 16)
        tiles, views = torch.empty(1, 4, dtype=torch.int32), torch.empty(32, 3, dtype=torch.int32)
        hidden = torch.empty(50, dtype=torch.bool)
        out = verify_attention_masked(q, k, k, cache, cache, tiles, views, hidden, 32)
    assert out.shape == (32, 64)


@pytest.mark.parametrize("name", ["one sample", "ragged"])
def test_opcheck(name):
    torch.library.opcheck(
        verify_attention, (*verify_case(*CASES[name]).arguments, 32, torch.zeros(ARRIVALS, dtype=torch.int32))
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"k": torch.zeros(5, 3, 16), "v": torch.zeros(5, 3, 16)}, "caches must be"),
        ({"v": torch.zeros(4, 2, 16)}, "must be"),
        ({"v_cache": torch.zeros(9, 2, 16, dtype=torch.float64)}, "share a dtype"),
        ({"tiles": torch.zeros(1, 4, dtype=torch.int64)}, "int32"),
        ({"views": torch.zeros(5, 2, dtype=torch.int32)}, "views must be"),
        ({"arrived": torch.zeros(9)}, "int32"),
        ({"hidden": torch.zeros(9, dtype=torch.uint8)}, "hidden must be"),
    ],
)
def test_wrong_arguments_are_named(change, error):
    arguments = {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(5, 2, 16),
        "v": torch.zeros(5, 2, 16),
        "k_cache": torch.zeros(9, 2, 16),
        "v_cache": torch.zeros(9, 2, 16),
        "tiles": torch.zeros(1, 4, dtype=torch.int32),
        "views": torch.zeros(5, 3, dtype=torch.int32),
        "hidden": torch.zeros(9, dtype=torch.bool),
        "tile_rows": 64,
        "arrived": torch.zeros(ARRIVALS, dtype=torch.int32),
    }
    with pytest.raises((ValueError, TypeError), match=error):
        verify_attention(**{**arguments, **change})


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("banned", [[], [-1], [3, 8191, -1, 8192]])
def test_probability_of_a_given_token(scale, banned):
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(9 + 20_000, 24, generator=generator)  # three chunks
    x, weight, banned = draw[:9], draw[9:], torch.tensor(banned, dtype=torch.int64)
    given = torch.tensor([0, 3, 5, 8191, 8192, 8193, 16383, 16384, 19_999])
    token, confidence, probability = head_verify(x, weight, scale, 5, banned, given)
    greedy = head_confidence(x, weight, scale, 5, banned)
    assert torch.equal(token, greedy[0])
    assert torch.equal(confidence, greedy[1])
    *_, expected = dense_head(x, weight, scale, 5, banned)
    torch.testing.assert_close(probability.double(), expected.gather(1, given[:, None]).squeeze(1), rtol=2e-5, atol=0)
    again = head_verify(x, weight, scale, 5, banned, token)
    assert torch.equal(again[2], confidence), "the given token is the best one"


def test_head_verify_opcheck():
    x, weight = torch.randn(4, 16), torch.randn(30, 16)
    torch.library.opcheck(head_verify, (x, weight, 0.5, 3, torch.tensor([-1]), torch.tensor([0, 3, 29, 7])))
    with pytest.raises(ValueError, match="given"):
        head_verify(x, weight, 0.5, 3, torch.tensor([-1]), torch.tensor([0]))
