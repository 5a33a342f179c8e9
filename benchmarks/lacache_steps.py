# SPDX-License-Identifier: Apache-2.0
"""One denoising step over the whole canvas, with and without LaCache: eager, compiled, fused, cached."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.cache.base import Request
from dllm_compile.runtime.cache.lacache import LaCache
from dllm_compile.runtime.cache.uncached import Uncached
from dllm_compile.runtime.constants import StepConstants
from dllm_compile.runtime.current_block import current_block
from dllm_compile.runtime.facts import ModelFacts
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.state import CanvasState

from .models import random_llada
from .timing import interleaved, replayable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1280, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every length and batch; one row of figures each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_llada(arguments.shape, arguments.layers, device)
    fast = dllm_compile.optimize(model)
    rows = []
    for batch in arguments.batches:
        for length in arguments.lengths:
            rows.append(_measure(model, fast, batch, length, arguments))
            print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def _measure(
    model: torch.nn.Module, fast: Any, batch: int, length: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    config = DecodingConfig(max_new_tokens=length // 2, block_length=arguments.block_length)
    facts = ModelFacts.from_config(model.config)
    prompt = torch.arange(3, 3 + length - length // 2)
    samples = [Sample.plan(i, prompt, config, facts.mask_token_id) for i in range(batch)]
    layout = Layout.of(
        samples,
        mask_token_id=facts.mask_token_id,
        tile_rows=fast.programs.tile_rows,
        guided=False,
        device=fast.device,
    )
    state = CanvasState.begin(layout, layout.initial_tokens(facts.mask_token_id))
    constants = StepConstants.of(config, facts, fast.device)
    inputs = Request(
        rows=current_block(layout, state, state.block, constants.mask_token_id).rows.flatten(),
        refreshing=constants.flags[True],
        mask_token_id=constants.mask_token_id,
        banned=constants.banned,
        seeds=None,
        temperature=None,
        guidance=None,
    )
    cached = LaCache(fast.programs, config.replace(cache="lacache"))
    cached.begin(layout)
    uncached = Uncached(fast.programs)
    ids = state.tokens[:-1].view(batch, length)
    calls: dict[str, Callable[[], Any]] = {
        "model, eager": lambda: model(ids).logits[:, length // 2 :][:, : arguments.block_length].float().softmax(-1),
        "step": lambda: uncached.step(inputs, layout, state),
        "lacache step": lambda: cached.step(inputs, layout, state),
    }
    cached.step(inputs, layout, state)  # fills the state
    for call in calls.values():
        for _ in range(2):
            call()
    if fast.device.type == "cuda":
        # The policy compares a flag on the host; what is timed is the program it then runs.
        program = fast.programs
        seen: list[Any] = []
        original = program.lacache_step
        program.lacache_step = lambda *given: seen.append(given) or original(*given)  # type: ignore[method-assign]
        cached.step(inputs, layout, state)
        program.lacache_step = original  # type: ignore[method-assign]
        calls["step, graph"] = replayable(calls["step"])
        calls["lacache step, graph"] = replayable(lambda: original(*seen[0]))
    times = interleaved(calls, rounds=arguments.rounds)
    return {
        "batch": batch,
        "length": length,
        "block_length": arguments.block_length,
        "layers": arguments.layers,
        "state_MiB": cached.state_bytes / 2**20,
        **{name: {key: round(value, 3) for key, value in figures.items()} for name, figures in times.items()},
    }
