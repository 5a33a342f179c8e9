# SPDX-License-Identifier: Apache-2.0
"""What every cache and suffix policy promises: its own definition, and the generic tests of section 1.7."""

from __future__ import annotations

import itertools

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.cache import Look, cache_policy
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.step import StepConstants, decode_step
from dllm_compile.runtime.suffix import choose_rows, suffix_rule

from .policies import POLICIES, REFRESH_ALL, run_alone
from .test_engine import _NoHostRead
from .tiny import (
    EOS,
    FACTS,
    MASK,
    CachedPrograms,
    DensePrograms,
    ScriptedPrograms,
    TinyModel,
    assert_equals_cached,
    canvases,
    prompts_of,
)

RULES = {
    "quota": {},
    "steps": {"steps": 12},
    "threshold": {"threshold": 0.5},
    "factor": {"factor": 1.0},
    "frechet": {"frechet_margin": 0.25},
    "sampled": {"threshold": 0.4, "temperature": 0.6, "seed": 4},
    "guided": {"threshold": 0.5, "cfg_scale": 0.7},
    "random": {"remasking": "random", "seed": 2},
    "first": {"threshold": 0.5, "eos": "first"},
    "rightmost": {"threshold": 0.2, "eos": "rightmost"},
}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=1, eos_bias=1.5, layers=3)


def config_of(policy: str, rule: str = "threshold", **options) -> DecodingConfig:
    """20 tokens in blocks of 8, the last one short; the steps rule needs a number that fits the blocks."""
    return DecodingConfig(**{"max_new_tokens": 20, "block_length": 8, **POLICIES[policy], **RULES[rule], **options})


# --- the definition, token for token -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_the_reference(model, policy, rule):
    """Four ragged prompts: tokens, forwards and computed rows."""
    tile_rows = 4 if rule in ("threshold", "guided") else None
    assert_equals_cached(CachedPrograms(model, tile_rows), prompts_of(2, 11, 6, 1, seed=4), config_of(policy, rule))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_length", [1, 7, 32])
def test_equals_the_reference_alone(model, policy, block_length):
    """One prompt, the rows of each forward compared one by one."""
    config = config_of(policy, block_length=block_length)
    programs = CachedPrograms(model)
    (prompt,) = prompts_of(9, seed=block_length)
    _, (expected,) = assert_equals_cached(programs, [prompt], config)
    if config.cache != "none":
        assert run_alone(model, prompt, config)[1] == expected.rows


