# SPDX-License-Identifier: Apache-2.0
"""Flash-Verify under the generic tests of section 1.7 (G3 to G8), and every prompt by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime import step as step_module
from dllm_compile.runtime.cache import Look, cache_policy, row_subset
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.step import StepConstants, decode_step
from tests.reference.verify_loop import VerifyResult

from .test_engine import _NoHostRead
from .test_flash_verify import LENGTHS, RULES, SMALL, STOP, Scripted, config_of, sharp
from .tiny import EOS, FACTS, MASK, CachedPrograms, TinyModel, cached, prompts_of

LONGER = dataclasses.replace(FACTS, max_sequence_length=256)
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return sharp()


@pytest.mark.parametrize("eos", ["first", "none"])
@pytest.mark.parametrize("new_tokens", [16, pytest.param(48, marks=SLOW), pytest.param(200, marks=SLOW)])
@pytest.mark.parametrize("rule", RULES)
def test_every_prompt_alone_and_together(model, rule, new_tokens, eos):
    """Prompts of 1, 5, 12 and 31 tokens, B = 1 and B = 4: tokens, forwards and rows of the reference."""
    prompts = prompts_of(*LENGTHS, seed=3)
    config = config_of(rule, max_new_tokens=new_tokens, eos=eos, eos_token_id=STOP)
    expected = cached(model, prompts, config, LONGER)
    together = decode(CachedPrograms(model), LONGER, prompts, config)
    for i, (prompt, one) in enumerate(zip(prompts, expected, strict=True)):
        assert isinstance(one, VerifyResult)
        assert all(p < len(prompt) + new_tokens for rows in one.rows for p in rows), "nothing behind P + G"
        alone = decode(CachedPrograms(model), LONGER, [prompt], config)
        assert alone.sequences.tolist() == [one.canvas]
        assert together.sequences[i, 31 - len(prompt) :].tolist() == one.canvas
        assert alone.stats.forwards_per_row == (one.forwards,)
        assert alone.stats.row_forwards == sum(map(len, one.rows))
        assert together.stats.forwards_per_row[i] == one.forwards
    assert any(kept for one in expected for _, kept in one.accepted), "no draft was accepted"
    assert (min(one.decoded for one in expected) < new_tokens) == (eos == "first"), (
        "an end is met, or none is asked for"
    )


@pytest.mark.parametrize("track", [0, 6, -1])
@pytest.mark.parametrize("rule", RULES)
def test_rows_of_both_forwards(model, rule, track):
    """G3: window, look-ahead and tracked rows (all rows with a negative budget), then twice the window, padding too."""
    config = config_of(rule, **{**SMALL, "track": track}, eos="none")
    for prompt in prompts_of(14, 9, 1, seed=2):
        programs = CachedPrograms(model)
        decode(programs, FACTS, [prompt], config)
        (result,) = cached(model, [prompt], config)
        length, masks, fresh = len(prompt) + 20, 20, 0
        spare = programs.cache_calls[0].caches["k_cache_0"].shape[0] - 1
        assert len(programs.cache_calls) == len(programs.verify_calls) == len(result.commits)
        for step, (cache, committed) in enumerate(zip(programs.cache_calls, result.commits, strict=True)):
            real = int((cache.cache_rows < spare).sum())
            tracked = min(length - masks, max(track, fresh))
            assert real == (length if step == 0 or track < 0 else min(masks, 6 + 4) + tracked)
            masks, fresh = masks - committed, committed
        assert masks == 0
        for inputs, verify in programs.verify_calls:
            assert len(inputs.ids) == 12
            assert len(inputs.wanted) == len(verify.given) == 3


@pytest.mark.parametrize("rule", RULES)
def test_what_the_cache_held_before_is_never_read(model, rule, monkeypatch):
    """G5: rows outside of the samples' keys hold NaN."""
    prompts = prompts_of(2, 11, 6, 1, seed=4)
    clean = decode(CachedPrograms(model), FACTS, prompts, config_of(rule, **SMALL))
    zeros = row_subset.allocate

    def poisoned(*arguments):
        caches = zeros(*arguments)
        for cache in caches.values():
            cache[:-1].fill_(torch.nan)
        return caches

    monkeypatch.setattr(row_subset, "allocate", poisoned)
    dirty = decode(CachedPrograms(model), FACTS, prompts, config_of(rule, **SMALL))
    assert torch.equal(clean.sequences, dirty.sequences)
    assert clean.stats.forwards_per_row == dirty.stats.forwards_per_row


@pytest.mark.parametrize("rule", RULES)
def test_committed_tokens_never_change(model, rule):
    """G6 and G7: what stands in a forward as a token stands there in the end; each step commits one at least."""
    for prompt in prompts_of(1, 6, 30, seed=6):
        config = config_of(rule, eos="none", **SMALL)
        programs = CachedPrograms(model)
        output = decode(programs, FACTS, [prompt], config)
        final = output.sequences[0].tolist()
        assert final[: len(prompt)] == prompt.tolist()
        known: dict[int, int] = dict(enumerate(prompt.tolist()))
        for call, ids in zip(programs.calls, programs.ids, strict=True):
            for position, token in zip(call.positions.tolist(), ids.tolist(), strict=True):
                if token != MASK:
                    assert known.setdefault(position, token) == token == final[position]
        steps = len(programs.calls)
        assert steps <= config.max_new_tokens
        assert output.stats.forwards == 2 * steps
        assert MASK not in final


