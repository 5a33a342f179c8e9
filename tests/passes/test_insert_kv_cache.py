# SPDX-License-Identifier: Apache-2.0
"""Row programs over a key/value cache: what they compute, what they write, and that nothing is copied."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import dllm_compile
from dllm_compile.costs import program_costs
from dllm_compile.passes import run_passes
from dllm_compile.passes.flatten_rows import WHOLE_SAMPLE, flatten_rows_pass
from dllm_compile.passes.graph import find, share
from dllm_compile.passes.insert_kv_cache import cache_names, insert_kv_cache_pass
from dllm_compile.runtime.row_programs import CacheInputs, StepInputs

from ..conftest import tiny_model

LENGTHS, OFFSETS, CACHE_ROWS = (13, 9), (0, 20), 40
NONE = torch.tensor([-1])


@pytest.fixture(scope="module")
def optimized():
    """A tiny model and its programs, uncompiled."""
    model = tiny_model()
    return model, dllm_compile.optimize(model, compile=False)


def _caches(shape, fill=float("nan")):
    size = (CACHE_ROWS, shape.kv_heads, shape.head_dim)
    return {name: torch.full(size, fill) for name in cache_names(shape.layers)}


def _step(ids, chosen, wanted):
    """Inputs of a step over the `chosen` positions of each sample."""
    rows = [sample[positions] for sample, positions in zip(ids, chosen, strict=True)]
    ends = torch.tensor([len(part) for part in rows]).cumsum(0)
    tiles = [
        [int(end) - len(part), int(end), offset, offset + length]
        for end, part, offset, length in zip(ends, rows, OFFSETS, LENGTHS, strict=True)
    ]
    inputs = StepInputs(
        ids=torch.cat(rows),
        positions=torch.cat(chosen),
        tiles=torch.tensor(tiles, dtype=torch.int32),
        wanted=wanted,
        banned=NONE,
    )
    return inputs, torch.cat([p + offset for p, offset in zip(chosen, OFFSETS, strict=True)])


def _samples(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 40, (n,), generator=generator) for n in LENGTHS]


ALL = [torch.arange(n) for n in LENGTHS]


def _dense(model, ids, mask_token_id):
    """Token and confidence of every row, by the definition."""
    logits = torch.cat([model(sample[None]).logits[0] for sample in ids]).detach().double()
    proposal = logits.clone()
    proposal[:, mask_token_id] = -torch.inf
    token = proposal.argmax(-1)
    return token, logits.softmax(-1).gather(1, token[:, None])[:, 0]


def test_all_rows_equal_the_dense_forward_and_fill_the_cache(optimized):
    model, fast = optimized
    ids, caches = _samples(), _caches(fast.programs.shape)
    inputs, rows = _step(ids, ALL, torch.arange(sum(LENGTHS)))
    token, confidence = fast.programs.cached_step(inputs, CacheInputs(caches, rows))
    expected, probability = _dense(model, ids, fast.facts.mask_token_id)
    assert torch.equal(token, expected)
    torch.testing.assert_close(confidence.double(), probability, rtol=1e-5, atol=1e-6)
    written = torch.zeros(CACHE_ROWS, dtype=torch.bool)
    written[rows] = True
    for cache in caches.values():
        assert cache[written].isfinite().all()
        assert cache[~written].isnan().all(), "a row outside the samples was written"


def test_a_step_writes_its_rows_only_and_uses_stale_rows_elsewhere(optimized):
    """One changed token, two rows computed: a stale-state forward written out by hand gives the same."""
    _, fast = optimized
    ids, caches = _samples(), _caches(fast.programs.shape)
    fill, rows = _step(ids, ALL, torch.arange(sum(LENGTHS)))
    fast.programs.cached_step(fill, CacheInputs(caches, rows))
    before = {name: cache.clone() for name, cache in caches.items()}
    ids[0][4], ids[1][2] = 7, 9
    chosen = [torch.tensor([4, 5]), torch.tensor([1, 2, 8])]
    inputs, rows = _step(ids, chosen, torch.arange(5))
    token, confidence = fast.programs.cached_step(inputs, CacheInputs(caches, rows))
    kept = torch.ones(CACHE_ROWS, dtype=torch.bool)
    kept[rows] = False
    for name, cache in caches.items():
        assert torch.equal(cache[kept].nan_to_num(), before[name][kept].nan_to_num()), name
    # The same rows computed in another order over the same stale state.
    again = {name: cache.clone() for name, cache in before.items()}
    swapped = [torch.tensor([5, 4]), torch.tensor([8, 2, 1])]
    inputs, rows = _step(ids, swapped, torch.tensor([1, 0, 4, 3, 2]))
    token_again, confidence_again = fast.programs.cached_step(inputs, CacheInputs(again, rows))
    assert torch.equal(token, token_again)
    torch.testing.assert_close(confidence, confidence_again, rtol=1e-5, atol=1e-6)


def test_padding_rows_write_a_spare_row_and_change_nothing(optimized):
    _, fast = optimized
    ids, caches = _samples(), _caches(fast.programs.shape, fill=0.0)
    inputs, rows = _step(ids, ALL, torch.tensor([3, 15]))
    plain = fast.programs.cached_step(inputs, CacheInputs(caches, rows))
    padded_caches = _caches(fast.programs.shape, fill=0.0)
    count = sum(LENGTHS)
    padded = StepInputs(
        ids=torch.cat((inputs.ids, torch.zeros(6, dtype=torch.int64))),
        positions=torch.cat((inputs.positions, torch.zeros(6, dtype=torch.int64))),
        tiles=torch.cat((inputs.tiles, torch.tensor([[count, count + 6, 0, 0]], dtype=torch.int32))),
        wanted=inputs.wanted,
        banned=NONE,
    )
    spare = torch.full((6,), CACHE_ROWS - 1)
    both = fast.programs.cached_step(padded, CacheInputs(padded_caches, torch.cat((rows, spare))))
    assert torch.equal(plain[0], both[0])
    torch.testing.assert_close(plain[1], both[1], rtol=1e-5, atol=1e-6)
    for name, cache in caches.items():
        torch.testing.assert_close(cache[:-1], padded_caches[name][:-1], rtol=1e-5, atol=1e-5)


def test_scores_equal_the_dense_definition(optimized):
    """Sum over window rows, heads and scored layers of the raw logits, from the caches and rotated queries."""
    _, fast = optimized
    shape = fast.programs.shape
    ids, caches = _samples(), _caches(shape)
    inputs, rows = _step(ids, ALL, torch.arange(sum(LENGTHS)))
    window = torch.tensor([[2, 3, -1], [14, 15, 16]])
    spans = torch.tensor([[o, o + n] for o, n in zip(OFFSETS, LENGTHS, strict=True)], dtype=torch.int32)
    totals = {}
    for scored in ((0,), (1,), (0, 1)):
        scores = torch.zeros(CACHE_ROWS)
        fast.programs.cached_step(inputs, CacheInputs(caches, rows, scored, window, spans, scores))
        totals[scored] = scores
    torch.testing.assert_close(totals[0,] + totals[1,], totals[0, 1], rtol=1e-5, atol=1e-5)
    # Layer 0 by hand: its queries depend on tokens and positions alone.
    queries = _layer_zero_queries(fast, inputs)
    groups = shape.heads // shape.kv_heads
    expected = torch.zeros(CACHE_ROWS, dtype=torch.float64)
    for sample, (begin, end) in enumerate(spans.tolist()):
        for row in window[sample].tolist():
            if row < 0:
                continue
            for head in range(shape.heads):
                keys = caches["k_cache_0"][begin:end, head // groups].double()
                expected[begin:end] += keys @ queries[row, head].double()
    torch.testing.assert_close(totals[0,].double(), expected, rtol=1e-4, atol=1e-4)


def _layer_zero_queries(fast, inputs):
    block = fast.model.model.transformer["blocks"][0]
    with torch.no_grad():
        x = fast.model.model.transformer["wte"](inputs.ids)
        q = block.q_proj(block.attn_norm(x))
    cos, sin = fast._captured.gm.rope_cos, fast._captured.gm.rope_sin
    return torch.ops.dllm.rope(q, cos, sin, inputs.positions, fast.programs.shape.heads)


@pytest.mark.parametrize("disable", [(), ("pack_qkv",)])
@pytest.mark.parametrize("scored", [(), (1,)])
def test_operators_of_the_program(disable, scored):
    gm = share(dllm_compile.optimize(tiny_model(), compile=False, disable=disable)._captured.gm)
    results = run_passes(gm, (flatten_rows_pass(WHOLE_SAMPLE), insert_kv_cache_pass(scored)), layers=2)
    assert results[-1].matches == 2
    ops = torch.ops.dllm
    fused, plain = find(gm, ops.qkv_rope_cache_write.default), find(gm, ops.write_rows.default)
    assert (len(fused), len(plain)) == ((0, 4) if disable else (2, 0))
    assert len(find(gm, ops.row_attention_scored.default)) == len(scored)
    assert len(find(gm, ops.cached_attention.default)) == 2 - len(scored)
    assert len(find(gm, ops.rope.default)) == (4 if disable else 0)


def test_cost_of_a_step_grows_with_its_rows_not_with_the_cache(optimized):
    """Bytes of a layer's write are those of its rows; attention reads the keys its tiles name."""
    _, fast = optimized
    shape = fast.programs.shape
    gm = share(fast._captured.gm)
    run_passes(gm, (flatten_rows_pass(WHOLE_SAMPLE), insert_kv_cache_pass()), layers=2)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def cost(rows, cache_rows):
        tiles = torch.tensor([[0, rows, 0, 50]], dtype=torch.int32)
        inputs = {"tiles": tiles, **{name: torch.empty(rows, dtype=torch.int64) for name in ("ids", "positions")}}
        inputs["cache_rows"] = inputs["ids"]
        inputs |= {name: torch.empty(cache_rows, shape.kv_heads, shape.head_dim) for name in cache_names(2)}
        return program_costs(gm, inputs)

    names = ("dllm.qkv_rope_cache_write", "dllm.cached_attention")
    small, large = ([next(c for c in cost(8, size) if c.operator == name) for name in names] for size in (60, 6000))
    assert small == large
    assert small[0].bytes == 4 * (2 * 8 * width + 2 * 8 * shape.head_dim) + 2 * 8 * 8
    assert small[1].flops == 4 * 8 * 50 * shape.heads * shape.head_dim