@pytest.mark.parametrize("policy", POLICIES)
def test_infill(model, policy):
    """Masks in the prompt: a block of their own, or the first ones that the window meets."""
    prompts = prompts_of(9, 5, 4, seed=6)
    prompts[0][[1, 2, 6]] = MASK
    prompts[2][1:] = MASK
    assert_equals_cached(CachedPrograms(model), prompts, config_of(policy, infill=True))
    assert_equals_cached(CachedPrograms(model), prompts, config_of(policy, "guided", infill=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_heads(policy, kv_heads):
    """G9: grouped and plain heads."""
    model = TinyModel(seed=5, layers=3, kv_heads=kv_heads)
    assert_equals_cached(CachedPrograms(model), prompts_of(3, 7, seed=4), config_of(policy))


# --- generic tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "steps"])
@pytest.mark.parametrize("policy", REFRESH_ALL)
def test_refreshing_everything_equals_no_cache(model, policy, rule):
    """G1, exactly: tokens and forwards."""
    config = DecodingConfig(max_new_tokens=20, block_length=8, **RULES[rule])
    prompts = prompts_of(2, 11, 6, 1, seed=4)
    plain = decode(DensePrograms(model), FACTS, prompts, config)
    all_rows = decode(CachedPrograms(model), FACTS, prompts, config.replace(**REFRESH_ALL[policy]))
    assert torch.equal(plain.sequences, all_rows.sequences)
    assert plain.stats.forwards_per_row == all_rows.stats.forwards_per_row
    assert plain.stats.row_forwards == all_rows.stats.row_forwards


@pytest.mark.parametrize(
    "rule",
    [{}, {"steps": 12}, {"threshold": 0.98, "temperature": 1.5}, {"eos": "first"}, {"eos": "first", "threshold": 0.99}],
    ids=str,
)
@pytest.mark.parametrize("policy", [name for name in POLICIES if "cache" in POLICIES[name]])
def test_one_layer_is_exact(policy, rule):
    """G2: keys and values of layer 0 depend on token and position only, so no row may be stale."""
    model = TinyModel(seed=1, eos_bias=1.0, layers=1)
    prompts = prompts_of(2, 11, 6, 1, seed=4)
    config = config_of(policy, "quota", **rule)
    fresh = {"track": -1} if config.cache == "flash" else {"cache_steps": 1}
    if config.cache in ("prefix", "dual", "vicinity"):
        fresh = {"refresh_interval": 1}
    stale = decode(CachedPrograms(model), FACTS, prompts, config)
    exact = decode(CachedPrograms(model), FACTS, prompts, config.replace(**fresh))
    assert torch.equal(stale.sequences, exact.sequences)
    assert stale.stats.forwards_per_row == exact.stats.forwards_per_row
    assert stale.stats.row_forwards < exact.stats.row_forwards or policy == "flash, wide"


@pytest.mark.parametrize("policy", POLICIES)
def test_together_as_alone_whatever_the_look(model, policy):
    """G4 and G8: the batch, the order, the slots and the distance of looks change neither tokens nor forwards."""
    prompts = prompts_of(*(1 + 5 * i % 13 for i in range(6)), seed=3)
    config = config_of(policy, eos="first" if "flash" in policy else "block")
    together = decode(CachedPrograms(model), FACTS, prompts, config)
    rows = canvases(together, prompts, config)
    for i, prompt in enumerate(prompts):
        alone = decode(CachedPrograms(model), FACTS, [prompt], config.replace(seed=i))
        assert rows[i] == alone.sequences[0].tolist()
        assert together.stats.forwards_per_row[i] == alone.stats.forwards
    for options in ({"check_every": 3}, {"check_every": 8, "slots": 4}, {"slots": 1}, {"slots": 2, "check_every": 2}):
        other = decode(CachedPrograms(model), FACTS, prompts, config.replace(**options))
        assert torch.equal(together.sequences, other.sequences), options
        assert together.stats.forwards_per_row == other.stats.forwards_per_row
        assert together.stats.canvas_tokens == other.stats.canvas_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_committed_tokens_never_change(model, policy):
    """G6 and G7."""
    (prompt,) = prompts_of(6, seed=6)
    config = config_of(policy, "quota")
    programs = CachedPrograms(model)
    output = decode(programs, FACTS, [prompt], config)
    assert output.stats.forwards <= config.max_new_tokens
    seen: dict[int, int] = dict(enumerate(prompt.tolist()))
    for call, ids in zip(programs.calls, programs.ids, strict=True):
        for position, token in zip(call.positions.tolist(), ids.tolist(), strict=True):
            if token != MASK:
                assert seen.setdefault(position, token) == token
    final = output.sequences[0].tolist()
    assert all(final[position] == token for position, token in seen.items())
    assert MASK not in final


@pytest.mark.parametrize("policy", [*POLICIES, "lacache", "lacache, wide"])
def test_a_step_reads_nothing_on_the_host(policy):
    """G8: with the sizes of a look, tensor operations with static shapes alone, on buffers that stay where they are."""
    own = {"cache": "lacache"} | ({"lacache_layers": "wide"} if "wide" in policy else {})
    options = POLICIES.get(policy, own)
    config = DecodingConfig(max_new_tokens=12, block_length=4, infill=True, threshold=0.3, **options)
    programs = ScriptedPrograms(list(range(17)), [0.1 * (i * 7 % 10) for i in range(17)])
    prompts = prompts_of(3, 5, seed=9)
    prompts[0][1] = MASK
    constants = StepConstants.of(config, FACTS, programs.device)
    samples = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts)]
    layout = Layout.of(samples, mask_token_id=MASK, tile_rows=4, guided=False, device=programs.device)
    policy_ = cache_policy(config, programs, layout.rows, MASK)
    policy_.begin(layout)
    state = CanvasState.begin(layout, layout.initial_tokens(MASK))
    addresses = [getattr(state, name).data_ptr() for name in CanvasState.__dataclass_fields__]
    look = Look.at_the_beginning(samples)
    rule = suffix_rule(config)
    if rule is not None:
        choose_rows(rule, layout, state, MASK)
        look = Look(**{**vars(look), "kept": tuple(state.kept.tolist())})
    policy_.look(layout, state, look)
    with _NoHostRead():
        for i in range(5):
            decode_step(policy_, constants, layout, state, refreshing=i == 0)
    assert addresses == [getattr(state, name).data_ptr() for name in CanvasState.__dataclass_fields__]
    assert programs.steps == 5
    assert (state.steps > 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_whole_length_of_the_model(model, policy):
    """G12."""
    prompts = prompts_of(FACTS.max_sequence_length - 12, 4, seed=9)
    assert_equals_cached(CachedPrograms(model), prompts, config_of(policy, max_new_tokens=12))


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_outside_the_keys_may_hold_anything(model, policy, monkeypatch):
    """G5 and section 8, T3: what the cache held before is never read."""
    from dllm_compile.runtime.cache import row_subset

    zeros = row_subset.allocate

    def poisoned(*arguments):
        caches = zeros(*arguments)
        for cache in caches.values():
            cache[:-1].fill_(torch.nan)
        return caches

    prompts = prompts_of(2, 11, 6, seed=4)
    clean = decode(CachedPrograms(model), FACTS, prompts, config_of(policy))
    monkeypatch.setattr(row_subset, "allocate", poisoned)
    dirty = decode(CachedPrograms(model), FACTS, prompts, config_of(policy))
    assert torch.equal(clean.sequences, dirty.sequences)


def test_ends_are_met(model):
    """The runs above do meet stop ids, inside and at the end of blocks."""
    prompts = prompts_of(2, 11, 6, 1, seed=4)
    for rule in ("threshold", "first"):
        output = decode(CachedPrograms(model), FACTS, prompts, config_of("dual", rule))
        assert any(len(answer) < 20 for answer in output.answers)
        assert any(len(answer) % 8 for answer in output.answers)
        assert (output.sequences == EOS).any()


def test_policies_differ(model):
    """Stale rows do change tokens of deep models: otherwise the comparisons above would prove nothing."""
    prompts = prompts_of(2, 11, 6, 1, seed=4)
    tokens = {
        name: tuple(decode(CachedPrograms(model), FACTS, prompts, config_of(name)).sequences.flatten().tolist())
        for name in POLICIES
    }
    plain = tuple(
        decode(DensePrograms(model), FACTS, prompts, config_of("dual", cache="none")).sequences.flatten().tolist()
    )
    same = [pair for pair in itertools.combinations(tokens, 2) if tokens[pair[0]] == tokens[pair[1]]]
    assert plain not in tokens.values()
    assert len(same) <= 3, same
