# SPDX-License-Identifier: Apache-2.0
"""Prefix, dual, vicinity and dKV: the tests of sections 7, 8, 14 and 19.3, and the rows a forward is made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.rows import pick_rows, rank_in_sample, tiles_of

from .policies import run_alone
from .tiny import FACTS, MASK, CachedPrograms, TinyModel, prompts_of

P, G, B = 9, 24, 8
N = P + G


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=1, layers=3)


def alone(model, **options):
    """One prompt of P tokens, one token a step: the positions computed in each forward."""
    config = DecodingConfig(**{"max_new_tokens": G, "block_length": B, "eos": "none", **options})
    output, rows = run_alone(model, prompts_of(P, seed=3)[0], config)
    assert output.stats.forwards == len(rows)
    return rows


def starts(step: int) -> tuple[int, int]:
    """Step in its block, and the block's first position."""
    return step % B, P + step // B * B


def test_prefix_rows(model):
    """Section 7, T1 and T2: N rows at a block start, then [s, N); one forward a token."""
    for step, rows in enumerate(alone(model, cache="prefix")):
        i, s = starts(step)
        assert rows == list(range(N if i == 0 else 0)) + (list(range(s, N)) if i else [])


def test_dual_rows(model):
    """Section 8: N rows at a block start, then b."""
    for step, rows in enumerate(alone(model, cache="dual")):
        i, s = starts(step)
        assert rows == (list(range(s, s + B)) if i else list(range(N)))


@pytest.mark.parametrize("cache", ["prefix", "dual", "vicinity"])
@pytest.mark.parametrize("interval", [1, 2, 3, 8, 100])
def test_refresh_interval(model, cache, interval):
    full = [len(rows) == N for rows in alone(model, cache=cache, refresh_interval=interval)]
    assert full == [step % B % interval == 0 for step in range(G)]


def test_block_finished_by_its_first_forward(model):
    """Section 7: the first forward's own logits commit, and no other forward follows."""
    rows = alone(model, cache="prefix", threshold=0.0)
    assert [len(one) for one in rows] == [N] * 3


def test_dual_and_prefix_agree_in_the_last_block(model):
    """Section 8, T2: without a suffix they are the same."""
    prompts = prompts_of(P, 4, seed=3)
    config = DecodingConfig(max_new_tokens=B, block_length=B, eos="none")
    prefix, dual = (decode(CachedPrograms(model), FACTS, prompts, config.replace(cache=c)) for c in ("prefix", "dual"))
    assert torch.equal(prefix.sequences, dual.sequences)
    assert prefix.stats.row_forwards == dual.stats.row_forwards


@pytest.mark.parametrize("cache", ["prefix", "dual", "vicinity", "dkv", "flash"])
def test_a_step_changes_its_own_rows_of_the_cache_only(model, cache):
    """Section 8, T1, for every policy: keys and values of all other rows stay bit-identical."""

    class Watching(CachedPrograms):
        changed = 0

        def cached_step(self, inputs, cache):
            before = {name: value.clone() for name, value in cache.caches.items()}
            result = super().cached_step(inputs, cache)
            others = torch.ones(len(before["k_cache_0"]), dtype=torch.bool)
            others[cache.cache_rows] = False
            for name, value in cache.caches.items():
                assert torch.equal(value[others], before[name][others])
                self.changed += int((value != before[name]).any())
            return result

    programs = Watching(model)
    options = {"window_length": 4, "lookahead": 3, "track": 4} if cache == "flash" else {}
    config = DecodingConfig(max_new_tokens=G, block_length=B, threshold=0.5, cache=cache, eos="none", **options)
    decode(programs, FACTS, prompts_of(P, 4, 14, seed=3), config)
    assert programs.changed > 0


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (3, 0), (0, 5), (100, 2), (2, 100)])
def test_vicinity_rows(model, before, behind):
    """Section 19.3: the block and its neighbours, clipped to the canvas."""
    for step, rows in enumerate(alone(model, cache="vicinity", prefix_look=before, after_look=behind)):
        i, s = starts(step)
        expected = range(max(0, s - before), min(N, s + B + behind)) if i else range(N)
        assert rows == list(expected)


def test_vicinity_without_looks_is_dual(model):
    assert alone(model, cache="vicinity") == alone(model, cache="dual")
    assert alone(model, cache="vicinity", refresh_interval=3) == alone(model, cache="dual", refresh_interval=3)


