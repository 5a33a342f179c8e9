# SPDX-License-Identifier: Apache-2.0
"""Flash-Cache: the tests of section 10."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.cache.flash_rule import scored_layers
from dllm_compile.runtime.engine import decode

from .policies import rows_of
from .tiny import (
    EOS,
    FACTS,
    MASK,
    CachedPrograms,
    ScriptedPrograms,
    TinyModel,
    assert_equals_cached,
    canvases,
    prompts_of,
)

LONG = dataclasses.replace(FACTS, max_sequence_length=256)
SMALL = {"cache": "flash", "window_length": 4, "lookahead": 6, "track": 5}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=1, eos_bias=1.0, layers=3)


def config_of(**options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 20, "threshold": 0.6, **SMALL, **options})


def forwards(model, prompt, config):
    """For each forward: canvas before it (position -> token, where computed), window positions, computed positions."""
    programs = CachedPrograms(model)
    output = decode(programs, FACTS, [prompt], config)
    found = []
    for call, cache, rows in zip(programs.calls, programs.cache_calls, rows_of(programs), strict=True):
        window = [int(call.positions[row]) for row in cache.window[0].tolist() if row >= 0]
        found.append((window, rows))
    return output, found, programs


def test_first_pass_is_a_dense_forward(model):
    """T1: the same proposals from the same canvas."""
    (prompt,) = prompts_of(7, seed=2)

    class Recording(CachedPrograms):
        first = None

        def all_logits(self, inputs):
            logits = super().all_logits(inputs)
            self.first = logits if self.first is None else self.first
            return logits

    programs = Recording(model)
    decode(programs, FACTS, [prompt], config_of())
    ids = programs.ids[0]
    canvas = torch.cat([prompt, torch.full((20,), MASK)])
    assert torch.equal(ids, canvas)
    logits = model.forward(canvas[None])[0]
    torch.testing.assert_close(programs.first, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("track", [0, 4, 5, 9])
def test_rows_of_each_step(model, track):
    """T2: window + look-ahead + tracked rows until masks run out; pinned rows count towards the budget."""
    (prompt,) = prompts_of(30, seed=2)
    config = config_of(track=track, commit="quota", threshold=None, eos="none")
    _, steps, _ = forwards(model, prompt, config)
    assert len(steps) == 20
    for step, (window, rows) in enumerate(steps):
        masks = 20 - step
        expected = min(masks, 10) + max(track, 1) if step else 50
        assert len(rows) == expected
        assert len(window) == min(4, masks)


def test_published_rows_of_each_step(model):
    """T2 with the defaults: 16 + 48 + 64 rows until fewer than 64 masks are left, with verification or without."""
    (prompt,) = prompts_of(100, seed=2)
    for options in ({"threshold": 0.6}, {"commit": "flash_verify", "threshold": 0.6, "gamma": 0.1}):
        config = DecodingConfig(cache="flash", max_new_tokens=100, eos="none", **options)
        programs = CachedPrograms(model)
        decode(programs, LONG, [prompt], config)
        rows = rows_of(programs)
        assert len(rows[0]) == 200
        before = 100
        for computed, ids in zip(rows[1:], programs.ids[1:], strict=True):
            shown = int((ids[: len(computed)] == MASK).sum())
            assert len(computed) == shown + 64
            assert shown == 64 or shown < before, "all masks that are left are computed, and each step commits one"
            before = shown
        assert [len(one) for one in rows].count(128) >= 3
        assert len(rows[-1]) < 128


def test_window_is_the_leftmost_masks(model):
    """T3, at every step, whatever was committed."""
    for seed in range(4):
        (prompt,) = prompts_of(6, seed=seed)
        output, steps, programs = forwards(model, prompt, config_of())
        known = set(range(6))
        for (window, _), ids, call in zip(steps, programs.ids, programs.calls, strict=True):
            known |= {p for p, t in zip(call.positions.tolist(), ids.tolist(), strict=True) if t != MASK}
            assert window == [p for p in range(26) if p not in known][:4]
        assert output.stats.forwards == len(steps)


def test_committed_tokens_are_computed_in_the_next_step(model):
    """10.6, all of them, also when they are more than the budget."""
    (prompt,) = prompts_of(6, seed=2)
    config = config_of(track=0, window_length=8, threshold=0.2, eos="none")
    output, steps, programs = forwards(model, prompt, config)
    final = output.sequences[0]
    masks = set(range(6, 26))
    many = 0
    for step in range(1, len(steps)):
        computed = set(steps[step][1])
        ids, positions = programs.ids[step], programs.calls[step].positions
        now = {int(p) for p, t in zip(positions, ids, strict=True) if t != MASK} & masks
        assert now <= computed
        many = max(many, len(now))
        masks -= now
        # Whatever is still a mask must be one for the model as well.
        for p, t in zip(positions.tolist(), ids.tolist(), strict=True):
            assert (t == MASK) == (p in masks) or t == final[p]
    assert many > 1


def test_budget_below_zero_is_a_sliding_window_without_a_cache(model):
    """G1, against dense forwards over the whole canvas."""
    config = config_of(track=-1)
    for prompt in prompts_of(1, 5, 12, seed=8):
        output = decode(CachedPrograms(model), FACTS, [prompt], config)
        canvas = prompt.tolist() + [MASK] * 20
        end = len(canvas)
        while [p for p in range(end) if canvas[p] == MASK]:
            window = [p for p, t in enumerate(canvas) if t == MASK][:4]
            logits = model.forward(torch.tensor([canvas]))[0].double()
            probability = logits.softmax(-1)
            proposal = {p: int(logits[p].masked_fill(torch.arange(40) == MASK, -torch.inf).argmax()) for p in window}
            sure = {p: float(probability[p, proposal[p]]) for p in window if p < end}
            best = max(sure, key=lambda p: (sure[p], -p))
            taken = [p for p in sure if sure[p] >= 0.6 or p == best]
            for p in taken:
                canvas[p] = proposal[p]
            ends = [p + 1 for p in taken if canvas[p] == EOS]
            if ends and end == len(canvas):
                end = min(ends)
        expected = [EOS if t == MASK else t for t in canvas]
        assert output.sequences[0].tolist() == expected


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_score_by_linearity(kv_heads):
    """T4: one summed query against the (window x heads x keys) sum, grouped heads included."""
    generator = torch.Generator().manual_seed(kv_heads)
    q, k = torch.randn(9, 4, 8, generator=generator), torch.randn(30, kv_heads, 8, generator=generator)
    window = torch.tensor([[0, 3, 8, -1], [-1, -1, -1, -1]])
    spans = torch.tensor([[4, 21], [0, 0]], dtype=torch.int32)
    scores = torch.full((30,), 0.5)
    torch.ops.dllm.row_scores(q, window, k, spans, scores)
    dense = torch.einsum("qhd,khd->qhk", q[[0, 3, 8]], k.repeat_interleave(4 // kv_heads, 1)).sum((0, 1))
    torch.testing.assert_close(scores[4:21] - 0.5, dense[4:21], rtol=1e-4, atol=1e-4)
    assert torch.equal(scores[4:21].argsort(), dense[4:21].argsort())
    assert (scores[:4] == 0.5).all()
    assert (scores[21:] == 0.5).all()


def test_scored_layers():
    paper, released = config_of(score_layers="all"), config_of()
    assert scored_layers(paper, 5) == (0, 1, 2, 3, 4)
    assert scored_layers(released, 5) == (2, 3, 4)
    assert scored_layers(released, 3) == (2,)
    assert scored_layers(released, 2) == (0, 1), "no third layer: all count"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_refilled_slots_equal_fresh_runs(model, slots):
    """T5, with prompts of many lengths through few slots."""
    prompts = prompts_of(3, 17, 1, 9, 26, 5, 12, seed=5)
    config = config_of(slots=slots)
    output, _ = assert_equals_cached(CachedPrograms(model), prompts, config)
    for row, prompt, i in zip(canvases(output, prompts, config), prompts, range(7), strict=True):
        assert row == decode(CachedPrograms(model), FACTS, [prompt], config.replace(seed=i)).sequences[0].tolist()


@pytest.mark.parametrize("new_tokens", [1, 3, 15, 16, 17])
@pytest.mark.parametrize("eos", ["first", "none"])
def test_nothing_is_committed_behind_the_canvas(model, new_tokens, eos):
    """T6: fewer masks than the window, and exactly as many; the published sizes."""
    config = DecodingConfig(max_new_tokens=new_tokens, cache="flash", threshold=0.9, eos=eos)
    output, _ = assert_equals_cached(CachedPrograms(model), prompts_of(4, 20, seed=3), config)
    assert output.stats.canvas_tokens <= 2 * new_tokens


def test_ends_in_one_batch():
    """T7: one sample meets its end early, another one never; masks behind an end are seen, not committed."""
    tokens = [9, 9, 9, 9, EOS, 7, 8, 9, 10, 11, 12, 13]
    confidence = [0.0, 0.0, 0.0, 0.2, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    prompts = [torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4, 5])]
    config = DecodingConfig(max_new_tokens=7, **{**SMALL, "window_length": 3})
    output = decode(ScriptedPrograms(tokens, confidence), FACTS, prompts, config)
    assert output.sequences[0, 3:].tolist() == [1, 2, 9, 9, EOS, EOS, EOS, EOS, EOS]
    assert output.sequences[1].tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13]
    assert output.stats.forwards_per_row == (3, 7)
    assert output.stats.canvas_tokens == 3 + 7


def test_rightmost_end():
    """The released code's choice: the later of two stop ids of one step."""
    tokens = [9, EOS, 8, EOS, 9, 9]
    for eos, expected in (("first", [9, EOS, EOS, EOS, EOS]), ("rightmost", [9, EOS, 8, EOS, EOS])):
        programs = ScriptedPrograms([0, *tokens], [0.0, 0.1, 0.9, 0.2, 0.8, 0.1, 0.1])
        config = DecodingConfig(max_new_tokens=5, **{**SMALL, "threshold": 0.75}, eos=eos)
        assert decode(programs, FACTS, [torch.tensor([1])], config).sequences[0, 1:].tolist() == expected


