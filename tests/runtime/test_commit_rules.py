# SPDX-License-Identifier: Apache-2.0
"""Commit rules: hand-made cases, the properties of their definitions, and the contract that all of them obey."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.commit import FactorRule, FrechetRule, QuotaRule, ThresholdRule, commit_rule
from dllm_compile.runtime.commit.frechet import frechet_score
from tests.reference.plain_loop import count_factor, count_frechet, count_quota, count_threshold

from .tiny import FACTS, ScriptedPrograms, decode

ALL_RULES = [
    QuotaRule(),
    QuotaRule(3),
    ThresholdRule(0.5),
    ThresholdRule(1.5),
    FactorRule(1.0),
    FactorRule(0.75, released=True),
    FrechetRule(0.25),
]

# Numbers on a coarse grid tie often and are exact in fp32.
grid = st.integers(0, 16).map(lambda i: i / 16)
unit = st.floats(0, 1, width=32)


def take(rule, confidence, valid=None, n=None, step=0) -> list[bool]:
    """One row."""
    c = torch.tensor([confidence], dtype=torch.float32)
    v = torch.ones_like(c, dtype=torch.bool) if valid is None else torch.tensor([valid])
    n = int(v.sum()) if n is None else n
    return rule(c, v, torch.tensor([n]), torch.tensor([step]))[0].tolist()


def count(rule, confidence, **rest) -> int:
    return sum(take(rule, confidence, **rest))


def fp32(values) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


# --- the contract ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(ALL_RULES), st.integers(1, 4), st.integers(1, 12))
def test_contract(data, rule, rows, width):
    """Within valid, at least one where there is any, each row by itself, the most confident first."""
    c = torch.tensor(data.draw(st.lists(st.lists(grid, min_size=width, max_size=width), min_size=rows, max_size=rows)))
    valid = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    )
    n = valid.sum(-1) + data.draw(st.integers(0, 2))
    step = torch.tensor([data.draw(st.integers(0, 2)) for _ in range(rows)])
    c = torch.where(valid, c, torch.tensor(data.draw(st.sampled_from([0.0, 2.0, math.nan, math.inf]))))
    taken = rule(c, valid, n, step)
    assert taken.dtype == torch.bool
    assert taken.shape == valid.shape
    assert not (taken & ~valid).any()
    assert torch.equal(taken.any(-1), valid.any(-1))
    for i in range(rows):
        alone = rule(c[i : i + 1], valid[i : i + 1], n[i : i + 1], step[i : i + 1])
        assert torch.equal(taken[i : i + 1], alone)
        kept = [(-c[i, j].item(), j) for j in range(width) if taken[i, j]]
        left = [(-c[i, j].item(), j) for j in range(width) if valid[i, j] and not taken[i, j]]
        if isinstance(rule, ThresholdRule) or not left:
            continue
        assert max(kept) < min(left), "ranks are taken from the top, ties from the left"


@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_ties_go_to_the_lower_position(rule):
    taken = take(rule, [0.25, 0.3, 0.3, 0.25], n=2)
    assert taken[1]
    assert not taken[3] or taken[0]
    assert taken[1] >= taken[2]


def test_rule_of_a_configuration():
    assert commit_rule(DecodingConfig()) == QuotaRule(None)
    assert commit_rule(DecodingConfig(max_new_tokens=64, block_length=16, steps=32)) == QuotaRule(8)
    assert commit_rule(DecodingConfig(threshold=0.8)) == ThresholdRule(0.8)
    assert commit_rule(DecodingConfig(commit="threshold")) == ThresholdRule(0.9)
    assert commit_rule(DecodingConfig(commit="factor")) == FactorRule(1.0, released=False)
    assert commit_rule(DecodingConfig(factor=0.75, last_rank="released")) == FactorRule(0.75, released=True)
    assert commit_rule(DecodingConfig(commit="frechet")) == FrechetRule(0.25)


# --- quota (section 2) -------------------------------------------------------------------------------------------


def test_quota_sums_and_order():
    """T1: for all n and S up to 40 the quotas sum to n and never grow from step to step."""
    for n, steps in itertools.product(range(1, 41), range(1, 41)):
        rule = QuotaRule(steps)
        quotas = rule.quota(torch.full((steps,), n), torch.arange(steps)).tolist()
        assert quotas == [count_quota(n, steps, i) for i in range(steps)]
        assert sum(quotas) == n
        assert quotas == sorted(quotas, reverse=True)
        assert max(quotas) - min(quotas) <= 1
        assert 0 not in quotas[: min(n, steps)], "only steps after the block is finished have none"


def test_quota_by_hand():
    c = [0.1, 0.9, 0.5, 0.7, 0.3]
    assert take(QuotaRule(2), c) == [False, True, True, True, False]
    assert take(QuotaRule(2), c, step=1) == [False, True, False, True, False]
    assert take(QuotaRule(), c) == [False, True, False, False, False]
    assert take(QuotaRule(1), c) == [True] * 5
    assert take(QuotaRule(2), c, valid=[True, False, False, False, True], n=5) == [True, False, False, False, True]


# --- threshold (section 3) ---------------------------------------------------------------------------------------


def test_threshold_by_hand():
    """T1: none, all and ties at the threshold, which are taken (>=)."""
    assert take(ThresholdRule(0.9), [0.1, 0.8, 0.2]) == [False, True, False]
    assert take(ThresholdRule(0.9), [0.95, 0.9, 0.99]) == [True, True, True]
    assert take(ThresholdRule(0.9), [0.9, 0.89, 0.9]) == [True, False, True]
    assert take(ThresholdRule(0.9), [0.2, 0.2, 0.1]) == [True, False, False]
    assert take(ThresholdRule(0.0), [0.0, 0.0]) == [True, True]
    assert take(ThresholdRule(0.0), [0.0, 0.0, 0.5], valid=[False, True, False]) == [False, True, False]


@settings(max_examples=60, deadline=None)
@given(st.lists(unit, min_size=1, max_size=20), unit)
def test_threshold_counts(confidence, tau):
    assert count(ThresholdRule(tau), confidence) == count_threshold(sorted(confidence, reverse=True), tau)


@settings(max_examples=25, deadline=None)
@given(st.lists(unit, min_size=10, max_size=10), st.lists(unit, min_size=2, max_size=4))
def test_lower_threshold_never_needs_more_forwards(confidence, taus):
    """T2, on a model whose proposals do not depend on the canvas."""
    forwards = []
    for tau in sorted(taus):
        programs = ScriptedPrograms([1] * 12, [0.0, 0.0, *confidence])
        output = decode(
            programs, FACTS, [torch.tensor([1, 2])], DecodingConfig(max_new_tokens=10, block_length=4, threshold=tau)
        )
        assert output.stats.forwards == programs.steps
        forwards.append(programs.steps)
    assert forwards == sorted(forwards)


@settings(max_examples=40, deadline=None)
@given(st.lists(grid, min_size=1, max_size=12))
def test_threshold_above_one_is_one_token_a_step(confidence):
    """T3, step by step; the whole loop is compared in test_engine."""
    n = len(confidence)
    assert take(ThresholdRule(1.01), confidence) == take(QuotaRule(n), confidence) == take(QuotaRule(), confidence)


# --- factor (section 4) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("factor", [0.5, 0.75, 1.0, 2.0])
def test_factor_with_equal_confidences(n, factor):
    """T1: the largest k with (k + 1)(1 - c) <= f. Sixteenths are exact, so equality counts as equality."""
    for sixteenths in range(17):
        c = sixteenths / 16
        ks = [k for k in range(1, n + 1) if (k + 1) * (16 - sixteenths) <= factor * 16]
        assert count(FactorRule(factor), [c] * n) == max(ks, default=1)


def test_factor_with_one_mask_left():
    """T2."""
    for c, released in itertools.product((0.0, 0.4, 1.0), (False, True)):
        assert take(FactorRule(1.0, released=released), [0.9, c, 0.9], valid=[False, True, False]) == [
            False,
            True,
            False,
        ]


def test_factor_last_rank():
    """T3: bars for f = 1 are none, 2/3, 3/4; only the released loop takes a failing last rank."""
    last_fails = [0.9, 0.8, 0.7]
    assert take(FactorRule(1.0), last_fails) == [True, True, False]
    assert take(FactorRule(1.0, released=True), last_fails) == [True, True, True]
    two_fail = [0.9, 0.6, 0.7]  # ranks 0.9, 0.7, 0.6: the last one fails
    assert take(FactorRule(1.0, released=True), two_fail) == [True, True, True]
    earlier_fails = [0.9, 0.6, 0.5]
    assert (
        take(FactorRule(1.0), earlier_fails)
        == take(FactorRule(1.0, released=True), earlier_fails)
        == [True, False, False]
    )
    holes = [0.9, 0.99, 0.8, 0.7]
    assert take(FactorRule(1.0, released=True), holes, valid=[True, False, True, True]) == [True, False, True, True]


def test_factor_stops_at_the_first_failure():
    """Bars for f = 1.2 are none, 0.6, 0.7, 0.76, 0.8: with a descending order a later rank cannot save an earlier."""
    assert take(FactorRule(1.2), [0.7, 0.59, 0.58, 0.57]) == [True, False, False, False]


@settings(max_examples=100, deadline=None)
@given(st.lists(unit, min_size=1, max_size=64), st.sampled_from([0.5, 0.75, 1.0, 3.0]), st.booleans())
def test_factor_agrees_with_the_loop(confidence, factor, released):
    """T4."""
    ranked = sorted(confidence, reverse=True)
    bars = fp32([1 - factor / (k + 1) for k in range(1, 65)])
    near = any(abs(c - bar) < 1e-6 for c, bar in zip(ranked, bars, strict=False))
    got = count(FactorRule(factor, released=released), confidence)
    assert near or got == count_factor(ranked, factor, released=released)


def test_factor_agrees_with_the_loop_near_one():
    """T4 where the counts are high: confident candidates, n = 1 to 64."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for n in range(1, 65):
        c = 1 - torch.rand(n, generator=generator) * 0.1 * torch.rand(1, generator=generator)
        for factor, released in itertools.product((0.75, 1.0), (False, True)):
            got = count(FactorRule(factor, released=released), c.tolist())
            assert got == count_factor(sorted(c.tolist(), reverse=True), factor, released=released)
            seen.add(got)
    assert len(seen) > 15


