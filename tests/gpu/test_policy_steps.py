# SPDX-License-Identifier: Apache-2.0
"""Steps of every policy on a card make no synchronization between two looks of the host."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile.runtime.cache import Look, cache_policy
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.step import StepConstants, decode_step
from tests.conftest import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    sizes = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}
    return dllm_compile.optimize(tiny_model(**sizes).cuda(), compile=False)


@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
@pytest.mark.parametrize(
    "options",
    [{"cache": cache} for cache in ("none", "prefix", "dual", "vicinity", "dkv", "flash", "lacache")],
    ids=str,
)
@torch.no_grad()
def test_no_synchronization_inside_a_step(fast, options, cfg_scale):
    config = DecodingConfig(max_new_tokens=80, block_length=20, threshold=0.3, cfg_scale=cfg_scale, **options)
    programs, mask = fast.programs, fast.facts.mask_token_id
    constants = StepConstants.of(config, fast.facts, programs.device)
    samples = [Sample.plan(i, torch.arange(3, 3 + n), config, mask) for i, n in enumerate((5, 40))]
    layout = Layout.of(
        samples,
        mask_token_id=mask,
        tile_rows=programs.tile_rows,
        guided=cfg_scale > 0,
        device=programs.device,
    )
    policy = cache_policy(config, programs, layout.rows, mask)
    policy.begin(layout)
    state = CanvasState.begin(layout, layout.initial_tokens(mask))
    policy.look(layout, state, Look.at_the_beginning(samples))
    for refreshing in (True, False):  # kernels are compiled here
        decode_step(policy, constants, layout, state, refreshing=refreshing)
    before = int(state.steps.sum())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            decode_step(policy, constants, layout, state, refreshing=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(state.steps.sum()) >= before
