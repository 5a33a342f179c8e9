# SPDX-License-Identifier: Apache-2.0
"""Ratios of a small random model's steps, measured in one process: cached against full, compiled against eager.

On a CPU `tests/gates/test_ratios.py` holds them against generous limits: a step that computes a sixteenth of the rows
must show on any machine, and generated code must not lose. Absolute times say nothing there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile.runtime.ambient import plain_mode
from dllm_compile.runtime.engine import decode

from .gates.graphs import recorded
from .models import random_llada
from .timing import paired


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each ratio."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_llada(arguments.shape, arguments.layers, device)
    rows = []
    for name, make in RATIOS.items():
        slow, fast = make(model, arguments.prompt, arguments.answer)
        with torch.no_grad():
            for call in (slow, fast) * 2:
                call()
            rows.append({"name": name, **paired(slow, fast, arguments.rounds, on_card=device == "cuda")})
        print(rows[-1], flush=True)
    return rows


Call = Callable[[], Any]


def cached_against_full(model: torch.nn.Module, prompt: int, answer: int) -> tuple[Call, Call]:
    """A step that computes every row, and one that computes a block of 32 over a cache; neither is compiled."""
    fast = dllm_compile.optimize(model, compile=False)
    return _step(fast, prompt, answer, {}), _step(fast, prompt, answer, {"cache": "dual"})


def compiled_against_eager(model: torch.nn.Module, prompt: int, answer: int) -> tuple[Call, Call]:
    """A step that computes every row, operator by operator and as generated code."""
    eager, compiled = (dllm_compile.optimize(model, compile=choice) for choice in (False, True))
    return _step(eager, prompt, answer, {}), _step(compiled, prompt, answer, {})


RATIOS: dict[str, Callable[[torch.nn.Module, int, int], tuple[Call, Call]]] = {
    "cached step against full step": cached_against_full,
    "compiled step against eager step": compiled_against_eager,
}


def _step(fast: dllm_compile.OptimizedModel, prompt: int, answer: int, options: dict[str, Any]) -> Call:
    """The program call of a step in the middle of an answer."""
    config = DecodingConfig(max_new_tokens=answer, block_length=32, steps=answer // 16, eos="none", **options)
    with recorded() as calls:
        decode(fast.programs, fast.facts, [torch.arange(prompt) % 97 + 3], config)
    program = fast.programs.built[-1]
    inputs = min(calls[program.name], key=lambda call: call["ids"].shape[0])

    def step() -> Any:
        with plain_mode():
            return program(**inputs)

    return step
