# SPDX-License-Identifier: Apache-2.0
"""Buffers with room to spare, used again and again: same tokens, same counts, same addresses."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import dllm_compile
from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.capacity import Capacity, bucket
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample
from dllm_compile.runtime.session import SessionPool, session_key
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.warm_up import warm_up
from tests.conftest import tiny_model

from .policies import POLICIES
from .tiny import FACTS, MASK, CachedPrograms, TinyModel, prompts_of


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=2, eos_bias=3.0, layers=3)


CASES = {"none": {}, "none, cfg": {"cfg_scale": 0.7}, **POLICIES}


def same(one, other) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for figure in ("forwards", "forwards_per_row", "row_forwards", "answer_tokens_per_row", "canvas_tokens"):
        assert getattr(one.stats, figure) == getattr(other.stats, figure), figure


@pytest.mark.parametrize("tile_rows", [None, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_session_that_is_used_again_gives_what_a_new_one_gives(model, case, tile_rows):
    """Other prompts, other lengths, other seeds; G4: neither the buffers' size nor what they held before matters."""
    pool = SessionPool()
    config = DecodingConfig(**{"max_new_tokens": 14, "block_length": 6, "threshold": 0.5, **CASES[case]})
    programs = CachedPrograms(model, tile_rows)
    for lengths, seed in (((3, 11), 1), ((12, 2), 2), ((7, 7), 3), ((1, 40), 4), ((40, 1), 5), ((5,), 6)):
        prompts = prompts_of(*lengths, seed=seed)
        of_call = config.replace(seed=seed)
        same(
            decode(programs, FACTS, prompts, of_call, sessions=pool),
            decode(CachedPrograms(model, tile_rows), FACTS, prompts, of_call),
        )


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"commit": "quota"}, {"eos": "none"}], ids=str)
@pytest.mark.parametrize("cache", ["none", "dual", "flash"])
def test_a_queue_through_a_session(model, cache, options):
    """Samples join and leave while the buffers stay."""
    prompts = prompts_of(*(1 + 5 * i % 13 for i in range(9)), seed=3)
    config = DecodingConfig(max_new_tokens=18, block_length=6, cache=cache, slots=3, **options)
    pool = SessionPool()
    for _ in range(2):
        same(
            decode(CachedPrograms(model), FACTS, prompts, config, sessions=pool),
            decode(CachedPrograms(model), FACTS, prompts, config),
        )


@pytest.mark.parametrize("cache", ["none", "prefix", "dkv", "flash"])
def test_nothing_moves(model, cache):
    """What a captured step reads and writes stays at one address, through joining, leaving and the next call."""
    pool, config = SessionPool(), DecodingConfig(max_new_tokens=12, block_length=6, threshold=0.5, cache=cache, slots=2)
    held = set()
    for seed in range(3):
        decode(CachedPrograms(model), FACTS, prompts_of(3, 9, 4, 6, 1, seed=seed), config, sessions=pool)
        (session,) = (one for idle in pool._idle.values() for one in idle)
        caches = session.cache.caches(False).values() if hasattr(session.cache, "caches") else ()
        held.add(tuple(tensor.data_ptr() for tensor in (*session._held.values(), *caches)))
        names = {name.split(".")[0] for name in session._held}
        assert names == {"Layout", "CanvasState", "look"}
    assert len(held) == 1


def test_sizes_of_steps_are_buckets(model):
    """With room to spare the rows of a step are rounded up, so that few sizes occur."""
    config = DecodingConfig(max_new_tokens=60, threshold=0.5, cache="flash", lookahead=9, track=11, eos="none")
    programs, pool = CachedPrograms(model), SessionPool()
    for seed in range(3):
        decode(programs, FACTS, prompts_of(4 + seed, 9, seed=seed), config, sessions=pool)
    sizes = {len(call.ids) for call in programs.calls}
    assert all(size == bucket(size) for size in sizes)
    assert len(sizes) < 10


def test_buckets():
    for rows in range(1, 6000):
        assert rows <= bucket(rows) <= max(rows + 15, rows * 5 / 4)
        assert bucket(bucket(rows)) == bucket(rows)


