# SPDX-License-Identifier: Apache-2.0
"""`pin="released"`: Flash-dLLM's code loses the tokens of a step's first forward (section 10.6)."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError
from dllm_compile.runtime.engine import decode

from .bundled import assert_equals_reference, prompts_of_problems
from .test_flash_verify import LENGTHS, RULES, SMALL, STOP, config_of, sharp
from .tiny import FACTS, MASK, CachedPrograms, TinyModel, assert_equals_cached, cached, prompts_of


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return sharp()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        {**SMALL, "track": 0, "lookahead": 0},
        {**SMALL, "track": 2, "eos": "rightmost", "eos_token_id": STOP},
        {**SMALL, "verify_context": 0, "slots": 2},
        {**SMALL, "check_every": 3},
        {"score_layers": "all"},
    ],
    ids=str,
)
def test_equals_the_reference(model, rule, options):
    """Tokens, forwards and computed rows."""
    assert_equals_cached(
        CachedPrograms(model), prompts_of(*LENGTHS, seed=6), config_of(rule, pin="released", **options)
    )


def test_only_tokens_of_the_second_forward_are_tracked(model):
    """With no budget of its own a step tracks what the verify pass accepted before it, and nothing else."""
    config = config_of(gamma=0.0, eos="none", pin="released", **{**SMALL, "track": 0, "lookahead": 0})
    (prompt,) = prompts_of(12, seed=3)
    programs = CachedPrograms(model)
    decode(programs, FACTS, [prompt], config)
    (result,) = cached(model, [prompt], config)
    lost = 0
    for call, ids, committed, (tried, accepted) in zip(
        programs.calls[1:], programs.ids[1:], result.commits, result.accepted, strict=False
    ):
        decoded = call.positions[(ids != MASK) & (call.positions >= 12)]
        assert tried == accepted
        assert len(decoded) == accepted < committed
        lost += committed - accepted
    assert lost > 0


def test_one_layer_is_exact_unless_tokens_are_forgotten():
    """G2 in verify mode: rows of masks that are never computed again change tokens, even where no layer is deep."""
    model = sharp(seed=2, layers=1)
    prompts = prompts_of(*LENGTHS, seed=8)
    config = config_of(eos="none", **{**SMALL, "track": 0})
    exact, kept, forgotten = (
        decode(CachedPrograms(model), FACTS, prompts, one)
        for one in (config.replace(track=-1), config, config.replace(pin="released"))
    )
    assert torch.equal(exact.sequences, kept.sequences)
    assert exact.stats.forwards_per_row == kept.stats.forwards_per_row
    assert not torch.equal(exact.sequences, forgotten.sequences)


def test_it_means_nothing_without_a_second_forward():
    for options in ({"cache": "flash", "threshold": 0.9}, {"cache": "dual"}, {}):
        with pytest.raises(ConfigError, match=r"pin belongs to commit='flash_verify', not to commit=None"):
            DecodingConfig(pin="released", **options)


@pytest.mark.parametrize("problems", [4, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_bundled_model(small_model, small_fast: dllm_compile.OptimizedModel, small_tokenizer, problems):
    """Token for token in fp32, ragged batches of four, with the released end of an answer."""
    prompts = prompts_of_problems(small_tokenizer, problems)
    config = DecodingConfig(
        max_new_tokens=48, cache="flash", commit="flash_verify", track=16, lookahead=16, eos="rightmost", pin="released"
    )
    for first in range(0, problems, 4):
        assert_equals_reference(small_fast, small_model, prompts[first : first + 4], config, alone=0)
