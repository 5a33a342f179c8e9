# SPDX-License-Identifier: Apache-2.0
"""Which steps are captured, replayed, padded or refused; the graph itself is played, the rest is the real thing."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.errors import UnknownShapeError
from dllm_compile.runtime import session
from dllm_compile.runtime.captured import CapturedSteps
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.session import SessionPool
from dllm_compile.runtime.warm_up import warm_up

from .tiny import FACTS, CachedPrograms, TinyModel, prompts_of


class Played:
    """A graph that does again what it recorded."""

    def __init__(self, step) -> None:
        self.step, self.replays = step, 0

    def replay(self) -> None:
        self.replays += 1
        self.step()


@pytest.fixture
def steps(monkeypatch):
    """Make `CapturedSteps` on a machine without a card: capturing keeps the step."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def capture(self, key, step) -> None:
        if not self._graphs:
            self._addresses = self._where()
        self._graphs[key] = Played(step)
        self._sizes[key[0]].append(key[1])

    monkeypatch.setattr(CapturedSteps, "capture", capture)
    return lambda new_shapes="capture", held=(): CapturedSteps(torch.device("cuda"), new_shapes, lambda: held)


def ran(captured: CapturedSteps, *keys) -> list:
    """The keys whose step ran as it is, in order; replays are told by their graphs."""
    done: list = []
    for key in keys:
        graph = captured._graphs.get(key)
        before = 0 if graph is None else graph.replays
        captured.run(key, lambda key=key: done.append(key))
        if graph is not None:
            assert graph.replays == before + 1
    return done


@pytest.mark.parametrize("new_shapes", ["capture", "eager", "raise"])
def test_a_size_is_captured_when_it_comes_back(steps, new_shapes):
    captured = steps(new_shapes)
    key, other = (False, 16), (True, 16)
    assert ran(captured, key) == [key]
    assert len(captured) == 0
    ran(captured, key)
    assert len(captured) == 1, "captured, and replayed at once"
    assert captured._graphs[key].replays == 1
    ran(captured, other, None, None, key)
    assert len(captured) == 1, "once is not enough, and what has no key is never captured"
    assert captured._graphs[key].replays == 2


def test_after_the_warm_up_an_unknown_size_does_what_was_asked_for(steps):
    known, unknown = (False, 32), (False, 64)
    for new_shapes in ("capture", "eager", "raise"):
        captured = steps(new_shapes)
        ran(captured, known, known)
        captured.freeze()
        ran(captured, known)
        if new_shapes == "raise":
            with pytest.raises(UnknownShapeError, match=r"\(False, 64\): warm up with prompts of this length"):
                captured.run(unknown, lambda: pytest.fail("it ran"))
            ran(captured, None)
            assert len(captured) == 1
            continue
        assert ran(captured, unknown) == [unknown]
        ran(captured, unknown, unknown)
        assert len(captured) == (2 if new_shapes == "capture" else 1)


def test_rows_are_padded_to_what_was_captured_only_after_the_warm_up(steps):
    captured = steps()
    ran(captured, *[(False, rows) for rows in (96, 32, 96, 32)], (True, 48), (True, 48))
    assert captured.at_least(False, 20) is None
    captured.freeze()
    assert [captured.at_least(False, rows) for rows in (20, 32, 33, 96, 97)] == [32, 32, 96, 96, None]
    assert captured.at_least(True, 33) == 48


def test_a_tensor_that_was_replaced_is_noticed(steps):
    held = [torch.zeros(3), torch.zeros(4)]
    captured = steps(held=held)
    ran(captured, (False, 16), (False, 16), (False, 16))
    held[1] = torch.zeros(4)
    with pytest.raises(AssertionError, match="was replaced"):
        captured.run((False, 16), lambda: None)


CASES = {
    "none": {"cache": "none"},
    "dual": {"cache": "dual"},
    "flash": {"cache": "flash", "window_length": 5, "lookahead": 4, "track": 6},
    "verify": {
        "cache": "flash", "window_length": 5, "lookahead": 4, "track": 6, "commit": "flash_verify", "gamma": 0.1
    },
}  # fmt: skip


@pytest.fixture
def on_a_card(steps, monkeypatch):
    """Sessions that capture although their programs compute on the CPU; what they made."""
    made: list[CapturedSteps] = []
    original = session.Session.__init__

    def init(self, programs, facts, config, cache_rows, capacity=None, *rest) -> None:
        original(self, programs, facts, config, cache_rows, capacity, *rest)
        if capacity is None:
            return  # for one call
        self.captured = steps(rest[0])
        self.captured._held = lambda: tuple(self._held.values())
        made.append(self.captured)

    monkeypatch.setattr(session.Session, "__init__", init)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return made


@pytest.mark.parametrize("case", CASES)
def test_a_warm_up_captures_the_largest_first_and_then_nothing_more(on_a_card, case):
    """Over a hundred blocks of other prompts: no capture, nothing refused, the same tokens as without graphs."""
    model = TinyModel(seed=2, eos_bias=3.0, layers=3)
    config = DecodingConfig(**{"max_new_tokens": 18, "block_length": 6, "threshold": 0.5, "eos": "none", **CASES[case]})
    pool, programs = SessionPool("raise"), CachedPrograms(model)
    done = warm_up(programs, FACTS, [11, 11], config, pool)
    (captured,) = on_a_card
    assert done.graphs == len(captured) > 0
    assert done.seconds > 0
    for refreshing in (True, False):
        sizes = captured._sizes[refreshing]
        assert sizes == sorted(sizes, reverse=True)
    for seed in range(17):  # two samples of three blocks
        prompts = prompts_of(11 - seed % 7, 11, seed=seed)
        output = decode(programs, FACTS, prompts, config, sessions=pool)
        plain = decode(CachedPrograms(model), FACTS, prompts, config)
        assert torch.equal(output.sequences, plain.sequences)
        assert output.stats.forwards_per_row == plain.stats.forwards_per_row
    assert on_a_card == [captured], "one session for all calls"
    assert done.graphs == len(captured)
    assert sum(graph.replays for graph in captured._graphs.values()) > 17
