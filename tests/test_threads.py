# SPDX-License-Identifier: Apache-2.0
"""Threads that rewrite and decode at the same time: each gets what it gets alone, and nothing is broken afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dllm_compile
from dllm_compile import CompileConfig
from dllm_compile.export_gate import ExportGate
from tests.conftest import tiny_model
from tests.real import model_logits, prompts_of

PROMPTS = prompts_of(4, 7, seed=3)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises, each in a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return found


def optimized(model: torch.nn.Module) -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(model, compile=False)


def check(fast: Any) -> None:
    assert isinstance(fast, dllm_compile.OptimizedModel), fast
    ids = torch.arange(9)[None]
    torch.testing.assert_close(fast(ids).logits, model_logits(fast.model, ids), rtol=1e-5, atol=1e-5)


def test_models_are_rewritten_in_several_threads():
    """Two of their own and one that two threads share; then one more, alone."""
    shared = tiny_model(seed=2)
    models = [tiny_model(), tiny_model(seed=1), shared, shared]
    for fast in together(*(lambda model=model: optimized(model) for model in models)):
        check(fast)
    check(optimized(tiny_model(seed=3)))


@pytest.mark.parametrize(
    "cache", ["flash", *(pytest.param(name, marks=pytest.mark.long) for name in ("none", "lacache"))]
)
def test_decoding_goes_on_while_another_model_is_rewritten(cache):
    fast, other, ended = optimized(tiny_model()), tiny_model(seed=1), threading.Event()
    options = {"max_new_tokens": 8, "block_length": 4, "cache": cache}
    expected = fast.generate(PROMPTS, **options).sequences

    def decode() -> int:
        calls = 0
        while not ended.is_set():
            assert torch.equal(fast.generate(PROMPTS, **options).sequences, expected)
            fast(PROMPTS[0][None])
            calls += 1
        return calls

    def rewrite() -> dllm_compile.OptimizedModel:
        time.sleep(0.05)
        try:
            return optimized(other)
        finally:
            ended.set()

    calls, rewritten = together(decode, rewrite)
    check(rewritten)
    assert isinstance(calls, int), calls
    assert calls > 0


@pytest.mark.parametrize("beside", [pytest.param("bisect", marks=pytest.mark.long), "dump"])
def test_other_calls_that_run_graphs(beside, tmp_path):
    """Each of them beside models that are rewritten."""
    fast, model = optimized(tiny_model()), tiny_model(seed=1)
    fast.generate(PROMPTS, max_new_tokens=4)

    def other() -> None:
        if beside == "bisect":
            assert dllm_compile.bisect(model, [5, 6], CompileConfig(compile=False), max_new_tokens=2).fault is None
        else:
            for i in range(2):
                fast.dump_graphs(tmp_path / str(i))

    found = together(other, lambda: optimized(tiny_model(seed=2)))
    assert found[0] is None
    for one in found[1:]:
        check(one)


def test_whoever_gives_up_waiting_holds_nobody_back():
    gate, entered = ExportGate(), threading.Event()
    real = gate._changed.wait_for

    def enter() -> None:
        with gate.running():
            entered.set()

    def interrupted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """A runner comes while this one waits to export; then the wait is interrupted."""
        gate._changed.wait_for = real
        runner.start()
        gate._changed.wait(0.1)
        assert not entered.is_set()
        raise KeyboardInterrupt

    runner = threading.Thread(target=enter, daemon=True)
    gate._changed.wait_for = interrupted
    with pytest.raises(KeyboardInterrupt), gate.exporting():
        pass
    assert entered.wait(10)


def test_the_gate():
    """One exports while nobody runs; what a thread holds already never makes it wait for itself."""
    gate, inside, most = ExportGate(), [0, 0], [0, 0]
    lock = threading.Lock()

    def use(kind: int, block: Any) -> None:
        with block:
            with lock:
                inside[kind] += 1
                most[kind] = max(most[kind], inside[kind])
                assert not inside[1] or inside == [0, 1]
            time.sleep(0.001)
            with lock:
                inside[kind] -= 1

    def run() -> None:
        for _ in range(50):
            use(0, gate.running())

    def export() -> None:
        for _ in range(10):
            use(1, gate.exporting())

    assert together(run, run, export, export, run) == [None] * 5
    assert most[1] == 1
    with gate.running(), gate.running(), gate.exporting(), gate.running():
        pass
    entered = threading.Event()

    def enter() -> None:
        with gate.running():
            entered.set()

    with gate.exporting():
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    thread.join()
    with pytest.raises(RuntimeError), gate.exporting(), gate.running():
        raise RuntimeError
    run()
