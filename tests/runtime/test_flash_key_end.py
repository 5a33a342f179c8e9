# SPDX-License-Identifier: Apache-2.0
"""`key_end="released"`: eos ids are seen up to the next multiple of 128, as in Flash-dLLM's code (section 10.8)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dllm_compile
from dllm_compile._compat import can_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError, PromptTooLongError
from dllm_compile.runtime import stages
from dllm_compile.runtime.cache.row_plan import RowPlan
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Sample
from dllm_compile.runtime.session import Session, SessionPool

from .bundled import assert_equals_reference, prompts_of_problems
from .policies import rows_of
from .test_engine import _NoHostRead
from .test_flash_verify import SMALL, STOP, sharp
from .tiny import EOS, FACTS, MASK, CachedPrograms, TinyModel, assert_equals_cached, prompts_of

LONG = dataclasses.replace(FACTS, max_sequence_length=300)
LENGTHS = (1, 12, 31, 108)  # the last canvas ends at 128, and its keys at 256
RULES = {
    "threshold": {"threshold": 0.6},
    "quota": {"steps": 7},
    "product": {"threshold": 0.6, "commit": "flash_verify", "gamma": 0.1},
    "per_token": {"threshold": 0.6, "commit": "flash_verify", "verify_rule": "per_token", "gamma": 0.2},
}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return sharp()


def config_of(rule: str = "threshold", **options) -> DecodingConfig:
    released = {"cache": "flash", "key_end": "released", "max_new_tokens": 20, **SMALL}
    return DecodingConfig(**{**released, **RULES[rule], **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lookahead": 40},
        {"track": 0, "lookahead": 0},
        {"track": -1},
        {"eos": "rightmost", "eos_token_id": STOP},
        {"slots": 2, "check_every": 3},
        {"score_layers": "all", "infill": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_reference(model, rule, options):
    """Tokens, forwards and computed rows of ragged four."""
    prompts = prompts_of(*LENGTHS, seed=6)
    if "infill" in options:
        prompts[1][[2, 3, 9]] = MASK
    assert_equals_cached(CachedPrograms(model), prompts, config_of(rule, **options), LONG)


@pytest.mark.parametrize("options", [{"cfg_scale": 0.7}, {"temperature": 0.5, "seed": 3}], ids=str)
@pytest.mark.parametrize("track", [4, -1])
def test_guided_and_sampled(model, track, options):
    prompts = prompts_of(5, 30, seed=2)
    assert_equals_cached(CachedPrograms(model, 8), prompts, config_of(track=track, **options), LONG)


def test_what_the_model_sees(model):
    """Eos ids from P + G on, to a multiple of 128 that is strictly larger, all of them seen, and none a candidate."""
    for length in (1, 107, 108, 109):
        programs = CachedPrograms(model)
        (prompt,) = prompts_of(length, seed=2)
        output = decode(programs, LONG, [prompt], config_of(eos="none"))
        end = length + 20
        keys = 256 if end >= 128 else 128
        first = programs.ids[0]
        assert first.tolist() == prompt.tolist() + [MASK] * 20 + [EOS] * (keys - end)
        assert output.sequences.shape == (1, end)
        assert output.stats.canvas_tokens == 20
        for call, ids in zip(programs.calls, programs.ids, strict=True):
            behind = call.positions >= end
            assert (ids[behind] == EOS).all()
            assert (call.positions[call.wanted] < end).all()
            assert call.tiles[0, 3] - call.tiles[0, 2] == keys


def test_rows_behind_the_canvas_come_last_in_the_look_ahead(model):
    """As many as are left of window + look-ahead when the masks run out, from the left."""
    config = config_of("quota", steps=None, eos="none", window_length=4, lookahead=6, track=3)
    programs = CachedPrograms(model)
    decode(programs, LONG, prompts_of(9, seed=2), config)
    for step, rows in enumerate(rows_of(programs)):
        behind = [position for position in rows if position >= 29]
        assert behind == list(range(29, 128 if step == 0 else 29 + max(0, 10 - (20 - step))))
        window = [row for row in programs.cache_calls[step].window[0].tolist() if row >= 0]
        positions = programs.calls[step].positions[window]
        assert len(positions) == min(4, 20 - step)
        assert (positions < 29).all()


def test_one_layer_is_exact():
    """G2 and G1: with one layer the same tokens as a window that computes every row, eos ids behind it included."""
    model = sharp(seed=2, layers=1)
    for rule in RULES:
        config = config_of(rule, eos="none")
        stale, exact = (
            decode(CachedPrograms(model), LONG, prompts_of(*LENGTHS, seed=8), one)
            for one in (config, config.replace(track=-1))
        )
        assert torch.equal(stale.sequences, exact.sequences)
        assert stale.stats.row_forwards < exact.stats.row_forwards


def test_it_decides_tokens(model):
    """Otherwise nothing above would prove anything: the padding is attended."""
    prompts = prompts_of(*LENGTHS, seed=6)
    exact, released = (
        decode(CachedPrograms(model), LONG, prompts, config_of(eos="none", key_end=end))
        for end in ("exact", "released")
    )
    assert not torch.equal(exact.sequences, released.sequences)


def test_sessions_and_slots(model):
    """Buffers of one size for all calls, samples that come and go: the tokens of fresh runs."""
    pool, config = SessionPool(), config_of("product", slots=2, check_every=2)
    for seed in range(3):
        prompts = prompts_of(3, 100, 12, 9, seed=seed)
        kept = decode(CachedPrograms(model), LONG, prompts, config, sessions=pool)
        fresh = [decode(CachedPrograms(model), LONG, [prompt], config) for prompt in prompts]
        for row, prompt, one in zip(kept.sequences, prompts, fresh, strict=True):
            assert torch.equal(row[100 - len(prompt) :], one.sequences[0])


class Recorder:
    """What a streamer is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value) -> None:
        self.tokens += value.flatten().tolist()

    def put_draft(self, value) -> None:
        assert value.numel() <= 20

    def end(self) -> None:
        """Nothing follows."""


