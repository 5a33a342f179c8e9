# SPDX-License-Identifier: Apache-2.0
"""LaCache through the real programs: exact with layer 0, by its definition with more, and its state filled in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError
from dllm_compile.runtime.cache.lacache import cached_layers
from tests.conftest import tiny_model
from tests.reference.llada_rows import LladaRows
from tests.reference.plain_loop import plain_decode

from .tiny import cached, options_of, prompts_of

BATCHES = {"one": (5,), "four": (2, 11, 6, 6)}
WIDE = (0, 2)


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=3, n_layers=3)


@pytest.fixture(scope="module")
def fast(model) -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(model, compile=False)


def config_of(**options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 20, "block_length": 8, "threshold": 0.2, "cache": "lacache", **options})


def assert_same(a, b) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert a.stats.forwards_per_row == b.stats.forwards_per_row


# --- layer 0: exact --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [{"threshold": None}, {"threshold": 0.2}], ids=["quota", "threshold"])
@pytest.mark.parametrize("block_length", [1, 8, 32, 48])
@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_of_the_uncached_loop(fast, model, rule, block_length, batch):
    """T1: against the plain loop over the unmodified model."""
    prompts = prompts_of(*BATCHES[batch], seed=block_length)
    new_tokens = 50 if block_length == 48 else 20
    config = config_of(block_length=block_length, max_new_tokens=new_tokens, **rule)
    output = fast.generate(prompts, config)
    width = max(map(len, prompts))
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            options = options_of(config, fast.facts)
            expected = plain_decode(lambda ids: model(ids).logits, prompt.tolist(), options, i)
            assert output.sequences[i, width - len(prompt) :].tolist() == expected.canvas
            assert output.stats.forwards_per_row[i] == expected.forwards


STOPS = tuple(range(0, 126, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.15, "temperature": 0.8, "seed": 4},
        {"threshold": None, "factor": 1.0},
        {"cfg_scale": 0.7},
        {"threshold": None, "remasking": "random"},
        {"eos": "first", "eos_token_id": STOPS, "threshold": 0.15},
        {"eos": "rightmost", "eos_token_id": STOPS},
        {"eos": "block", "eos_token_id": STOPS},
        {"infill": True},
        {"infill": True, "cfg_scale": 0.7},
    ],
    ids=str,
)
def test_options(fast, options):
    """Exact whatever else is chosen, however far the looks lie apart, and through few slots."""
    prompts = prompts_of(3, 12, 6, 1, seed=2)
    if "infill" in options:
        prompts[1][[1, 2, 7]] = mask = fast.facts.mask_token_id
        prompts[2][0] = mask
    config = config_of(**options)
    plain = fast.generate(prompts, config, cache="none")
    for more in ({}, {"check_every": 4}, {"slots": 2, "check_every": 2}):
        assert_same(fast.generate(prompts, config, **more), plain)


def test_an_end_inside_a_block_is_met(fast):
    """Otherwise the runs above would not fill the state anew inside a block."""
    output = fast.generate(prompts_of(3, 12, 6, 1, seed=2), config_of(eos="first", eos_token_id=STOPS, threshold=0.2))
    assert any(0 < len(answer) < 20 and len(answer) % 8 for answer in output.answers)


# --- the state -------------------------------------------------------------------------------------------------------


class Watched:
    """Stands in for the programs: poisons what a filling must write, and checks what a step may write."""

    def __init__(self, programs, *, poison: bool = False) -> None:
        self._programs, self.poison = programs, poison
        self.kinds: list[str] = []

    def __getattr__(self, name):
        return getattr(self._programs, name)

    def lacache_step(self, inputs, cache):
        fill = cache.block_rows is None
        self.kinds.append("first" if fill else "step")
        if fill and self.poison:
            for buffer in cache.state.values():
                buffer.fill_(torch.nan)
        before = {name: buffer.clone() for name, buffer in cache.state.items()}
        result = self._programs.lacache_step(inputs, cache)
        if not fill:
            others = torch.ones(len(inputs.ids), dtype=torch.bool)
            others[cache.block_rows] = False
            for name, buffer in cache.state.items():
                untouched = slice(None) if name.split("_")[0] in ("m", "den", "num") else others
                torch.testing.assert_close(buffer[untouched], before[name][untouched], rtol=0, atol=0, equal_nan=True)
        return result


@pytest.fixture
def watched(fast) -> Iterator[Watched]:
    real = fast.programs
    fast.programs = Watched(real)
    yield fast.programs
    fast.programs = real


@pytest.mark.parametrize("layers", ["first", WIDE])
@pytest.mark.parametrize("options", [{}, {"eos": "first", "eos_token_id": STOPS}, {"cfg_scale": 0.5}], ids=str)
def test_state_is_filled_before_it_is_used(fast, watched, layers, options):
    """T9: what the state held before a filling is never read, and a step changes rows of its block only."""
    prompts = prompts_of(3, 12, 6, seed=2)
    config = config_of(lacache_layers=layers, **options)
    clean = fast.generate(prompts, config)
    watched.poison = True
    assert_same(fast.generate(prompts, config), clean)
    assert {"first", "step"} <= set(watched.kinds)


@pytest.mark.parametrize("layers", ["first", WIDE])
@pytest.mark.parametrize("interval", [None, 1, 3])
def test_when_it_is_filled(fast, watched, layers, interval):
    """At block starts and at the interval: one sample, one token a step."""
    config = config_of(threshold=None, lacache_layers=layers, lacache_interval=interval, eos="none")
    fast.generate(prompts_of(5, seed=1), config)
    expected = [i % (interval or 99) == 0 for block in (8, 8, 4) for i in range(block)]
    assert [kind == "first" for kind in watched.kinds] == expected


def test_state_bytes(fast):
    """The formula of the shape, for what is decoded at the same time."""
    from dllm_compile.runtime.cache import cache_policy
    from dllm_compile.runtime.layout import Layout, Sample

    for layers, guided in (("first", False), (WIDE, False), (WIDE, True)):
        config = config_of(lacache_layers=layers, cfg_scale=0.5 if guided else 0.0)
        samples = [Sample.plan(i, prompt, config, 127) for i, prompt in enumerate(prompts_of(3, 9))]
        layout = Layout.of(samples, mask_token_id=127, tile_rows=None, guided=guided, device=fast.device)
        policy = cache_policy(config, fast.programs, layout.rows, 127)
        policy.begin(layout)
        per_row = fast.programs.shape.lacache_bytes_per_row(len(policy._layers))
        assert policy.state_bytes == per_row * (3 + 9 + 40) * (2 if guided else 1)


# --- more layers: a policy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [{}, {"threshold": None}, {"cfg_scale": 0.5}, {"temperature": 0.5}], ids=str)
@pytest.mark.parametrize("layers", [(0,), (0, 2), (1,), (0, 1, 2)])
def test_interval_of_one_is_exact(fast, layers, rule):
    """T4, with any layers."""
    prompts = prompts_of(3, 12, 6, seed=2)
    config = config_of(lacache_layers=layers, lacache_interval=1, **rule)
    assert_same(fast.generate(prompts, config), fast.generate(prompts, config, cache="none", **RESET))


RESET = {"lacache_layers": "first", "lacache_interval": None}


@pytest.mark.parametrize("suffix", [{}, {"suffix": "dpad", "suffix_window": 9}], ids=["all", "dpad"])
@pytest.mark.parametrize(
    "rule", [{}, {"threshold": None}, {"cfg_scale": 0.5}, {"eos": "first", "eos_token_id": STOPS}], ids=str
)
@pytest.mark.parametrize(("layers", "interval"), [(WIDE, None), (WIDE, 3), ((0, 1, 2), 2), ((1,), None)])
def test_wide_set_equals_the_reference(fast, model, layers, interval, rule, suffix):
    """Section 9.3, token for token, each sample by itself."""
    prompts = prompts_of(3, 12, 6, 1, seed=2)
    config = config_of(lacache_layers=layers, lacache_interval=interval, **rule, **suffix)
    expected = cached(LladaRows(model), prompts, config, fast.facts)
    output = fast.generate(prompts, config)
    for row, prompt, one in zip(output.sequences, prompts, expected, strict=True):
        assert row[12 - len(prompt) :].tolist() == one.canvas
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)


@pytest.mark.parametrize(
    "options", [{}, {"lacache_interval": 3}, {"cfg_scale": 0.5}, {"suffix": "window", "suffix_window": 5}], ids=str
)
def test_wide_set_together_as_alone_whatever_the_look(fast, options):
    """G4 and G8: samples that are filled at different times do not touch each other."""
    prompts = prompts_of(3, 12, 6, 1, 9, seed=2)
    config = config_of(lacache_layers=WIDE, **options)
    together = fast.generate(prompts, config)
    assert len(set(together.stats.forwards_per_row)) > 1
    for more in ({"check_every": 3}, {"slots": 2}, {"slots": 3, "check_every": 2}):
        assert_same(fast.generate(prompts, config, **more), together)
    for i, prompt in enumerate(prompts):
        alone = fast.generate(prompt, config, seed=i)
        assert together.sequences[i, 12 - len(prompt) :].tolist() == alone.sequences[0].tolist()


def test_wide_set_is_approximate(fast):
    prompts = prompts_of(3, 12, 6, 1, seed=2)
    wide = fast.generate(prompts, config_of(lacache_layers="wide"))
    assert not torch.equal(wide.sequences, fast.generate(prompts, config_of(cache="none")).sequences)


def test_layers():
    """The paper's wide set is layers 0 and 3-17 of 32; numbers must exist."""
    assert cached_layers(config_of(lacache_layers="wide"), 32) == (0, *range(3, 18))
    assert cached_layers(config_of(), 32) == (0,)
    assert cached_layers(config_of(lacache_layers=(4, 2, 4)), 5) == (2, 4)
    with pytest.raises(ConfigError, match="layer 5"):
        cached_layers(config_of(lacache_layers=(0, 5)), 5)
