# SPDX-License-Identifier: Apache-2.0
"""Compiled stages of a step: bit for bit the state of the stages as they are, compiled once for all sizes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dllm_compile
from dllm_compile._compat import can_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError
from dllm_compile.runtime import stages
from dllm_compile.runtime.cache.flash_rule import FlashRule
from dllm_compile.runtime.cache.score_order import order_by_score, rank_from_end
from dllm_compile.runtime.capacity import Capacity
from dllm_compile.runtime.commit import ThresholdRule
from dllm_compile.runtime.commit.base import Ranking
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.session import Session, SessionPool
from dllm_compile.runtime.slots import Slots
from tests.conftest import tiny_model

from .policies import POLICIES
from .tiny import FACTS, MASK, CachedPrograms, TinyModel, prompts_of

compiles = pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")

VERIFY = {"cache": "flash", "commit": "flash_verify", "window_length": 6, "lookahead": 4, "track": 6}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    **{case: POLICIES[case] for case in ("prefix every 3", "dual", "vicinity, warm", "dkv every 3", "flash")},
    "flash, all rows": {"cache": "flash", "track": -1, "window_length": 5},
    **{case: POLICIES[case] for case in ("dpad", "dual, dpad")},
    "verify": {**VERIFY, "gamma": 0.1},
    "verify, per token": {**VERIFY, "verify_rule": "per_token", "gamma": 0.2, "confidence_eos_eot_inf": True},
}
RULES: dict[str, dict[str, Any]] = {
    "one a step": {"threshold": None},
    "quota": {"threshold": None, "steps": 8, "eos": "rightmost"},
    "random": {"threshold": None, "remasking": "random", "eos": "first"},
    "factor": {"threshold": None, "factor": 1.0, "last_rank": "released", "temperature": 0.5},
    "frechet": {"threshold": None, "frechet_margin": 0.2, "eos": "none"},
    "guided": {"cfg_scale": 0.7, "confidence_eos_eot_inf": True},
}
# Prompt lengths, answer and block of each call: batches of one to five, rows from 256 to 512, one block or several.
CALLS = (
    ((9, 20), 16, 8),
    ((3, 11, 5), 16, 4),
    ((70, 10), 24, 8),
    ((7, 7, 7, 7, 7), 32, 8),
    ((90, 85, 90, 80), 40, 20),
    ((1, 2), 24, 12),
    ((40, 4, 4), 16, 2),
    ((33, 80), 64, 32),
    ((5, 6, 7, 8), 48, 16),
    ((12, 80, 60), 56, 14),
)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=2, eos_bias=3.0, layers=3)


@pytest.fixture
def counted(monkeypatch) -> list[Any]:
    """Stages as they are compiled, from none on."""
    monkeypatch.setattr(stages, "_COMPILED", {})
    made: list[Any] = []
    apart = stages._apart

    def watched(stage: Callable[..., Any]) -> Callable[..., Any]:
        made.append(stage.__name__)
        return apart(stage)

    monkeypatch.setattr(stages, "_apart", watched)
    return made


def steps_of(
    model: TinyModel, prompts: list[Tensor], config: DecodingConfig, run: stages.RunStage
) -> list[list[Tensor]]:
    """Everything that is held after each step, one sample joining when another has finished."""
    samples = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts)]
    slots = Slots.of(samples, None)
    capacity = Capacity.of(samples, len(samples), slots.rows, config)
    session = Session(CachedPrograms(model, 8), FACTS, config, slots.rows, capacity, run=run)
    look = session.start(samples, [slots.base(sample) for sample in samples], config)
    addresses = [tensor.data_ptr() for tensor in session._held.values()]
    found = []
    for _ in range(200):
        look = session.prepare(look)
        for i in range(2):
            session.step(refreshing=i == 0)
            scores = getattr(session.cache, "_scores", None)
            held = [*session._held.values(), *(() if scores is None else (scores,))]
            found.append([tensor.clone() for tensor in (*held, torch.tensor(session.cache.row_forwards))])
        done, look = session.look()
        assert addresses == [tensor.data_ptr() for tensor in session._held.values()], "a buffer was replaced"
        if all(done):
            return found
    raise AssertionError("not done")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("options", [*CASES.values(), *RULES.values()], ids=[*CASES, *RULES])
@torch.no_grad()
def test_compiled_stages_are_bit_identical_and_compiled_once(model, counted, options):
    """Every buffer after every step of ten calls with other sizes; each stage is compiled for the first one alone."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i, (lengths, new_tokens, block) in enumerate(CALLS):
            merged = {"max_new_tokens": new_tokens, "block_length": block, "threshold": 0.5, **options}
            if merged.get("steps"):
                merged["steps"] = new_tokens // block * 4
                merged["block_length"], merged["steps"] = new_tokens // 4, 16
            config = DecodingConfig(**merged)
            prompts = prompts_of(*lengths, seed=i)
            plain = steps_of(model, prompts, config, stages.run_plainly)
            compiled = steps_of(model, prompts, config, stages.run_compiled)
            assert len(plain) == len(compiled)
            for step, (one, other) in enumerate(zip(plain, compiled, strict=True)):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), (i, step)
    assert len(set(counted)) == len(counted), "a stage was compiled twice"
    assert {"open_step"} < set(counted)