def test_nobody_is_shown_the_padding(model):
    prompts = prompts_of(5, 9, seed=2)
    streamers = [Recorder(), Recorder()]
    output = decode(CachedPrograms(model), LONG, prompts, config_of(eos="none"), streamer=streamers)
    for row, prompt, one in zip(output.sequences, prompts, streamers, strict=True):
        assert one.tokens == row[9 - len(prompt) :].tolist()
    given_up = decode(CachedPrograms(model), LONG, prompts, config_of(slots=1), cancelled=lambda: True)
    assert given_up.sequences.shape == (2, 29)


@pytest.mark.parametrize("rule", ["threshold", "product"])
def test_stages_read_nothing_on_the_host(model, rule):
    """G8: tensor operations with static shapes alone. The tiny model reads what it likes; the stages may not."""
    config, plans = config_of(rule), []

    def guarded(stage, *arguments):
        with _NoHostRead():
            result = stage(*arguments)
        plans.extend(one for one in (result if isinstance(result, tuple) else ()) if isinstance(one, RowPlan))
        return result

    session = Session(CachedPrograms(model), LONG, config, 256, run=guarded)
    sample = Sample.plan(0, prompts_of(9, seed=2)[0], config, MASK)
    session.prepare(session.start([sample], [0], config))
    for i in range(3):
        session.step(refreshing=i == 0)
    assert len(plans) == 3
    assert all((one.ids[one.positions >= 29] == EOS).all() for one in plans)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.long), {"commit": "flash_verify", "gamma": 0.1, "pin": "released"}],
    ids=str,
)
def test_compiled_bookkeeping(model, options):
    """Stages with the released readings, compiled once for prompts of other lengths: the same tokens and work."""
    config = config_of(**options)
    pool = SessionPool(run=stages.run_compiled)
    for seed, lengths in enumerate([(3, 50, 12), (9, 1, 60)]):
        prompts = prompts_of(*lengths, seed=seed)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled = decode(CachedPrograms(model), LONG, prompts, config, sessions=pool)
        plain = decode(CachedPrograms(model), LONG, prompts, config)
        assert torch.equal(compiled.sequences, plain.sequences)
        assert compiled.stats.forwards_per_row == plain.stats.forwards_per_row
        assert compiled.stats.row_forwards == plain.stats.row_forwards


def test_refusals(model):
    """The length of the model, an eos id to fill with, another cache: each by name, before anything is computed."""
    programs = CachedPrograms(model)
    with pytest.raises(PromptTooLongError, match=r"key_end='released' needs 98 positions.*max_sequence_length is 96"):
        decode(programs, FACTS, prompts_of(10), config_of())
    with pytest.raises(ConfigError, match="key_end='released'.*eos_token_id"):
        decode(programs, dataclasses.replace(LONG, eos_token_id=()), prompts_of(10), config_of())
    with pytest.raises(ConfigError, match=r"key_end belongs to cache='flash', not to cache='dual'"):
        DecodingConfig(cache="dual", key_end="released")
    assert not programs.calls


@pytest.mark.parametrize("problems", [2, pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_bundled_model(small_model, small_fast: dllm_compile.OptimizedModel, small_tokenizer, problems):
    """Keys, tracked tokens and the end of an answer as in Flash-dLLM's released code, token for token in fp32."""
    prompts = prompts_of_problems(small_tokenizer, problems)
    released = {"key_end": "released", "pin": "released", "eos": "rightmost"}
    config = DecodingConfig(max_new_tokens=40, cache="flash", commit="flash_verify", track=16, lookahead=16, **released)
    for first in range(0, problems, 2):
        assert_equals_reference(small_fast, small_model, prompts[first : first + 2], config, alone=0)
