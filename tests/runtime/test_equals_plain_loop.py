# SPDX-License-Identifier: Apache-2.0
"""Token-for-token equality with the definition: every rule, block length, option, batch and way of tiling."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dllm_compile.config import DecodingConfig

from .tiny import EOS, EOT, FACTS, MASK, DensePrograms, FlatPrograms, TinyModel, assert_equals_plain, prompts_of

RULES = {
    "quota": {},
    "quota 2 a step": {"steps": "half"},
    "threshold": {"threshold": 0.6},
    "factor": {"factor": 1.0},
    "factor released": {"factor": 0.9, "last_rank": "released"},
    "frechet": {"frechet_margin": 0.25},
}
BATCHES = {1: (5,), 2: (3, 9), 3: (7, 1, 4), 4: (2, 11, 6, 6)}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=1, eos_bias=1.0)


def config_of(rule: str, **options) -> DecodingConfig:
    chosen = dict(RULES[rule])
    if chosen.get("steps") == "half":
        length, block = options["max_new_tokens"], options["block_length"]
        blocks = -(-length // block)
        chosen["steps"] = blocks * max(1, min(block, length) // 2)
    return DecodingConfig(**chosen, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [1, 8, 32])
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy(model, rule, block_length, batch):
    """G = 20 is no multiple of 8 nor of 32."""
    config = config_of(rule, max_new_tokens=20, block_length=block_length)
    assert_equals_plain(DensePrograms(model), prompts_of(*BATCHES[batch], seed=batch), config)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampled(model, rule, temperature):
    config = config_of(rule, max_new_tokens=18, block_length=8, temperature=temperature, seed=5)
    assert_equals_plain(DensePrograms(model), prompts_of(4, 8, 3, seed=7), config)


@pytest.mark.parametrize("tile_rows", [None, 1, 4, 64])
@pytest.mark.parametrize("options", [{"threshold": 0.6}, {"temperature": 0.5, "cfg_scale": 0.8}], ids=["rule", "cfg"])
def test_flat_rows_and_tiles(tile_rows, options):
    """The tile table covers each row once and lets it see its own sample only."""
    flat = FlatPrograms(TinyModel(seed=1, dtype=torch.float64, eos_bias=1.0), tile_rows)
    assert_equals_plain(flat, prompts_of(3, 9, 5, seed=2), DecodingConfig(max_new_tokens=12, block_length=8, **options))


@pytest.mark.parametrize("steps", [3, 6, 9, 12, 24, 48, 300])
def test_steps(model, steps):
    """Fewer, as many and more steps than masks; the last block is short and has its own quota."""
    config = DecodingConfig(max_new_tokens=20, block_length=8, steps=steps, eos="none")
    output, _ = assert_equals_plain(DensePrograms(model), prompts_of(3, 6, seed=3), config)
    per_block = steps // 3
    assert output.stats.forwards == sum(min(per_block, n) for n in (8, 8, 4))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guidance(model, rule, temperature):
    config = config_of(rule, max_new_tokens=11, block_length=4, cfg_scale=1.5, temperature=temperature)
    programs = DensePrograms(model)
    output, expected = assert_equals_plain(programs, prompts_of(5, 2, 8, seed=4), config)
    unguided, _ = assert_equals_plain(DensePrograms(model), prompts_of(5, 2, 8, seed=4), config.replace(cfg_scale=0))
    assert not torch.equal(output.sequences, unguided.sequences)
    assert output.stats.forwards == 2 * len(programs.calls) == max(one.forwards for one in expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("steps", [None, 6])
def test_random_remasking(model, temperature, steps):
    config = DecodingConfig(
        max_new_tokens=20, block_length=8, remasking="random", temperature=temperature, steps=steps, seed=11
    )
    output, _ = assert_equals_plain(DensePrograms(model), prompts_of(5, 2, 8, seed=4), config)
    other, _ = assert_equals_plain(DensePrograms(model), prompts_of(5, 2, 8, seed=4), config.replace(seed=12345))
    assert not torch.equal(output.sequences, other.sequences), "another seed, another order"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_infill(model, rule, cfg_scale):
    """Prompt masks form a first block of their own, in some rows and not in others."""
    prompts = prompts_of(6, 9, 5, seed=6)
    prompts[0][[1, 4]] = MASK
    prompts[2][1:] = MASK  # one token is left: on a canvas of masks alone all positions are equal but for rounding
    config = config_of(rule, max_new_tokens=10, block_length=4, infill=True, cfg_scale=cfg_scale)
    output, _ = assert_equals_plain(DensePrograms(model), prompts, config)
    assert not (output.sequences == MASK).any()


def test_infill_block_wider_than_the_others(model):
    prompts = prompts_of(12, 3, seed=6)
    prompts[0][1:12] = MASK
    for steps in (None, 8):
        config = DecodingConfig(max_new_tokens=8, block_length=2, infill=True, steps=steps)
        output, _ = assert_equals_plain(DensePrograms(model), prompts, config)
        assert output.stats.forwards_per_row[0] > output.stats.forwards_per_row[1]


@pytest.mark.parametrize("eos", ["block", "first", "none"])
@pytest.mark.parametrize("rule", ["quota", "threshold", "factor"])
@pytest.mark.parametrize("stops", [None, (EOS, EOT), (EOT,), tuple(range(0, 36, 5))])
def test_ends(eos, rule, stops):
    """The head is biased so that stop ids do occur, at different places in different rows."""
    model = TinyModel(seed=2, eos_bias=3.0)
    config = config_of(rule, max_new_tokens=20, block_length=6, eos=eos, eos_token_id=stops)
    output, expected = assert_equals_plain(DensePrograms(model), prompts_of(2, 11, 6, 4, seed=8), config)
    if eos == "none":
        assert output.stats.canvas_tokens == 4 * 20
    elif stops != (EOT,):
        assert any(len(answer) < 20 for answer in output.answers)
        assert output.stats.canvas_tokens < 4 * 20
        assert max(output.stats.forwards_per_row) <= max(len(one.trace) for one in expected)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("rule", ["quota", "threshold", "frechet"])
@pytest.mark.parametrize("eos", ["block", "first"])
def test_eos_switches(rule, temperature, eos):
    model = TinyModel(seed=2, eos_bias=3.0)
    prompts = prompts_of(2, 11, 6, seed=8)
    config = config_of(rule, max_new_tokens=16, block_length=8, temperature=temperature, eos=eos)
    plain_run, _ = assert_equals_plain(DensePrograms(model), prompts, config)
    never, _ = assert_equals_plain(DensePrograms(model), prompts, config.replace(logits_eos_inf=True))
    last, _ = assert_equals_plain(
        DensePrograms(model), prompts, config.replace(confidence_eos_eot_inf=True, eos_token_id=(EOS, EOT))
    )
    assert (plain_run.sequences == EOS).any()
    assert not (never.sequences == EOS).any()
    assert (last.sequences == EOS).any(), "its arg-max is kept, only its turn comes last"
    assert not torch.equal(last.sequences, plain_run.sequences)


def test_only_the_models_eos_is_banned():
    """`logits_eos_inf` is about the model's own id; other stop ids may still be proposed, also where it is none."""
    model = TinyModel(seed=2, eos_bias=3.0)
    model.bias[EOT] = 6.0
    config = DecodingConfig(max_new_tokens=16, block_length=8, logits_eos_inf=True, eos_token_id=(EOT,), eos="none")
    output, _ = assert_equals_plain(DensePrograms(model), prompts_of(2, 6, seed=8), config)
    assert (output.sequences == EOT).any()
    assert not (output.sequences == EOS).any()