@pytest.mark.parametrize("warmup", [1, 5, 11])
def test_vicinity_warm_up(model, warmup):
    full = [len(rows) == N for rows in alone(model, cache="vicinity", warmup_steps=warmup)]
    assert full == [step < warmup or step % B == 0 for step in range(G)]


# --- dKV-Cache (section 14) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_steps", [2, 3, 5, 8])
def test_dkv_rows(model, cache_steps):
    """T1: with one token a step Q^i is all masks and the token of step i - 1; steps 0, 1 and multiples are full."""
    for step, rows in enumerate(alone(model, cache="dkv", cache_steps=cache_steps)):
        i, _ = starts(step)
        full = i in (0, 1) or i % cache_steps == 0
        assert len(rows) == (N if full else G - step + 1)


def test_dkv_computes_a_token_once_more_before_it_is_read(model):
    """T2: what was committed in step i - 1 is in the rows of step i, and in none after it."""
    programs = CachedPrograms(model)
    config = DecodingConfig(max_new_tokens=G, block_length=G, cache="dkv", cache_steps=100, threshold=0.6, eos="none")
    decode(programs, FACTS, prompts_of(P, seed=3), config)
    spare = programs.cache_calls[0].caches["k_cache_0"].shape[0] - 1
    known: list[dict[int, int]] = []
    for call, ids, cache in zip(programs.calls, programs.ids, programs.cache_calls, strict=True):
        real = cache.cache_rows < spare
        pairs = zip(call.positions[real].tolist(), ids[real].tolist(), strict=True)
        known.append({position: token for position, token in pairs if token != MASK})
    assert len(known) > 4
    for step in range(2, len(known)):
        assert len(known[step]) >= 1
        committed_before = set().union(*known[:step])
        fresh = set(known[step]) - committed_before
        assert set(known[step]) == fresh, "no other known row is computed"


def test_dkv_starts_each_block_anew(model):
    """T3: the first two steps of a block read nothing that an earlier block has left."""
    full = [len(rows) == N for rows in alone(model, cache="dkv", cache_steps=100)]
    assert full == [step % B < 2 for step in range(G)]


def test_dkv_block_of_two_steps_is_never_cached(model):
    assert all(len(rows) == N for rows in alone(model, cache="dkv", block_length=2))


# --- rows and tiles --------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([None, 1, 3, 4, 64]))
def test_picked_rows_and_tiles(data, lengths, tile_rows):
    """Against loops: order, inverse, counts, each row in one tile with its sample's keys, padding without keys."""
    flags = [data.draw(st.booleans()) for _ in range(sum(lengths))]
    sample_of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    chosen = torch.tensor(flags)
    size = sum(flags) + data.draw(st.integers(0, 7))
    length = torch.tensor(lengths)
    picked = pick_rows(chosen, length.cumsum(0) - length, length, size)
    expected = [i for i, flag in enumerate(flags) if flag]
    assert picked.rows.tolist() == expected + [0] * (size - len(expected))
    assert picked.real.tolist() == [True] * len(expected) + [False] * (size - len(expected))
    assert picked.place.tolist() == [expected.index(i) if flag else 0 for i, flag in enumerate(flags)]
    by_sample = [[i for i in expected if sample_of_row[i] == s] for s in range(len(lengths))]
    assert picked.counts.tolist() == [len(rows) for rows in by_sample]
    begin = torch.arange(len(lengths)) * 100
    tiles = tiles_of(picked, begin, begin + torch.tensor(lengths), tile_rows)
    assert tiles.dtype == torch.int32
    seen = {}
    for q_begin, q_end, k_begin, k_end in tiles.tolist():
        assert 0 <= q_end - q_begin <= (tile_rows or size)
        for row in range(q_begin, q_end):
            assert row not in seen
            seen[row] = (k_begin, k_end)
    assert sorted(seen) == list(range(size))
    for row, (k_begin, k_end) in seen.items():
        if row >= len(expected):
            assert k_begin == k_end
        else:
            s = int(sample_of_row[expected[row]])
            assert (k_begin, k_end) == (100 * s, 100 * s + lengths[s])


def test_rank_in_sample():
    flags = torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    ranks = rank_in_sample(flags, torch.tensor([0, 3]), torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    assert ranks.tolist() == [0, 1, 1, 0, 1, 1, 2]
