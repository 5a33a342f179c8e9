# SPDX-License-Identifier: Apache-2.0
"""Suffix policies: DPad's tests (section 12) and the sliding window, with every cache they go together with."""

from __future__ import annotations

import math

import pytest
import torch

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.suffix import choose_rows, suffix_rule
from dllm_compile.runtime.suffix.dpad import GaussianDecay
from tests.conftest import tiny_model

from .tiny import FACTS, MASK, CachedPrograms, DensePrograms, TinyModel, cached, canvases, prompts_of

CACHES = [
    {},
    {"cache": "prefix"},
    {"cache": "dual"},
    {"cache": "vicinity", "after_look": 6},
    {"cache": "dkv", "cache_steps": 3},
]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=1, eos_bias=1.0, layers=3)


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(tiny_model(seed=3), compile=False)


def config_of(**options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 26, "block_length": 8, "threshold": 0.6, **options})


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("suffix", [{"suffix": "dpad", "scale": 1e6, "k_sigma": 0.0}, {"suffix": "window"}], ids=str)
def test_keeping_everything_changes_nothing(model, cache, suffix):
    """T1, exactly."""
    prompts = prompts_of(2, 11, 6, seed=4)
    whole = decode(CachedPrograms(model), FACTS, prompts, config_of(**cache))
    kept = decode(CachedPrograms(model), FACTS, prompts, config_of(**cache, **suffix, suffix_window=26))
    assert torch.equal(whole.sequences, kept.sequences)
    assert whole.stats.row_forwards == kept.stats.row_forwards


@pytest.mark.parametrize("suffix", ["dpad", "window"])
def test_kept_rows_stand_for_a_block(model, suffix):
    """T2 and T3: constant in a block, drawn anew in the next; rows keep their canvas positions."""
    config = config_of(suffix=suffix, suffix_window=12, eos="none", commit="quota", threshold=None)
    (prompt,) = prompts_of(5, seed=1)
    programs = CachedPrograms(model)
    decode(programs, FACTS, [prompt], config)
    kept = [call.positions.tolist() for call in programs.calls]
    blocks = [kept[0:8], kept[8:16], kept[16:24], kept[24:]]
    for number, block in enumerate(blocks):
        end = min(5 + 8 * (number + 1), 31)
        assert all(one == block[0] for one in block)
        assert block[0][:end] == list(range(end)), "nothing in front of the block's end is dropped"
        behind = [position - end for position in block[0][end:]]
        assert all(0 <= distance < 12 for distance in behind)
        if suffix == "window":
            assert behind == list(range(min(12, 31 - end)))
    assert [one[0] for one in blocks] == cached(model, [prompt], config)[0].seen[::8]
    draws = [set(one[0][-7:]) for one in blocks[:3]]
    assert suffix == "window" or len(set(map(frozenset, draws))) == 3


def kept_in(layout_prompts, config, block=0):
    samples = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(layout_prompts)]
    device = torch.device("cpu")
    layout = Layout.of(samples, mask_token_id=MASK, tile_rows=None, guided=False, device=device)
    state = CanvasState.begin(layout, layout.initial_tokens(MASK))
    state.block.fill_(block)
    choose_rows(suffix_rule(config), layout, state, MASK)
    return layout, state


@pytest.mark.parametrize(
    ("k_sigma", "scale", "window"),
    [(4.0, 2.0, 256), (3.0, 2.3, 512), (3.0, 1.6, 128), (3.0, 2.3, 128), (3.0, 1.6, 256), (3.0, 1.6, 512)],
)
def test_frequencies(k_sigma, scale, window):
    """T4: 10,000 draws against P(keep t), position by position and in all; the published presets' expected counts."""
    expected = {(4.0, 2.0, 256): 64, (3.0, 2.3, 512): 196, (3.0, 1.6, 128): 34, (3.0, 2.3, 128): 49}
    expected |= {(3.0, 1.6, 256): 68, (3.0, 1.6, 512): 136}
    rule = GaussianDecay(k_sigma, scale, window, 0)
    p = rule.probability(torch.arange(window + 20))
    exact = [
        min(1, scale * math.exp(-((k_sigma * t / (window - 1)) ** 2) / 2) / math.sqrt(2 * math.pi))
        for t in range(window)
    ]
    torch.testing.assert_close(p[:window].double(), torch.tensor(exact, dtype=torch.float64), atol=1e-6, rtol=0)
    assert (p[window:] == 0).all()
    assert round(float(p.sum())) == expected[(k_sigma, scale, window)]
    length = window + 20
    config = DecodingConfig(
        max_new_tokens=2 * length,
        block_length=length,
        suffix="dpad",
        k_sigma=k_sigma,
        scale=scale,
        suffix_window=window,
    )
    total = torch.zeros(window + 20)
    for first in range(0, 10_000, 1000):
        _, state = kept_in([torch.tensor([1])] * 1000, config.replace(seed=first))
        total += state.keep.view(1000, -1)[:, 1 + length :].sum(0)
    error = (total - 10_000 * p).abs()
    deviation = (10_000 * p * (1 - p)).sqrt()
    assert (error <= 5 * deviation + 1e-9).all()
    assert (error.sum() / deviation.sum()) < 1.0