@compiles
@pytest.mark.slow
@torch.no_grad()
def test_one_sample_or_one_block_is_a_kind_of_its_own(model, counted):
    """Sizes of one are constants of a compiler; here is what they cost: each stage once more."""
    options = {"cache": "dual", "threshold": 0.5}
    calls = [((9, 20), 16, 8), ((9,), 16, 8), ((30,), 32, 8), ((9, 20), 16, 16), ((4, 5, 6), 24, 24), ((7,), 8, 8)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths, new_tokens, block in calls:
            config = DecodingConfig(max_new_tokens=new_tokens, block_length=block, **options)
            prompts = prompts_of(*lengths)
            plain = steps_of(model, prompts, config, stages.run_plainly)
            compiled = steps_of(model, prompts, config, stages.run_compiled)
            for one, other in zip(plain, compiled, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert counted.count("finish_step") == 4  # one or several samples, one or several blocks


@compiles
@pytest.mark.slow
def test_sessions_share_what_is_compiled_and_are_freed(model, counted):
    """Two pools: nothing is compiled for the second one, and its buffers go with it."""
    config = DecodingConfig(max_new_tokens=12, block_length=6, threshold=0.5, cache="dual")
    prompts = prompts_of(3, 9, 5)
    expected = decode(CachedPrograms(model), FACTS, prompts, config).sequences
    dead = []
    for _ in range(2):
        pool = SessionPool(run=stages.run_compiled)
        assert torch.equal(decode(CachedPrograms(model), FACTS, prompts, config, sessions=pool).sequences, expected)
        (session,) = pool.idle()
        dead += [weakref.ref(session.state.tokens), weakref.ref(session.layout), weakref.ref(session.cache)]
        compiled = len(counted)
        del pool, session
    assert compiled == len(counted) == 3
    gc.collect()
    assert all(ref() is None for ref in dead)


@compiles
@pytest.mark.slow
def test_the_option_of_a_model(counted):
    """On a CPU as well, where it is asked for."""
    plain, fused = (
        dllm_compile.optimize(tiny_model(seed=3, n_layers=2), fuse_bookkeeping=fused) for fused in (False, True)
    )
    prompts = prompts_of(5, 11, seed=1)
    options = {"max_new_tokens": 20, "block_length": 8, "threshold": 0.2, "cache": "dual"}
    expected = plain.generate(prompts, **options)
    assert not counted
    output = fused.generate(prompts, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.forwards_per_row == expected.stats.forwards_per_row
    assert sorted(counted) == ["finish_step", "open_step", "plan_rows"]


@pytest.mark.parametrize(
    ("options", "told"),
    [({"fuse_bookkeeping": 1}, "fuse_bookkeeping"), ({"fuse_bookkeeping": True, "compile": False}, "compile=False")],
    ids=str,
)
def test_wrong_options(options, told):
    with pytest.raises(ConfigError, match=told):
        dllm_compile.CompileConfig(**options)


def test_kinds_know_values_and_sizes_of_one_but_no_other_sizes():
    def kind(rows: int, threshold: float = 0.5, samples: int = 2) -> Any:
        prompts = prompts_of(*[rows] * samples)
        config = DecodingConfig(max_new_tokens=8, block_length=4)
        planned = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts)]
        capacity = Capacity.of(planned, samples, samples * (rows + 8), config)
        layout = Layout.of(
            planned, mask_token_id=MASK, tile_rows=8, guided=False, device=torch.device("cpu"), capacity=capacity
        )
        return stages.kind((ThresholdRule(threshold), layout))

    assert kind(3) == kind(70) == kind(5, samples=4)
    assert len({hash(one) for one in (kind(3), kind(3, 0.6), kind(3, samples=1))}) == 3


# --- what replaced slower operations, against these -------------------------------------------------------------------


FLOATS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-42, -1e-42, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_one_sort_ranks_like_three(data, lengths):
    """By sample, band and score, ties by position: zeros of both signs are equal, and NaN is above everything."""
    samples = [
        Sample(i, torch.zeros(1, dtype=torch.int64), n, (torch.arange(1),), False) for i, n in enumerate(lengths)
    ]
    layout = Layout.of(samples, mask_token_id=MASK, tile_rows=None, guided=False, device=torch.device("cpu"))
    band = torch.tensor([data.draw(st.integers(0, 3)) for _ in range(layout.rows)])
    scores = torch.tensor([data.draw(FLOATS) for _ in range(layout.rows)], dtype=torch.float32)
    scores = torch.where(torch.arange(layout.rows) % 5 == 4, -scores, scores)  # NaN of the other sign
    by_score = torch.sort(scores, stable=True).indices
    by_band = by_score[torch.sort(band[by_score], stable=True).indices]
    order = by_band[torch.sort(layout.sample_of_row[by_band], stable=True).indices].tolist()
    ends = list(itertools.accumulate(lengths))
    expected = [0] * layout.rows
    for place, row in enumerate(order):
        expected[row] = ends[int(layout.sample_of_row[row])] - place
    found = order_by_score(layout, band, scores)
    assert found.tolist() == order
    assert rank_from_end(layout, found).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(1, 9))
def test_columns_of_the_window_are_those_of_a_stable_sort(rows, window):
    masked = torch.tensor(rows)
    rule = FlashRule(window=window, near=window, track=0, mask_token_id=MASK)
    columns = rule.columns(masked)
    assert columns.shape == (len(rows), min(window, 7))
    for flags, found in zip(masked, columns, strict=True):
        masks = torch.nonzero(flags).flatten().tolist()[:window]
        assert found[: len(masks)].tolist() == masks
        assert not flags[found[len(masks) :]].any() or len(masks) == window


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5]))
def test_a_threshold_takes_what_the_ranking_says(data, width, threshold):
    confidence = torch.tensor([[data.draw(st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])) for _ in range(width)]])
    valid = torch.tensor([[data.draw(st.booleans()) for _ in range(width)]])
    ranking = Ranking.of(confidence, valid)
    found = ThresholdRule(threshold)(confidence, valid, torch.zeros(1), torch.zeros(1))
    assert torch.equal(found, ranking.take(ranking.confidence >= threshold))
