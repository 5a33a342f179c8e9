# SPDX-License-Identifier: Apache-2.0
"""Medians of interleaved rounds, so that a drifting clock touches all variants alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def replayable(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` as a CUDA graph: three warm-ups on a side stream, then one capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int = 20, inner: int = 3
) -> dict[str, dict[str, float]]:
    """Milliseconds of each call.

    Args:
        calls: by name; each has been warmed up.
        rounds: how often all calls are timed, one after the other.
        inner: calls in one timing.

    Returns:
        median, min and max over the rounds, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_once(call, inner, torch.cuda.is_available()))
    return {
        name: {"median_ms": statistics.median(values), "min_ms": min(values), "max_ms": max(values)}
        for name, values in times.items()
    }


def paired(
    slow: Callable[[], Any], fast: Callable[[], Any], rounds: int = 15, inner: int = 3, *, on_card: bool = False
) -> dict[str, float]:
    """How many times as long `slow` takes as `fast`: the median of the ratios of rounds, each of which times both.

    What disturbs a round disturbs both, and the median drops rounds in which it did not; which goes first alternates.

    Args:
        slow, fast: have been warmed up.
        rounds: how often both are timed.
        inner: calls in one timing.
        on_card: whether the device's clock is read instead of the host's.

    Returns:
        the ratio, the lowest and the highest of a round, and the medians of both in ms.
    """
    times: dict[str, list[float]] = {"slow": [], "fast": []}
    for i in range(rounds):
        both = (("slow", slow), ("fast", fast))
        for name, call in both if i % 2 else both[::-1]:
            times[name].append(_once(call, inner, on_card))
    ratios = [a / b for a, b in zip(times["slow"], times["fast"], strict=True)]
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    return {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), **medians}


def _once(call: Callable[[], Any], inner: int, on_card: bool) -> float:
    if not on_card:
        start = time.perf_counter()
        for _ in range(inner):
            call()
        return (time.perf_counter() - start) * 1e3 / inner
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(inner):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / inner
