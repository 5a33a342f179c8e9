# SPDX-License-Identifier: Apache-2.0
"""Steps and whole calls of `generate` at a real shape, under a forced schedule of commits.

Weights are random, so confidences say nothing: what is committed is forced. "3 a step" is the quota rule, which commits
three candidates whatever their confidence. "6 a step, verify" is Flash-Verify with a threshold that nothing but the
best candidate passes, five drafts and gamma = 0, which accepts all of them. Answers never end early. With `--peer` the
loops of other people's checkouts run in turns with ours, on the same weights and schedule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig, OptimizedModel
from dllm_compile.runtime.capacity import Capacity
from dllm_compile.runtime.layout import Sample
from dllm_compile.runtime.session import Session
from dllm_compile.runtime.slots import Slots
from dllm_compile.runtime.stages import run_compiled, run_plainly

from .models import random_llada
from .peer_calls import against_peer, check_peers, load_peers
from .profile import by_kernel
from .timing import interleaved, replayable

QUOTA: dict[str, Any] = {"cache": "flash", "commit": "quota", "eos": "none"}
VERIFY: dict[str, Any] = {
    "cache": "flash",
    "commit": "flash_verify",
    "threshold": 2.0,
    "gamma": 0.0,
    "verify_candidates": 5,
    "eos": "none",
}
# name, options, batch
STEPS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("flash step", QUOTA, 1),
    ("flash step + verify", VERIFY, 1),
    ("dual step", {"cache": "dual", "eos": "none"}, 1),
    ("lacache step", {"cache": "lacache", "eos": "none"}, 1),
    ("uncached step", {"eos": "none"}, 1),
    ("flash step", QUOTA, 8),
    ("flash step + verify", VERIFY, 8),
    ("lacache step", {"cache": "lacache", "eos": "none"}, 8),
    ("uncached step", {"eos": "none"}, 8),
    ("flash step", QUOTA, 32),
    ("flash step + verify", VERIFY, 32),
)
# name, options, batch, tokens a step
CALLS: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("3 a step", QUOTA, 1, 3),
    ("6 a step, verify", VERIFY, 1, 6),
    ("6 a step, verify", VERIFY, 8, 6),
    ("3 a step", QUOTA, 32, 3),
    ("6 a step, verify", VERIFY, 32, 6),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=768)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--precisions", nargs="+", default=["fp8", "checkpoint"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--long", type=int, default=4096, help="canvas of the long LaCache steps; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-calls", action="store_true", help="steps only")
    parser.add_argument("--no-steps", action="store_true", help="calls only")
    parser.add_argument("--plain-bookkeeping", action="store_true", help="leave what surrounds forwards uncompiled")
    parser.add_argument("--release", action="store_true", help="FP8 weights replace the model's (for one precision)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a checkout of fast-dllm or llada, whose loops run beside ours on the same weights (its code is run)",
    )
    parser.add_argument("--profile", action="store_true", help="list the kernels of each step")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every precision, step and call; one row of figures each."""
    check_peers(arguments.peer)  # before a large model is made: a wrong path is said at once
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_llada(arguments.shape, arguments.layers, device)
    peers = load_peers(arguments.peer, model)
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        print(row, flush=True)

    add(name="model, eager, whole canvas", batch=1, **_eager(model, arguments))
    for precision in arguments.precisions:
        start = time.perf_counter()
        fast = dllm_compile.optimize(
            model,
            CompileConfig(precision=precision, fuse_bookkeeping=not arguments.plain_bookkeeping),
            release=arguments.release,
        )
        add(name="optimize", precision=precision, seconds=round(time.perf_counter() - start, 1))
        for name, options, batch in () if arguments.no_steps else STEPS:
            if batch in arguments.batches:
                canvas = arguments.prompt + arguments.answer
                add(name=name, precision=precision, batch=batch, **_step(fast, options, batch, canvas, arguments))
                if arguments.long and name in ("lacache step", "uncached step"):
                    figures = _step(fast, options, batch, arguments.long, arguments)
                    add(name=name, precision=precision, batch=batch, **figures)
        for name, options, batch, tokens in () if arguments.no_calls else CALLS:
            if batch in arguments.batches:
                add(name=name, precision=precision, batch=batch, **_call(fast, options, batch, tokens, arguments))
        for peer in peers:
            for row in against_peer(fast, peer, arguments.prompt, arguments.answer):
                add(precision=precision, batch=1, **row)
        del fast
    return rows