def test_draws_are_independent_between_samples_blocks_and_positions():
    config = DecodingConfig(
        max_new_tokens=128, block_length=8, suffix="dpad", k_sigma=0.0, scale=1.25, suffix_window=256
    )
    draws = [
        kept_in([torch.tensor([1])] * 400, config, block)[1].keep.view(400, -1)[:, 41:].float() for block in (0, 3)
    ]
    for other in (draws[1], draws[0].roll(1, 0), draws[0].roll(1, 1)):
        both = torch.stack((draws[0].flatten(), other.flatten()))
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03


def test_ranks_and_counts():
    prompts = prompts_of(3, 9, 1, seed=2)
    layout, state = kept_in(prompts, config_of(suffix="dpad", suffix_window=12))
    for i, sample in enumerate(layout.samples):
        keep = state.keep[layout.offsets[i] : layout.offsets[i] + sample.length]
        assert int(state.kept[i]) == int(keep.sum()) < sample.length
        rank = state.rank[layout.offsets[i] : layout.offsets[i] + sample.length]
        assert rank[keep].tolist() == list(range(int(keep.sum())))


def test_seed(model):
    """Same seed, same tokens; another seed, other masks."""
    prompts = prompts_of(3, 9, seed=2)
    config = config_of(suffix="dpad", suffix_window=12, seed=3, eos="none")
    first, again, other = (
        decode(CachedPrograms(model), FACTS, prompts, one) for one in (config, config, config.replace(seed=40))
    )
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, other.sequences)


def test_nothing_kept_is_legal(model):
    """A window of one and a tiny scale: only the block and what is in front of it."""
    config = config_of(suffix="dpad", suffix_window=1, scale=1e-9, eos="none")
    (prompt,) = prompts_of(4, seed=2)
    programs = CachedPrograms(model)
    decode(programs, FACTS, [prompt], config)
    assert {len(call.positions) for call in programs.calls} == {12, 20, 28, 30}


def test_known_tokens_behind_holes_are_kept(model):
    prompt = prompts_of(12, seed=6)[0]
    prompt[[1, 3]] = MASK
    _, state = kept_in([prompt], config_of(suffix="dpad", suffix_window=1, scale=1e-9, infill=True))
    assert state.keep.tolist() == [True] * 12 + [False] * 26


def test_early_termination():
    """T6: an end inside a finished block ends the answer, whatever was dropped behind it."""
    model = TinyModel(seed=2, eos_bias=4.0, layers=3)
    prompts = prompts_of(2, 11, 6, seed=8)
    config = config_of(suffix="dpad", suffix_window=6)
    output = decode(CachedPrograms(model), FACTS, prompts, config)
    assert output.stats.canvas_tokens < 3 * 26
    assert not (output.sequences == MASK).any()
    assert canvases(output, prompts, config) == [one.canvas for one in cached(model, prompts, config)]


@pytest.mark.parametrize(
    "suffix", [{"suffix": "dpad", "suffix_window": 12}, {"suffix": "window", "suffix_window": 5}], ids=str
)
@pytest.mark.parametrize(
    "rule", [{"threshold": 0.5}, {"threshold": 0.4, "temperature": 0.6}, {"cfg_scale": 0.5}], ids=str
)
def test_lacache_on_the_pruned_canvas_is_exact(fast, suffix, rule):
    """Section 9.7: LaCache's state covers the kept rows, and is filled anew at every block."""
    prompts = prompts_of(5, 11, 2, seed=1)
    config = DecodingConfig(max_new_tokens=20, block_length=8, **suffix, **rule)
    plain = fast.generate(prompts, config)
    for options in ({}, {"check_every": 3, "slots": 2}):
        lacache = fast.generate(prompts, config, cache="lacache", **options)
        assert torch.equal(plain.sequences, lacache.sequences)
        assert plain.stats.forwards_per_row == lacache.stats.forwards_per_row
        assert options or plain.stats.row_forwards == lacache.stats.row_forwards


def test_plain_window_equals_a_shorter_canvas():
    """With a window, what is decoded first cannot know of masks that were dropped: a shorter canvas gives the same."""
    model = TinyModel(seed=1, layers=3)
    (prompt,) = prompts_of(5, seed=1)
    windowed = decode(CachedPrograms(model), FACTS, [prompt], config_of(suffix="window", suffix_window=4, eos="none"))
    shorter = decode(DensePrograms(model), FACTS, [prompt], config_of(max_new_tokens=12, eos="none"))
    assert windowed.sequences[0, 5:13].tolist() == shorter.sequences[0, 5:13].tolist()
