# SPDX-License-Identifier: Apache-2.0
"""Calls of a peer's loop and of ours in turns: the same weights, prompt, blocks and quota of tokens a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dllm_compile import DecodingConfig, OptimizedModel

from .peers import Peer, PeerError, check, load

BLOCK, TOKENS_A_STEP, ROUNDS = 32, 2, 3


def load_peers(given: Sequence[str], model: nn.Module) -> list[Peer]:
    """Load every NAME=PATH; ends the program with the reason where one is no such checkout."""
    try:
        return [load(text, model) for text in given]
    except PeerError as error:
        raise SystemExit(str(error)) from error


def check_peers(given: Sequence[str]) -> None:
    """End the program with the reason where a NAME=PATH is no such checkout; nothing is loaded."""
    try:
        for text in given:
            check(text)
    except PeerError as error:
        raise SystemExit(str(error)) from error


def against_peer(fast: OptimizedModel, peer: Peer, prompt: int, answer: int) -> Iterator[dict[str, Any]]:
    """One row for each of the peer's loops: its time a call, ours with the same cache, and whether tokens agree."""
    ids = (torch.arange(prompt, device=fast.device) % 97 + 3)[None]
    steps = answer // TOKENS_A_STEP
    for name, (cache, loop) in peer.loops.items():
        config = DecodingConfig(max_new_tokens=answer, block_length=BLOCK, steps=steps, cache=cache, eos="none")

        def ours(config: DecodingConfig = config) -> tuple[Tensor, int]:
            output = fast.generate(ids, config)
            assert output.sequences is not None, "generate fills both"
            assert output.stats is not None, "generate fills both"
            return output.sequences, output.stats.forwards

        @torch.no_grad()
        def theirs(loop: Any = loop) -> tuple[Tensor, int]:
            return loop(ids, answer, BLOCK, steps)

        found = [_timed(theirs, fast.device)[0], _timed(ours, fast.device)[0]]  # compiles, captures, tunes
        _timed(ours, fast.device)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for call, seconds in zip((theirs, ours), times, strict=True):
                seconds.append(_timed(call, fast.device)[1])
        (canvas, forwards), (tokens, own_forwards) = found
        yield {
            "name": f"beside {peer.name}, {name}",
            "schedule": "forced",
            "ratio": statistics.median(a / b for a, b in zip(*times, strict=True)),
            "ms": round(1e3 * statistics.median(times[1]), 1),
            "peer_ms": round(1e3 * statistics.median(times[0]), 1),
            "forwards": own_forwards,
            "peer_forwards": forwards,
            "canvas_tokens_per_second": round(answer / statistics.median(times[1]), 1),
            "peer_canvas_tokens_per_second": round(answer / statistics.median(times[0]), 1),
            "tokens_agree": round(float((canvas == tokens)[:, prompt:].float().mean()), 4),
        }


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