@pytest.mark.parametrize("eos", ["first", "rightmost", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_of_two_forwards_reads_nothing_on_the_host(rule, eos):
    """G8: tensor operations with static shapes alone, on buffers that stay, until every sample is done."""
    tokens = [(5 * i) % 30 for i in range(25)]
    tokens[11] = EOS
    programs = Scripted(tokens, [0.1 * (i * 7 % 10) for i in range(25)], [0.3 + 0.07 * (i * 3 % 10) for i in range(25)])
    config = config_of(rule, threshold=0.7, max_new_tokens=18, eos=eos, **SMALL)
    prompts = prompts_of(3, 7, 1, seed=9)
    asked = programs.asked
    programs.asked = _Ignored()
    constants = StepConstants.of(config, FACTS, programs.device)
    samples = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts)]
    layout = Layout.of(samples, mask_token_id=MASK, tile_rows=None, guided=False, device=programs.device)
    policy = cache_policy(config, programs, layout.rows, MASK)
    policy.begin(layout)
    state = CanvasState.begin(layout, layout.initial_tokens(MASK))
    addresses = [getattr(state, name).data_ptr() for name in CanvasState.__dataclass_fields__]
    policy.look(layout, state, Look.at_the_beginning(samples))
    programs.verify_step = _without_reads(programs)
    with _NoHostRead():
        for i in range(18):
            decode_step(policy, constants, layout, state, refreshing=i == 0)
    assert addresses == [getattr(state, name).data_ptr() for name in CanvasState.__dataclass_fields__]
    assert state.done.all()
    finished = state.tokens[: layout.rows].clone()
    programs.asked = asked
    del programs.verify_step
    expected = decode(programs, FACTS, prompts, config)
    width = max(map(len, prompts))
    rows = [row[width - len(p) :].tolist() for row, p in zip(expected.sequences, prompts, strict=True)]
    assert finished.tolist() == [token for row in rows for token in row]
    assert any(asked), "nothing was verified"


class _Ignored(list):
    def append(self, value: object) -> None:
        """Nothing is remembered."""


def _without_reads(programs: Scripted):
    """The scripted pass without the list that its own test reads."""

    def step(inputs, verify):
        at = inputs.positions[inputs.wanted]
        return programs.tokens[at], programs.verified[at], programs.verified[at]

    return step


@SLOW
@pytest.mark.parametrize(
    ("rule", "count"), [("product", 200), ("per_token", 50), pytest.param("per_token", 200, marks=pytest.mark.long)]
)
def test_two_hundred_prompts_through_eight_slots(model, rule, count):
    """The same tokens and forwards as each alone, in the order asked for."""
    prompts = prompts_of(*(1 + 7 * i % 29 for i in range(count)), seed=3)
    config = config_of(rule, max_new_tokens=16, slots=8, check_every=2, **SMALL)
    output = decode(CachedPrograms(model), FACTS, prompts, config)
    for i, prompt in enumerate(prompts):
        alone = decode(CachedPrograms(model), FACTS, [prompt], config.replace(slots=None))
        assert torch.equal(output.sequences[i, 29 - len(prompt) :], alone.sequences[0]), i
        assert output.stats.forwards_per_row[i] == alone.stats.forwards_per_row[0]


def test_refreshing_everything_with_no_acceptance_is_the_window_without_a_cache(model):
    """G1: all rows in every step and gamma above 1 equal an uncached sliding window with the threshold rule."""
    prompts = prompts_of(*LENGTHS, seed=3)
    config = config_of(gamma=1.1, **{**SMALL, "track": -1})
    plain = DecodingConfig(cache="flash", threshold=0.6, max_new_tokens=20, **{**SMALL, "track": -1})
    verified, confident = (decode(CachedPrograms(model), FACTS, prompts, one) for one in (config, plain))
    assert torch.equal(verified.sequences, confident.sequences)


@pytest.mark.parametrize("rule", RULES)
def test_one_layer_is_exact_only_if_all_tokens_of_a_step_are_tracked(rule, monkeypatch):
    """G2, and 10.6: pinning accepted tokens alone, as the released code does, leaves rows of masks behind."""
    model = sharp(seed=2, layers=1)
    config = config_of(rule, **{**SMALL, "track": 0, "lookahead": 0}, eos="none")
    prompts = prompts_of(*LENGTHS, seed=8)
    fresh = decode(CachedPrograms(model), FACTS, prompts, config.replace(track=-1)).sequences
    assert torch.equal(decode(CachedPrograms(model), FACTS, prompts, config).sequences, fresh)
    original = step_module.accept_step

    def forgetful(rule, constants, layout, state, drafts, *rest):
        lost = dataclasses.replace(drafts, committed=torch.zeros_like(drafts.committed))
        return original(rule, constants, layout, state, lost, *rest)

    monkeypatch.setattr(step_module, "accept_step", forgetful)
    assert not torch.equal(decode(CachedPrograms(model), FACTS, prompts, config).sequences, fresh)
