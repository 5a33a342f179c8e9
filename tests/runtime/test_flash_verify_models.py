# SPDX-License-Identifier: Apache-2.0
"""Flash-Verify through real row programs in fp32, against the reference over the unmodified weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dllm_compile
from dllm_compile._compat import can_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.errors import PromptError
from dllm_compile.models.small.problem import held_out
from dllm_compile.runtime.commit.flash_verify import within_canvas
from tests.conftest import tiny_model

from .bundled import assert_equals_reference, prompts_of_problems
from .tiny import prompts_of

VERIFY = {"cache": "flash", "commit": "flash_verify"}
RULES = {"product": {"gamma": 0.8}, "per_token": {"gamma": 0.9, "verify_rule": "per_token"}}
LOOSE = {
    "product": {"gamma": 0.02, "threshold": 0.2},
    "per_token": {"gamma": 0.1, "verify_rule": "per_token", "threshold": 0.2},
}
STOPS = tuple(range(0, 126, 7))
LENGTHS = (1, 5, 12, 31)
LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


def assert_equals(fast, model, prompts, config):
    """Rows and commits besides tokens and forwards; what the reference did."""
    expected, output = assert_equals_reference(fast, model, prompts, config)
    assert max(max(one.commits) for one in expected) <= config.window_length
    assert output.stats.row_forwards == sum(len(rows) for one in expected for rows in one.rows)
    return expected


# --- the bundled model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=LONG)], ids="{} problems".format)
@pytest.mark.parametrize("rule", RULES)
def test_problems(small_model, small_fast, small_tokenizer, rule, count):
    """Token for token, in fours and alone, half of them with an end and half without."""
    prompts = prompts_of_problems(small_tokenizer, count)
    verdicts = []
    for first in range(0, count, 4):
        eos = "none" if first // 4 % 2 else "first"
        config = DecodingConfig(max_new_tokens=48, eos=eos, **VERIFY, **RULES[rule])
        for one in assert_equals(small_fast, small_model, prompts[first : first + 4], config):
            verdicts += one.accepted
    assert any(kept for _, kept in verdicts), "no draft was accepted"
    assert any(kept < tried for tried, kept in verdicts), "no draft was refused"


@pytest.mark.parametrize("eos", ["first", "none"])
@pytest.mark.parametrize("new_tokens", [16, pytest.param(48, marks=LONG), pytest.param(200, marks=LONG)])
@pytest.mark.parametrize("rule", RULES)
def test_prompts_and_answers_of_any_length(small_model, small_fast, small_tokenizer, rule, new_tokens, eos):
    """Prompts of 1, 5, 12 and 31 tokens: less decoded than there is room for context, and more."""
    problems = held_out("arithmetic", len(LENGTHS), seed=2)
    whole = [small_tokenizer(problem.prompt)["input_ids"] for problem in problems]
    prompts = [torch.tensor(ids[:length]) for ids, length in zip(whole, LENGTHS, strict=True)]
    assert tuple(map(len, prompts)) == LENGTHS
    config = DecodingConfig(max_new_tokens=new_tokens, eos=eos, threshold=0.5, **VERIFY, **RULES[rule])
    assert_equals(small_fast, small_model, prompts, config)


# --- a random one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=3, n_layers=3)


@pytest.fixture(scope="module")
def fast(model) -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(model, compile=False)


def config_of(rule: str, **options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 24, "eos_token_id": STOPS, **VERIFY, **LOOSE[rule], **options})


@pytest.mark.parametrize("options", [{}, {"window_length": 5, "lookahead": 4, "track": 6}, {"track": -1}], ids=str)
@pytest.mark.parametrize("rule", LOOSE)
def test_random_weights_equal_the_reference(fast, model, rule, options):
    expected = assert_equals(fast, model, prompts_of(4, 12, 7, 1, seed=5), config_of(rule, **options))
    assert any(kept for one in expected for _, kept in one.accepted)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_tying": True},
        {"include_qkv_bias": True, "n_kv_heads": 4},
        {"attention_layer_norm": True},
        {"n_kv_heads": 1},
    ],
    ids=str,
)
def test_variants_of_the_model(changes):
    """G9 and G2: with one layer and everything refreshed or not, the same tokens; samples alone and together."""
    other = dllm_compile.optimize(tiny_model(seed=4, n_layers=1, **changes), compile=False)
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    for rule in LOOSE:
        config = config_of(rule, window_length=5, lookahead=4, track=6)
        stale = other.generate(prompts, config)
        refreshed = other.generate(prompts, config, track=-1)
        assert torch.equal(stale.sequences, refreshed.sequences)
        for i, prompt in enumerate(prompts):
            alone = other.generate(prompt, config).sequences[0]
            assert torch.equal(alone, stale.sequences[i, 12 - len(prompt) :])


def test_threads_do_not_disturb_each_other(fast):
    """G10: both rules and confidence mode at the same time over one model."""
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    configs = [config_of(rule) for rule in LOOSE]
    configs.append(DecodingConfig(max_new_tokens=24, cache="flash", threshold=0.2, eos_token_id=STOPS))
    alone = [fast.generate(prompts, config).sequences for config in configs]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            together = list(pool.map(lambda config: fast.generate(prompts, config).sequences, configs))
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "large", [{"verify_candidates": 10**6}, {"window_length": 10**6}, {"verify_rows": 10**6}], ids=str
)
@pytest.mark.parametrize("rule", LOOSE)
def test_sizes_beyond_the_canvas_are_its_size(fast, rule, large):
    """A pass has no more rows than canvases fill: its tables would not fit into any memory."""
    config = DecodingConfig(
        **{**VERIFY, **LOOSE[rule], "window_length": 8, "lookahead": 4, "max_new_tokens": 20, **large}
    )
    longest = 256
    own = {"window_length": longest, "verify_candidates": longest, "verify_rows": 2 * longest}
    if "window_length" not in large:
        own["window_length"] = 8
    if "verify_candidates" not in large and "window_length" not in large:
        own["verify_candidates"] = 4
    output = fast.generate(prompts_of(9, 3, seed=2), config)
    assert torch.equal(output.sequences, fast.generate(prompts_of(9, 3, seed=2), config, **own).sequences)


@pytest.mark.parametrize("window", [16, 64, 10**6])
def test_prompts_of_nearly_one_length_share_buffers(window):
    """What is cut to the canvas is not cut to each canvas."""
    config = DecodingConfig(**{**VERIFY, "window_length": window, "max_new_tokens": 8})
    cut = {within_canvas(config, length + 8) for length in range(2, 8)}
    assert len(cut) == 1
    assert max(one.window_length for one in cut) <= 256


def test_the_longest_canvas(fast):
    """G12: positions up to the end of the rotary tables; one more is refused."""
    config = config_of("product", max_new_tokens=28)
    assert fast.generate(prompts_of(100, seed=1), config).sequences.shape == (1, 128)
    with pytest.raises(PromptError):
        fast.generate(prompts_of(101, seed=1), config)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
def test_compiled_equals_eager(model, fast):
    """G11: tokens in fp32; batches of one and of four, and no compilation after the first."""
    compiled = dllm_compile.optimize(model, compile=True)
    for rule in LOOSE:
        for i, lengths in enumerate(((5, 11, 2, 8), (7,), (1, 30))):
            prompts = prompts_of(*lengths, seed=i)
            expected = fast.generate(prompts, config_of(rule))
            with torch.compiler.set_stance("default" if rule == "product" and i == 0 else "fail_on_recompile"):
                output = compiled.generate(prompts, config_of(rule))
            assert torch.equal(output.sequences, expected.sequences)
            assert output.stats.forwards_per_row == expected.stats.forwards_per_row