# --- Fréchet (section 5) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("margin", [0.0, 0.25, 0.5])
def test_frechet_with_equal_confidences(n, margin):
    """T1: factor with f = 1 - margin, strict against non-strict at equality only."""
    for sixteenths in range(17):
        c = sixteenths / 16
        equal_somewhere = any((k + 1) * (1 - c) == 1 - margin for k in range(1, n + 1))
        frechet, factor = count(FrechetRule(margin), [c] * n), count(FactorRule(1 - margin), [c] * n)
        assert frechet == max((k for k in range(1, n + 1) if (k + 1) * (1 - c) < 1 - margin), default=1)
        assert equal_somewhere or frechet == factor


@settings(max_examples=100, deadline=None)
@given(st.lists(unit, min_size=1, max_size=32), st.sampled_from([0.0, 0.1, 0.25, 0.5]))
def test_frechet_never_takes_fewer_than_factor(confidence, margin):
    """T2, apart from exact equality."""
    ranked = sorted(confidence, reverse=True)
    near = any(abs((k + 2) * (1 - c) - (1 - margin)) < 1e-5 for k, c in enumerate(ranked))
    assert near or count(FrechetRule(margin), confidence) >= count(FactorRule(1 - margin), confidence)


@settings(max_examples=100, deadline=None)
@given(st.lists(unit, min_size=2, max_size=32))
def test_frechet_score_never_increases(confidence):
    """T3."""
    score = frechet_score(torch.tensor(sorted(confidence, reverse=True)))
    assert (score.diff() <= 1e-5).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(unit, min_size=1, max_size=32), st.sampled_from([0.0, 0.02, 0.25, 0.5]))
def test_frechet_agrees_with_the_loop(confidence, margin):
    ranked = sorted(confidence, reverse=True)
    scores = [sum(ranked[:k]) - (k - 1) - (1 - ranked[k - 1]) for k in range(1, len(ranked) + 1)]
    near = any(abs(score - margin) < 1e-5 for score in scores)
    assert near or count(FrechetRule(margin), confidence) == count_frechet(ranked, margin)


def test_frechet_sum_in_fp32():
    """T4: the running sum against fp64 for n = 64, where a decision is near as well as everywhere."""
    generator = torch.Generator().manual_seed(0)
    for spread in (1.0, 0.1, 0.01):
        c: Tensor = (1 - torch.rand(50, 64, generator=generator) * spread).sort(-1, descending=True).values
        exact = frechet_score(c.double())
        by_definition = c.double().cumsum(-1) - torch.arange(64) - (1 - c.double())
        torch.testing.assert_close(exact, by_definition, atol=1e-12, rtol=0)
        error = (frechet_score(c).double() - exact).abs()
        assert error[exact > -1].max() < 1e-6
        assert (error / exact.abs().clamp(min=1)).max() < 1e-5
