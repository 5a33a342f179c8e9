# SPDX-License-Identifier: Apache-2.0
"""Compiled bookkeeping on a card: the state of the uncompiled one, bit for bit, captured, and far fewer launches."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile.runtime import stages
from dllm_compile.runtime.capacity import Capacity
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Sample
from dllm_compile.runtime.session import Session, SessionPool
from dllm_compile.runtime.slots import Slots
from tests.conftest import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES: dict[str, dict] = {
    "none": {},
    "none, cfg": {"cfg_scale": 0.5},
    "none, sampled": {"temperature": 0.8},
    "none, quota": {"threshold": None},
    "none, random": {"threshold": None, "remasking": "random"},
    "none, factor": {"threshold": None, "factor": 1.0},
    "none, frechet": {"threshold": None, "frechet_margin": 0.1},
    "none, dpad": {"suffix": "dpad"},
    "prefix": {"cache": "prefix"},
    "dual, every 3": {"cache": "dual", "refresh_interval": 3},
    "vicinity": {"cache": "vicinity", "prefix_look": 4, "after_look": 4},
    "dkv": {"cache": "dkv"},
    "flash": {"cache": "flash", "eos": "none"},
    "flash, cfg": {"cache": "flash", "cfg_scale": 0.5},
    "flash, all rows": {"cache": "flash", "track": -1},
    "flash, verify": {"cache": "flash", "commit": "flash_verify", "gamma": 0.02},
}


class Scripted:
    """A forward that is a function of positions and rows alone, equal however it is launched."""

    def __init__(self, programs, vocabulary: int = 100) -> None:
        self.device, self.tile_rows, self.shape = programs.device, programs.tile_rows, programs.shape
        self._vocabulary = vocabulary
        self._scores = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)).to(self.device)

    def step(self, inputs):
        at = inputs.positions[inputs.wanted]
        return at * 7919 % self._vocabulary + 3, ((at * 31 + inputs.ids.sum()) % 97).float() / 97

    def cached_step(self, inputs, cache):
        if cache.scores is not None:
            cache.scores.add_(self._scores[: len(cache.scores)])
        return self.step(inputs)

    def verify_step(self, inputs, verify):
        token, confidence = self.step(inputs)
        return token, confidence, 1 - confidence * 0.5


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    sizes = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "max_sequence_length": 512}
    return dllm_compile.optimize(tiny_model(**sizes).cuda())


def prompts_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 100, (length,), generator=generator) for length in lengths]


def config_of(case: str, **options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 96, "block_length": 32, "threshold": 0.25, **CASES[case], **options})


def states(fast, prompts, config, run) -> list[list[torch.Tensor]]:
    """All buffers after each step. The first session of a size runs uncaptured, then captures, then replays."""
    mask_id = fast.facts.mask_token_id
    samples = [Sample.plan(i, prompt, config, mask_id) for i, prompt in enumerate(prompts)]
    slots = Slots.of(samples, None)
    capacity = Capacity.of(samples, len(samples), slots.rows, config)
    session = Session(Scripted(fast.programs), fast.facts, config, slots.rows, capacity, run=run)
    look = session.start(samples, [slots.base(sample) for sample in samples], config)
    found = []
    for _ in range(200):
        look = session.prepare(look)
        for i in range(2):
            session.step(refreshing=i == 0)
            # The spare place behind the tokens holds whatever was written last.
            held = [t[:-1] if name == "CanvasState.tokens" else t for name, t in session._held.items()]
            found.append([tensor.clone() for tensor in held])
        done, look = session.look()
        if all(done):
            return found
    raise AssertionError("not done")


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_buffer_is_the_same_after_every_step(fast, case):
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i, lengths in enumerate(((9, 20), (40, 3, 11), (33,), (200, 150, 7, 90))):
            prompts, config = prompts_of(*lengths, seed=i), config_of(case, max_new_tokens=(96, 128)[i % 2])
            plain = states(fast, prompts, config, stages.run_plainly)
            compiled = states(fast, prompts, config, stages.run_compiled)
            assert len(plain) == len(compiled)
            for step, (one, other) in enumerate(zip(plain, compiled, strict=True)):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), (i, step)


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_through_slots(fast, case):
    """With the model, samples joining and leaving, two calls of captured steps."""
    plain, fused = SessionPool(), SessionPool(run=stages.run_compiled)
    prompts, config = prompts_of(*(1 + 7 * i % 29 for i in range(20)), seed=1), config_of(case, slots=4)
    for _ in range(2):
        one, other = (decode(fast.programs, fast.facts, prompts, config, sessions=pool) for pool in (plain, fused))
        assert torch.equal(one.sequences, other.sequences)
        assert one.stats.forwards_per_row == other.stats.forwards_per_row
        assert one.stats.row_forwards == other.stats.row_forwards


@pytest.mark.parametrize(("case", "most"), [("dual, every 3", 30), ("flash", 60), ("flash, verify", 95)])
@torch.no_grad()
def test_launches_around_the_forwards(fast, case, most):
    """Counted by the profiler, launches inside sorts with them; uncompiled there are four times as many."""
    prompts, config = prompts_of(200, 150, 90, 60), config_of(case)
    counts = []
    for run in (stages.run_plainly, stages.run_compiled):
        samples = [Sample.plan(i, prompt, config, fast.facts.mask_token_id) for i, prompt in enumerate(prompts)]
        slots = Slots.of(samples, None)
        capacity = Capacity.of(samples, len(samples), slots.rows, config)
        session = Session(Scripted(fast.programs), fast.facts, config, slots.rows, capacity, run=run)
        session.prepare(session.start(samples, [slots.base(sample) for sample in samples], config))
        session.step(refreshing=True)
        session.prepare(session.look()[1])
        launched = []

        def counting(stage, *arguments, run=run, launched=launched):
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                result = run(stage, *arguments)
                torch.cuda.synchronize()
            launched.append(sum(event.count for event in seen.key_averages() if event.self_device_time_total > 0))
            return result

        session._step(False)  # compiles
        session._run = counting
        session._step(False)
        counts.append(sum(launched))
    print(case, counts)
    assert counts[1] <= most
    assert counts[0] >= 4 * counts[1]
