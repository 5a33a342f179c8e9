# SPDX-License-Identifier: Apache-2.0
"""A queue of prompts over slots: order, results, cache rows."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.errors import DllmCompileError
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Sample
from dllm_compile.runtime.slots import Slots

from .policies import POLICIES
from .tiny import FACTS, MASK, CachedPrograms, DensePrograms, ScriptedPrograms, TinyModel, prompts_of


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=2, eos_bias=3.0, layers=3)


def samples_of(*lengths: int, new_tokens: int = 4) -> list[Sample]:
    config = DecodingConfig(max_new_tokens=new_tokens)
    return [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts_of(*lengths))]


def test_rows_of_slots():
    samples = samples_of(3, 9, 5)
    whole = Slots.of(samples, None)
    assert whole.rows == 7 + 13 + 9
    assert [whole.base(sample) for sample in samples] == [0, 7, 20]
    few = Slots.of(samples, 2)
    assert few.rows == 2 * 13
    assert [few.base(samples[0]), few.base(samples[1]), few.free] == [0, 13, 0]
    few.release(samples[0])
    assert few.base(samples[2]) == 0
    assert few.base(samples[1]) == 13
    assert Slots.of(samples, 7).rows == whole.rows


@pytest.mark.parametrize("cache", ["none", "prefix", "flash"])
def test_as_many_forwards_as_the_slots_need(model, cache):
    """Finished samples make room at once; no more than `slots` samples are computed together."""
    prompts = prompts_of(*(1 + 5 * i % 13 for i in range(9)), seed=3)
    config = DecodingConfig(max_new_tokens=18, block_length=6, threshold=0.5, cache=cache, slots=3)
    programs = DensePrograms(model) if cache == "none" else CachedPrograms(model)
    output = decode(programs, FACTS, prompts, config)
    everything = decode(type(programs)(model), FACTS, prompts, config.replace(slots=None))
    assert torch.equal(output.sequences, everything.sequences)
    busy = sum(output.stats.forwards_per_row)
    assert busy / 3 <= output.stats.forwards <= busy / 3 + max(output.stats.forwards_per_row)
    width = 16 if cache == "flash" else 6
    assert max(len(call.wanted) for call in programs.calls) == 3 * width
    assert output.stats.row_forwards == everything.stats.row_forwards


def test_cache_memory_is_that_of_the_slots(model):
    programs = CachedPrograms(model)
    prompts = prompts_of(*range(1, 12), seed=3)
    decode(programs, FACTS, prompts, DecodingConfig(max_new_tokens=6, cache="dual", threshold=0.5, slots=2))
    sizes = {cache.caches["k_cache_0"].shape[0] for cache in programs.cache_calls}
    assert sizes == {2 * (11 + 6) + 1}
    addresses = {cache.caches["k_cache_0"].data_ptr() for cache in programs.cache_calls}
    assert len(addresses) == 1


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "dual", "flash"])
def test_two_hundred_prompts_through_eight_slots(model, cache):
    """The same tokens as each alone."""
    prompts = prompts_of(*(1 + 7 * i % 29 for i in range(200)), seed=3)
    config = DecodingConfig(max_new_tokens=16, block_length=8, threshold=0.6, cache=cache, slots=8, check_every=2)
    output = decode(CachedPrograms(model), FACTS, prompts, config)
    for i, prompt in enumerate(prompts):
        alone = decode(CachedPrograms(model), FACTS, [prompt], config.replace(seed=i)).sequences[0]
        assert torch.equal(output.sequences[i, 29 - len(prompt) :], alone)


def test_a_stall_of_one_sample_is_seen_while_others_advance():
    """The first prompt's positions are proposed as masks, those behind them are not."""
    programs = ScriptedPrograms([MASK] * 8 + [3] * 12, [0.5] * 20)
    prompts = [torch.tensor([1, 2]), torch.arange(10)]
    for options in ({}, POLICIES["dual"], {"check_every": 4}):
        with pytest.raises(DllmCompileError, match="does not advance"):
            decode(programs, FACTS, prompts, DecodingConfig(max_new_tokens=6, block_length=6, **options))


def test_progress_counts_what_waits_too(model, capsys):
    config = DecodingConfig(max_new_tokens=12, block_length=6, threshold=0.5, slots=2, cache="dual")
    decode(CachedPrograms(model), FACTS, prompts_of(3, 5, 2, 7), config, progress=True)
    assert "48/48" in capsys.readouterr().err