def test_places_without_a_sample_are_done_and_unseen():
    config = DecodingConfig(max_new_tokens=6, block_length=3)
    samples = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts_of(2, 5))]
    capacity = Capacity(samples=4, rows=64, blocks=3, width=4)
    layout = Layout.of(
        samples, mask_token_id=MASK, tile_rows=8, guided=True, device=torch.device("cpu"), capacity=capacity
    )
    state = CanvasState.begin(layout, layout.initial_tokens(MASK))
    assert layout.places == 5
    assert layout.plan.shape == (5, 3, 4)
    assert layout.lengths.tolist() == [8, 11, 0, 0, 45]
    assert layout.exists.tolist() == [True, True, False, False, False]
    assert state.done.tolist() == [False, False, True, True, True]
    assert not state.due[2:].any()
    assert not state.keep[19:].any()
    assert state.kept.tolist() == [8, 11, 0, 0, 0]
    assert int((state.tokens[: layout.rows] == MASK).sum()) == 12
    covered = torch.zeros(128, dtype=torch.int64)
    for q_begin, q_end, k_begin, k_end in layout.tiles.tolist():
        covered[q_begin:q_end] += 1
        if q_begin % 64 >= 19:
            assert k_begin >= k_end
        elif q_begin < q_end:
            assert k_end - k_begin in (8, 11)
    assert covered.tolist() == [1] * 128


def test_two_calls_at_the_same_time_have_sessions_of_their_own(model):
    config = DecodingConfig(max_new_tokens=18, block_length=6, threshold=0.5, cache="flash", eos="none")
    pool = SessionPool()
    prompts = [prompts_of(3, 9, seed=seed) for seed in range(4)]
    expected = [decode(CachedPrograms(model), FACTS, pair, config).sequences for pair in prompts]
    results: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        for _ in range(4):
            results[i].append(decode(CachedPrograms(model), FACTS, prompts[i], config, sessions=pool).sequences)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in results.items():
        assert len(found) == 4
        assert all(torch.equal(one, expected[i]) for one in found)