def _prompts(batch: int, length: int) -> list[list[int]]:
    return [[3 + (7 * i + j) % 97 for j in range(length)] for i in range(batch)]


@torch.no_grad()
def _eager(model: torch.nn.Module, arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's own forward with the softmax that a plain loop takes over the current block."""
    length = arguments.prompt + arguments.answer
    ids = torch.randint(3, 100, (1, length), device=next(model.parameters()).device)
    call = lambda: model(ids).logits[:, -arguments.answer :][:, :32].float().softmax(-1)  # noqa: E731
    for _ in range(2):
        call()
    return _rounded(interleaved({"eager": call}, rounds=3)["eager"])


@torch.no_grad()
def _step(
    fast: OptimizedModel, options: dict[str, Any], batch: int, canvas: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A step in the middle of an answer: bookkeeping, forward(s) and commit."""
    config = DecodingConfig(max_new_tokens=arguments.answer, **options)
    mask_id = fast.facts.mask_token_id
    assert mask_id is not None
    prompts = _prompts(batch, canvas - arguments.answer)
    samples = [Sample.plan(i, torch.tensor(prompt), config, mask_id) for i, prompt in enumerate(prompts)]
    slots = Slots.of(samples, None)
    capacity = Capacity.of(samples, batch, slots.rows, config) if config.is_capturable else None
    run = run_plainly if arguments.plain_bookkeeping else run_compiled
    session = Session(fast.programs, fast.facts, config, slots.rows, capacity, run=run)
    session.prepare(session.start(samples, [slots.base(sample) for sample in samples], config))
    start = time.perf_counter()
    session.step(refreshing=True)  # compiles
    _, look = session.look()
    seconds = time.perf_counter() - start
    session.prepare(look)
    step: Callable[[], Any] = lambda: session.step(refreshing=False)  # noqa: E731
    start = time.perf_counter()
    for _ in range(3):
        step()
    session.look()
    seconds += time.perf_counter() - start
    graphed = session.captured is not None
    if session.captured is None and fast.device.type == "cuda":
        step, graphed = replayable(step), True
    rounds = arguments.rounds if batch * canvas <= 16384 else 3
    times = interleaved({"step": step}, rounds=rounds)["step"]
    found: dict[str, Any] = {"canvas": canvas, **_rounded(times), "graph": graphed, "first_seconds": round(seconds, 1)}
    if arguments.profile and fast.device.type == "cuda":
        found["kernels"] = by_kernel(step)
    return found


def _call(
    fast: OptimizedModel, options: dict[str, Any], batch: int, tokens: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A whole call of `generate` after another one and a warm-up, so that every step it takes is captured."""
    more = {"steps": -(-arguments.answer // tokens)} if options["commit"] == "quota" else {}
    config = DecodingConfig(max_new_tokens=arguments.answer, **options, **more)
    prompts = _prompts(batch, arguments.prompt)
    first = fast.generate(prompts, config).stats
    warm = fast.warm_up([arguments.prompt] * batch, config)
    if fast.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stats = fast.generate(prompts, config).stats
    assert first is not None
    assert stats is not None
    peak = torch.cuda.max_memory_allocated() / 2**30 if fast.device.type == "cuda" else 0.0
    fast.free_buffers()
    return {
        "schedule": "forced",
        "canvas_tokens_per_second": round(stats.canvas_tokens / stats.seconds, 1),
        "canvas_tokens_per_forward_and_row": round(stats.canvas_tokens / stats.forwards / batch, 3),
        "ms_per_forward": round(stats.ms_per_forward, 3),
        "forwards": stats.forwards,
        "seconds": round(stats.seconds, 3),
        "first_seconds": round(first.seconds, 2),
        "warm_up_seconds": round(warm.seconds, 2),
        "warm_up_graphs": warm.graphs,
        "peak_GiB": round(peak, 2),
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}
