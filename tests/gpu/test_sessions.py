# SPDX-License-Identifier: Apache-2.0
"""Captured steps on a card: what a replay does is what the step does, for other prompts, lengths and threads."""

from __future__ import annotations

import threading

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.session import SessionPool
from dllm_compile.runtime.warm_up import warm_up
from tests.conftest import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES: dict[str, dict] = {
    "none": {},
    "none, cfg": {"cfg_scale": 0.5},
    "none, sampled": {"temperature": 0.8},
    "none, dpad": {"suffix": "dpad"},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "dual, every 3": {"cache": "dual", "refresh_interval": 3},
    "dual, dpad": {"cache": "dual", "suffix": "dpad"},
    "vicinity": {"cache": "vicinity", "prefix_look": 4, "after_look": 4},
    "dkv": {"cache": "dkv"},
    "flash": {"cache": "flash"},
    "flash, narrow": {"cache": "flash", "window_length": 8, "lookahead": 8, "track": 12, "eos": "none"},
    "flash, cfg": {"cache": "flash", "cfg_scale": 0.5},
    "flash, all rows": {"cache": "flash", "track": -1},
    "flash, verify": {"cache": "flash", "commit": "flash_verify", "gamma": 0.02},
    "flash, as released": {"cache": "flash", "key_end": "released", "eos": "rightmost"},
    "flash, verify as released": {
        "cache": "flash", "commit": "flash_verify", "gamma": 0.02, "key_end": "released", "pin": "released"
    },
    "lacache": {"cache": "lacache"},
}  # fmt: skip


SIZES = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "max_sequence_length": 512}


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(tiny_model(**SIZES).cuda())


@pytest.fixture(scope="module")
def in_fp64() -> dllm_compile.OptimizedModel:
    """The same model in fp64 on the CPU."""
    return dllm_compile.optimize(tiny_model(**SIZES).double(), compile=False)


def prompts_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 100, (length,), generator=generator) for length in lengths]


def config_of(case: str, **options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 96, "block_length": 32, "threshold": 0.25, **CASES[case], **options})


def graphs(pool: SessionPool) -> int:
    return sum(0 if one.captured is None else len(one.captured) for idle in pool._idle.values() for one in idle)


def run(fast, prompts, config, pool=None):
    return decode(fast.programs, fast.facts, prompts, config, sessions=pool)


@pytest.mark.parametrize("case", CASES)
def test_replays_give_the_tokens_of_the_steps(fast, case):
    """Twenty calls through one bucket and more through others, the first ones uncaptured."""
    pool, config = SessionPool(), config_of(case)
    for i in range(20):
        prompts = prompts_of(5 + 3 * i % 7, 30 + i % 4, 1 + i, seed=i)
        of_call = config.replace(seed=i)
        one, other = run(fast, prompts, of_call, pool), run(fast, prompts, of_call)
        assert torch.equal(one.sequences, other.sequences), i
        assert one.stats.forwards_per_row == other.stats.forwards_per_row
        # Without a cache a step that comes before the host has seen the end computes all rows once more.
        assert one.stats.row_forwards == other.stats.row_forwards or config.cache == "none"
    if case != "lacache":
        assert graphs(pool) > 0


def answers_nearby(prompt, config) -> list[torch.Tensor]:
    """What the model answers in fp64, on the CPU, with weights that are off by 1e-6: more than one if numbers tie."""
    found: list[torch.Tensor] = []
    for seed in range(6):
        model, generator = tiny_model(**SIZES).double(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        answer = run(dllm_compile.optimize(model, compile=False), [prompt], config).sequences[0]
        if not any(torch.equal(answer, other) for other in found):
            found.append(answer)
    return found


@pytest.mark.parametrize("case", ["none", "dual", "flash", "flash, narrow", "flash, verify"])
def test_two_hundred_prompts_through_eight_slots(fast, in_fp64, case):
    """The same tokens as each alone, and as in fp64, but where numbers tie: the order of sums decides them."""
    pool, config = SessionPool(), config_of(case, slots=8)
    prompts = prompts_of(*(1 + 7 * i % 29 for i in range(200)), seed=1)
    output = run(fast, prompts, config, pool)
    width, ties = output.sequences.shape[1], []
    for i in range(0, 200, 9):
        of_call = config.replace(seed=i)
        found = output.sequences[i, width - len(prompts[i]) - 96 :].cpu()
        alone, exact = (run(one, prompts[i : i + 1], of_call).sequences[0].cpu() for one in (fast, in_fp64))
        if not (torch.equal(found, exact) and torch.equal(alone, exact)):
            ties.append(i)
            nearby = [exact, *answers_nearby(prompts[i], of_call)]
            assert any(torch.equal(found, answer) for answer in nearby), i
            assert any(torch.equal(alone, answer) for answer in nearby), i
    assert len(ties) <= 1, "one is known: prompt 135 of flash, verify"


@pytest.mark.parametrize("case", ["none", "dual", "flash", "flash, verify"])
def test_nothing_is_captured_or_allocated_after_the_warm_up(fast, case):
    """Over a hundred blocks: no capture, no compilation, no growth of memory, and no shape that is refused."""
    pool, config = SessionPool("raise"), config_of(case, eos="none")
    done = warm_up(fast.programs, fast.facts, [40, 40], config, pool)
    captured = graphs(pool)
    assert done.graphs == captured > 0
    run(fast, prompts_of(40, 40), config, pool)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(17):  # 2 samples of 3 blocks each
            run(fast, prompts_of(40 - seed, 40, seed=seed), config, pool)
    assert graphs(pool) == captured
    assert torch.cuda.memory_allocated() <= before


def test_a_shape_that_was_not_warmed_up_is_refused_where_that_was_asked_for(fast):
    pool, config = SessionPool("raise"), config_of("flash", eos="none")
    warm_up(fast.programs, fast.facts, [40], config, pool)
    (session,) = (one for idle in pool._idle.values() for one in idle)
    with pytest.raises(dllm_compile.errors.UnknownShapeError, match="warm up"):
        session.rehearse(4096, refreshing=False)


def test_no_synchronization_between_looks(fast):
    pool, config = SessionPool(), config_of("flash", eos="none", check_every=4)
    for seed in range(3):
        run(fast, prompts_of(9, 9, seed=seed), config, pool)
    (session,) = (one for idle in pool._idle.values() for one in idle)
    samples = session.layout.samples
    look = session.prepare(session.start(samples, [0, samples[0].length], config))
    session.step(refreshing=True)
    look = session.look()[1]
    session.prepare(look)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(4):
            session.step(refreshing=i == 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(session.look()[1].masks) < sum(look.masks)


def test_two_models_and_four_threads(fast):
    """Each thread gets what it gets alone, captures of the others or not."""
    other = dllm_compile.optimize(
        tiny_model(d_model=256, n_heads=4, n_kv_heads=4, n_layers=2, max_sequence_length=512).cuda()
    )
    jobs = [(model, config_of(case, eos="none")) for model in (fast, other) for case in ("flash", "dual")]
    expected = [run(model, prompts_of(9, 20), config).sequences for model, config in jobs]
    pools = [SessionPool() for _ in jobs]
    found: list[list[torch.Tensor]] = [[] for _ in jobs]

    def work(i: int) -> None:
        model, config = jobs[i]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                found[i].append(run(model, prompts_of(9, 20), config, pools[i]).sequences.cpu())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, wanted in zip(found, expected, strict=True):
        assert len(results) == 5
        assert all(torch.equal(one, wanted.cpu()) for one in results)