@pytest.mark.parametrize("rule", ["threshold", "flash_verify"])
@pytest.mark.parametrize("length", [1, 12, 63, 64, 65, 129])
def test_prompt_lengths(model, length, rule):
    """T8: fewer decoded rows than are tracked, as many, and more."""
    config = DecodingConfig(max_new_tokens=24, cache="flash", commit=rule, threshold=0.6)
    assert_equals_cached(CachedPrograms(model), prompts_of(length, seed=length), config, LONG)


def test_keys_end_where_the_canvas_ends(model):
    """T9: other samples, and room behind the longest, change nothing."""
    prompts = prompts_of(5, 40, seed=2)
    config = config_of()
    alone = decode(CachedPrograms(model), FACTS, prompts[:1], config).sequences[0].tolist()
    for slots in (None, 1):
        both = decode(CachedPrograms(model), FACTS, prompts, config.replace(slots=slots))
        assert canvases(both, prompts, config)[0] == alone


def test_equal_scores_rank_by_position(model, monkeypatch):
    """All scores equal: the last decoded positions are tracked, and with them the token of the step before."""
    monkeypatch.setattr(CachedPrograms, "_score", staticmethod(lambda q, keys, cache: None))
    (prompt,) = prompts_of(20, seed=2)
    config = config_of(commit="quota", threshold=None, track=3, eos="none")
    _, steps, programs = forwards(model, prompt, config)
    known = set(range(20))
    for step in range(1, 20):
        tokens = dict(zip(programs.calls[step].positions.tolist(), programs.ids[step].tolist(), strict=True))
        tracked = {position for position in steps[step][1] if tokens[position] != MASK}
        (fresh,) = tracked - known
        assert tracked == {fresh, *sorted(known)[-2:]}
        known.add(fresh)