def test_a_pool_keeps_few_sessions_and_gives_them_up():
    made = []

    def make():
        made.append(object())
        return made[-1]

    pool = SessionPool(keep=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        with pool.lend(key, make):
            pass
    assert len(made) == 4  # a, b, c, and b again: it was the one not used for longest when c came
    with pytest.raises(RuntimeError), pool.lend("a", make):
        raise RuntimeError
    with pool.lend("a", make):
        pass
    assert len(made) == 5  # after an error its buffers are not used again
    pool.clear()
    with pool.lend("a", make), pool.lend("a", make):
        pass
    assert len(made) == 7


def test_what_differs_between_calls_is_not_in_the_key():
    capacity = Capacity(1, 64, 1, 8)
    config = DecodingConfig(cache="flash", threshold=0.9)
    same_session = {"seed": 3, "max_new_tokens": 7, "slots": 2, "check_every": 5}
    for name, value in same_session.items():
        assert session_key(config, capacity) == session_key(config.replace(**{name: value}), capacity)
    for name, value in {"threshold": 0.8, "track": 5, "temperature": 0.5, "eos": "none"}.items():
        assert session_key(config, capacity) != session_key(config.replace(**{name: value}), capacity)
    quota = DecodingConfig(steps=4, max_new_tokens=128)
    assert session_key(quota, capacity) != session_key(quota.replace(max_new_tokens=64), capacity)


@pytest.mark.parametrize("cache", ["none", "dual", "flash"])
def test_cancelling_hands_out_what_there_is(model, cache):
    prompts = prompts_of(3, 9, 4, 6, seed=3)
    config = DecodingConfig(max_new_tokens=12, block_length=6, cache=cache, slots=2, eos="none", check_every=1)
    looks = iter([False, False, True])
    output = decode(CachedPrograms(model), FACTS, prompts, config, cancelled=lambda: next(looks))
    whole = decode(CachedPrograms(model), FACTS, prompts, config)
    assert output.stats.forwards == 3
    assert output.stats.forwards_per_row == (3, 3, 0, 0)
    for i, found in enumerate(output.sequences.tolist()):
        masks = 9 if i < 2 else 12
        assert found.count(MASK) == masks
        assert all(token in (MASK, final) for token, final in zip(found, whole.sequences[i].tolist(), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_warm_up_changes_nothing(model, case):
    """It runs steps of every size it names, on samples that are done."""
    config = DecodingConfig(**{"max_new_tokens": 14, "block_length": 6, "threshold": 0.5, "slots": 2, **CASES[case]})
    pool, programs = SessionPool(), CachedPrograms(model)
    done = warm_up(programs, FACTS, [3, 11, 5], config, pool)
    assert done.seconds > 0
    assert len(programs.calls) >= 2
    prompts = prompts_of(5, 3, 9, seed=4)
    same(
        decode(programs, FACTS, prompts, config, sessions=pool),
        decode(CachedPrograms(model), FACTS, prompts, config),
    )


@pytest.mark.parametrize("case", [name for name in POLICIES if "dpad" not in name and "window" not in name])
def test_a_warm_up_names_every_size_of_a_batch(model, case):
    """Without a queue no step has a size that is not rehearsed."""
    config = DecodingConfig(**{"max_new_tokens": 14, "block_length": 6, "threshold": 0.5, "eos": "none", **CASES[case]})
    pool, programs = SessionPool(), CachedPrograms(model)
    prompts = prompts_of(3, 11, seed=4)
    decode(programs, FACTS, prompts, config, sessions=pool)
    computed = {len(call.ids) for call in programs.calls}
    (session,) = (one for idle in pool._idle.values() for one in idle)
    session.start([Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts)], [0, 17], config)
    assert computed <= {rows for _, rows in session.cache.sizes(session.layout)}


@pytest.mark.parametrize("cache", ["none", "dual", "flash"])
def test_rows_left_over_have_positions_of_the_model(cache):
    """There may be more of them than the tables of the rotary embedding have rows."""
    fast = dllm_compile.optimize(tiny_model(max_sequence_length=24), compile=False)
    config = DecodingConfig(max_new_tokens=9, block_length=4, threshold=0.3, cache=cache)
    prompts = [torch.arange(3, 3 + length) for length in (3, 14, 15)]
    same(
        decode(fast.programs, fast.facts, prompts, config, sessions=SessionPool()),
        decode(fast.programs, fast.facts, prompts, config),
    )


def test_places_without_a_sample_have_no_span(model):
    """A kernel looks a sample up by where its keys begin, and such a place would begin where the first one does."""
    config = DecodingConfig(max_new_tokens=14, threshold=0.5, cache="flash", window_length=5)
    programs = CachedPrograms(model)
    prompts = prompts_of(3, 11, seed=4)
    decode(programs, FACTS, prompts, config, sessions=SessionPool())
    for call in programs.cache_calls:
        begins, ends = call.spans.T.tolist()
        taken = [begin for begin, end in zip(begins, ends, strict=True) if begin < end]
        assert len(set(taken)) == len(taken) > 0


class Recorder:
    """Takes the place of captured steps after a warm-up: runs every step as it is, and notes its key."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.keys: list[tuple[bool, int] | None] = []

    def at_least(self, refreshing: bool, rows: int) -> int | None:
        return min((size for size in self.sizes if size >= rows), default=None)

    def run(self, key, step) -> None:
        self.keys.append(key)
        step()


@pytest.mark.parametrize("case", ["dual", "prefix every 3", "dkv", "flash", "none, cfg", "window"])
def test_after_a_warm_up_steps_are_padded_to_sizes_that_were_captured(model, case, monkeypatch):
    """Prompts that are a little shorter than those of the warm-up are served by its graphs, with the same tokens."""
    config = DecodingConfig(**{"max_new_tokens": 14, "block_length": 6, "threshold": 0.5, "eos": "none", **CASES[case]})
    pool, prompts = SessionPool(), prompts_of(3, 11, seed=4)
    decode(CachedPrograms(model), FACTS, prompts, config, sessions=pool)
    (session,) = pool.idle()
    session.captured = Recorder(0, 96)
    same(
        decode(session._programs, FACTS, prompts, config.replace(check_every=1), sessions=pool),
        decode(CachedPrograms(model), FACTS, prompts, config.replace(check_every=1)),
    )
    assert {key[1] for key in session.captured.keys} <= {0, 96}


def test_a_step_of_very_many_rows_is_not_captured(model, monkeypatch):
    """Its activations would stay allocated with the graph."""
    monkeypatch.setattr("dllm_compile.runtime.session.MOST_CAPTURED_ROWS", 40)
    config = DecodingConfig(max_new_tokens=14, block_length=6, threshold=0.5, cache="dual")
    pool, prompts = SessionPool(), prompts_of(9, 11, seed=4)
    decode(CachedPrograms(model), FACTS, prompts, config, sessions=pool)
    (session,) = pool.idle()
    session.captured = Recorder()
    decode(session._programs, FACTS, prompts, config, sessions=pool)
    assert session.captured.keys[0] is None  # all 48 rows
    assert (False, 16) in session.captured.keys


def test_a_session_that_is_given_up_is_freed_at_once(model):
    """Nothing refers to it in a circle, so that its caches need no garbage collection."""
    pool, config = SessionPool(), DecodingConfig(max_new_tokens=6, cache="flash")
    decode(CachedPrograms(model), FACTS, prompts_of(3, seed=1), config, sessions=pool)
    (session,) = pool.idle()
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        pool.clear()
        assert gone() is None
    finally:
        gc.enable()
