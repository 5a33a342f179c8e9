# SPDX-License-Identifier: Apache-2.0
"""Logits of the policies: exact where no row can be stale, of the candidates alone, and never kept."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.engine import decode
from tests.conftest import tiny_model

from .policies import POLICIES
from .tiny import FACTS, MASK, CachedPrograms, TinyModel, prompts_of

VERIFY = {"cache": "flash", "commit": "flash_verify", "window_length": 6, "lookahead": 4, "track": 6, "gamma": 0.1}
EVERY = POLICIES | {"none": {}, "verify": VERIFY}
LACACHE = {"lacache": {"cache": "lacache"}, "lacache, wide": {"cache": "lacache", "lacache_layers": (0, 1)}}


def config_of(policy: str, **options) -> DecodingConfig:
    every = EVERY | LACACHE
    return DecodingConfig(**{"max_new_tokens": 20, "block_length": 8, "eos": "none", **every[policy], **options})


class Recording(CachedPrograms):
    """Keeps the logits of each forward's candidates, by canvas position; a wanted row that is no mask is none."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(model)
        self.found: list[dict[int, torch.Tensor]] = []

    def all_logits(self, inputs):
        logits = super().all_logits(inputs)
        masks = inputs.wanted[inputs.ids[inputs.wanted] == MASK]
        self.found.append(dict(zip(inputs.positions[masks].tolist(), logits[masks], strict=True)))
        return logits


@pytest.mark.parametrize("policy", [name for name in POLICIES if "cache" in POLICIES[name]])
def test_logits_of_one_layer_are_exact(policy):
    """G2: within rounding those of the whole canvas, in every step and at every candidate, and so are confidences."""
    model = TinyModel(seed=1, layers=1)
    config = config_of(policy)
    fresh = {"track": -1} if config.cache == "flash" else {"cache_steps": 1}
    if config.cache in ("prefix", "dual", "vicinity"):
        fresh = {"refresh_interval": 1}
    for prompt in prompts_of(1, 9, 14, seed=4):
        stale, exact = Recording(model), Recording(model)
        tokens = [
            decode(one, FACTS, [prompt], how).sequences
            for one, how in ((stale, config), (exact, config.replace(**fresh)))
        ]
        assert torch.equal(*tokens)
        assert len(stale.found) == len(exact.found) == 20
        for one, other in zip(stale.found, exact.found, strict=True):
            assert one.keys() == other.keys()
            for position, logits in one.items():
                error = (logits - other[position]).abs().max()
                assert error <= 1e-5 * other[position].abs().max()


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_those_of_the_candidates(policy):
    """G3: as many rows reach the head as a block or a window has, whatever is computed besides."""
    config, programs = config_of(policy), CachedPrograms(TinyModel(seed=1, layers=3))
    decode(programs, FACTS, prompts_of(9, 4, 1, seed=4), config)
    width = config.block_length if config.has_blocks else min(config.window_length, config.max_new_tokens)
    assert len(programs.calls) >= 20
    for call in programs.calls:
        assert len(call.wanted) == 3 * width


class Sizes(TorchDispatchMode):
    """Bytes of what every operator makes, by how many there are; results that are an argument's memory left out."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage() for t in _tensors(out)]
        self.made += [one.nbytes() for one in storages if one.data_ptr() not in known]
        return out


def _tensors(tree) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


@functools.cache
def with_words(words: int, mask: int | None = None) -> dllm_compile.OptimizedModel:
    """The tiny model with another vocabulary."""
    own = {} if mask is None else {"mask_token_id": mask}
    return dllm_compile.optimize(tiny_model(vocab_size=words, **own), compile=False)


@pytest.mark.parametrize("policy", ["none", "prefix, dpad", "flash", "verify", "lacache"])
def test_nothing_grows_with_the_vocabulary(policy):
    """The largest tensor of a call is as large with three times the words: at most a chunk of them exists at once."""
    prompts, largest = prompts_of(4, 12, 7, seed=5), []
    for words in (10_000, 30_000):
        fast = with_words(words)
        # One token a step, and so the same rows.
        config = config_of(policy, threshold=1.1, max_new_tokens=8, block_length=4)
        fast.generate(prompts, config)  # programs are built
        with Sizes() as sizes:
            output = fast.generate(prompts, config)
        assert output.stats.forwards >= 8
        largest.append(max(sizes.made))
    rows = len(prompts) * (4 if config.has_blocks else config.window_length)
    assert largest[0] == largest[1] <= rows * 8192 * 4


@pytest.mark.parametrize("policy", ["dual", "verify", "lacache, wide"])
def test_what_is_kept_between_steps_does_not_know_the_vocabulary(policy):
    """Canvas, caches, scores and state of a session, byte for byte."""
    from dllm_compile.runtime.layout import Sample
    from dllm_compile.runtime.session import Session

    held = []
    for words in (128, 10_000):
        fast = with_words(words, mask=127)
        config = config_of(policy, commit=None) if policy != "verify" else config_of(policy)
        mask = fast.facts.mask_token_id
        samples = [Sample.plan(i, prompt, config, mask) for i, prompt in enumerate(prompts_of(4, 12, seed=5))]
        session = Session(fast.programs, fast.facts, config, sum(sample.length for sample in samples))
        bases = [0, samples[0].length]
        session.prepare(session.start(samples, bases, config))
        for i in range(3):
            session.step(refreshing=i == 0)
        held.append(sorted(tensor.nbytes for tensor in _reachable(session)))
    assert held[0] == held[1]
    assert sum(held[0]) > 0


def _reachable(session) -> list[torch.Tensor]:
    """Every tensor that the session's canvas, layout, constants and cache policy hold."""
    found: dict[int, torch.Tensor] = {}

    def visit(value) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            for one in value.values():
                visit(one)
        elif isinstance(value, list | tuple):
            for one in value:
                visit(one)

    policy = {name: value for name, value in vars(session.cache).items() if name != "_programs"}
    for owner in (vars(session.state), vars(session.layout), vars(session.constants), policy, session._table):
        visit(owner)
    return list(found.values())
