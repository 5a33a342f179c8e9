# SPDX-License-Identifier: Apache-2.0
"""Flash-Verify on a card: no synchronization, replays that equal steps, tokens that equal those of the CPU."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile.runtime.cache import Look, cache_policy
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.session import SessionPool
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.step import StepConstants, decode_step
from tests.conftest import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VERIFY = {"cache": "flash", "commit": "flash_verify", "threshold": 0.25, "max_new_tokens": 80, "eos": "none"}
RULES = {
    "product": {"gamma": 0.02},
    "per_token": {"gamma": 0.1, "verify_rule": "per_token"},
    "narrow": {"gamma": 0.02, "window_length": 8, "lookahead": 8, "track": 12, "verify_candidates": 3},
}
SIZES = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def fast(request) -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(tiny_model(**SIZES).cuda(), compile=request.param)


def prompts_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 100, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_no_synchronization_inside_a_step(fast, rule):
    config = DecodingConfig(**VERIFY, **RULES[rule])
    programs, mask = fast.programs, fast.facts.mask_token_id
    constants = StepConstants.of(config, fast.facts, programs.device)
    samples = [Sample.plan(i, torch.arange(3, 3 + n), config, mask) for i, n in enumerate((5, 40))]
    layout = Layout.of(samples, mask_token_id=mask, tile_rows=programs.tile_rows, guided=False, device=programs.device)
    policy = cache_policy(config, programs, layout.rows, mask)
    policy.begin(layout)
    state = CanvasState.begin(layout, layout.initial_tokens(mask))
    policy.look(layout, state, Look.at_the_beginning(samples))
    for refreshing in (True, False):  # kernels are compiled here
        decode_step(policy, constants, layout, state, refreshing=refreshing)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            decode_step(policy, constants, layout, state, refreshing=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(state.verified.sum()) > 0


@pytest.mark.parametrize("rule", RULES)
def test_replays_give_the_tokens_of_the_steps(fast, rule):
    """Twenty calls of one bucket: draft pass, commit, verify pass and commit in one graph."""
    pool, config = SessionPool(), DecodingConfig(**VERIFY, **RULES[rule])
    for i in range(20):
        prompts = prompts_of(5 + i % 7, 30 + i % 4, 1 + i, seed=i)
        one = decode(fast.programs, fast.facts, prompts, config, sessions=pool)
        other = decode(fast.programs, fast.facts, prompts, config)
        assert torch.equal(one.sequences, other.sequences), i
        assert one.stats.forwards_per_row == other.stats.forwards_per_row
        assert one.stats.row_forwards == other.stats.row_forwards
    assert any(one.captured is not None and len(one.captured) for idle in pool._idle.values() for one in idle)


@pytest.mark.parametrize("rule", RULES)
def test_a_sample_does_not_depend_on_the_others(fast, rule):
    pool, config = SessionPool(), DecodingConfig(**VERIFY, **RULES[rule], slots=8)
    prompts = prompts_of(*(1 + 7 * i % 29 for i in range(60)), seed=1)
    output = decode(fast.programs, fast.facts, prompts, config, sessions=pool)
    width = output.sequences.shape[1]
    for i in range(0, 60, 7):
        alone = decode(fast.programs, fast.facts, prompts[i : i + 1], config)
        assert torch.equal(output.sequences[i, width - len(prompts[i]) - 80 :], alone.sequences[0]), i


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_those_of_the_reference_operators(fast, rule):
    """fp32 on both sides: kernels of the card against references on the CPU."""
    cpu = dllm_compile.optimize(tiny_model(**SIZES), compile=False)
    config = DecodingConfig(**VERIFY, **RULES[rule])
    for seed in range(3):
        prompts = prompts_of(12, 1, 31, seed=seed)
        expected, output = (decode(one.programs, one.facts, prompts, config) for one in (cpu, fast))
        assert torch.equal(output.sequences.cpu(), expected.sequences)
        assert output.stats.forwards_per_row == expected.stats.forwards_per_row