def test_compiled_code_copies_no_cache(optimized):
    """Writes reach the caches in place: no clone, no copy of cache size in the generated code."""
    model, _ = optimized
    fast = dllm_compile.optimize(model, compile=True)
    ids, caches = _samples(), _caches(fast.programs.shape)
    inputs, rows = _step(ids, ALL, torch.arange(sum(LENGTHS)))
    (token, _), sources = run_and_get_code(fast.programs.cached_step, inputs, CacheInputs(caches, rows))
    assert torch.equal(token, _dense(model, ids, fast.facts.mask_token_id)[0])
    assert sources, "nothing was compiled"
    code = "\n".join(sources)
    assert len(re.findall(r"torch\.ops\.dllm\.qkv_rope_cache_write\.default\(", code)) == 2
    assert "clone" not in code
    cache_copies = [line for line in code.splitlines() if "copy_(" in line]
    assert not cache_copies, cache_copies


def test_compiled_scoring_copies_nothing(optimized):
    """Zeros are made once for all layers, scores are added to in place, and are those of the uncompiled program."""
    model, plain = optimized
    fast = dllm_compile.optimize(model, compile=True)
    inputs, rows = _step(_samples(), ALL, torch.arange(sum(LENGTHS)))
    window = torch.tensor([[2, 3, -1], [14, 15, 16]])
    spans = torch.tensor([[o, o + n] for o, n in zip(OFFSETS, LENGTHS, strict=True)], dtype=torch.int32)
    found = []
    for programs in (fast.programs, plain.programs):
        scores = torch.full((CACHE_ROWS,), 0.25)
        cache = CacheInputs(_caches(plain.programs.shape), rows, (0, 1), window, spans, scores)
        _, sources = run_and_get_code(programs.cached_step, inputs, cache)
        found.append((scores, "\n".join(sources)))
    (scores, code), (expected, _) = found
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)
    calls = re.findall(r"torch\.ops\.dllm\.row_attention_scored\.default\((.*)\)", code)
    assert len(calls) == 2
    by_head, arrived = ({call.split(", ")[-i] for call in calls} for i in (2, 1))
    assert len(by_head) == len(arrived) == 1, "both layers add to one array, and count with one"
    assert "clone" not in code