def test_stop_ids_committed_last():
    """With the switch, no other candidate of a block is left when a stop id is committed."""
    model = TinyModel(seed=2, eos_bias=6.0)
    programs = DensePrograms(model)
    config = DecodingConfig(max_new_tokens=16, block_length=8, confidence_eos_eot_inf=True, eos="none")
    assert_equals_plain(programs, prompts_of(6, seed=8), config)
    seen = 0
    for before, after in zip(programs.ids, programs.ids[1:], strict=False):
        (place,) = torch.nonzero(before != after).flatten().tolist()
        if after[place] == EOS:
            block = slice(6 + (place - 6) // 8 * 8, 14 + (place - 6) // 8 * 8)
            tokens, _ = DensePrograms(model).step(_at(programs, before, torch.arange(block.start, block.stop)))
            assert (tokens[before[block] == MASK] == EOS).all()
            seen += 1
    assert seen > 0


def _at(programs, ids, wanted):
    return dataclasses.replace(programs.calls[0], ids=ids, wanted=wanted)


def test_whole_length_of_the_model(model):
    """G12: prompt + G = max_sequence_length works (one more raises, see test_prompts)."""
    length = FACTS.max_sequence_length
    config = DecodingConfig(max_new_tokens=8, block_length=8, threshold=0.5)
    assert_equals_plain(DensePrograms(model), prompts_of(length - 8, 4, seed=9), config)
