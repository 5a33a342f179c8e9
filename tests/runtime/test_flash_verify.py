# SPDX-License-Identifier: Apache-2.0
"""Decoding with Flash-Verify: the tests of section 11, and the generic ones (1.7) where they apply."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.session import SessionPool

from .tiny import (
    EOS,
    FACTS,
    MASK,
    VOCAB,
    CachedPrograms,
    ScriptedPrograms,
    TinyModel,
    assert_equals_cached,
    cached,
    canvases,
    prompts_of,
)

VERIFY = {"cache": "flash", "commit": "flash_verify"}
SMALL = {"window_length": 6, "lookahead": 4, "track": 6}
RULES = {"product": {"gamma": 0.1}, "per_token": {"gamma": 0.2}}
LENGTHS = (1, 5, 12, 31)
STOP = 5  # an id that the model does propose


def sharp(seed: int = 4, layers: int = 3, eos_bias: float = 1.0, factor: float = 1.4, **options) -> TinyModel:
    """A tiny model that is surer of itself, so that drafts are accepted and refused."""
    model = TinyModel(seed=seed, eos_bias=eos_bias, layers=layers, **options)
    model.head = model.head * factor
    return model


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return sharp()


def config_of(rule: str = "product", **options) -> DecodingConfig:
    parameters = {"verify_rule": rule, "threshold": 0.6, "max_new_tokens": 20, **RULES[rule]}
    return DecodingConfig(**{**VERIFY, **parameters, **options})


@pytest.mark.parametrize("eos", ["first", "none"])
@pytest.mark.parametrize("new_tokens", [16, 48])
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_reference(model, rule, new_tokens, eos):
    """Tokens, forwards and computed rows: ragged four (short prompts too, T8), and the first alone; T3 inside."""
    prompts = prompts_of(*LENGTHS, seed=3)
    config = config_of(rule, max_new_tokens=new_tokens, eos=eos, eos_token_id=STOP)
    output, expected = assert_equals_cached(CachedPrograms(model), prompts, config)
    verdicts = [pair for one in expected for pair in one.accepted]
    assert any(kept for _, kept in verdicts), "no draft was accepted"
    assert any(kept < tried for tried, kept in verdicts), "no draft was refused"
    assert output.stats.canvas_tokens <= 4 * new_tokens
    assert (output.stats.canvas_tokens < 4 * new_tokens) == (eos == "first"), "an end is met, or none is asked for"
    for one in expected:
        assert max(one.commits) <= config.window_length
        assert min(one.commits) >= 1
    alone, _ = assert_equals_cached(CachedPrograms(model), prompts[:1], config)
    assert alone.sequences[0].tolist() == expected[0].canvas


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        {**SMALL, "track": 0, "lookahead": 0},
        {**SMALL, "verify_rows": 9, "verify_candidates": 3},
        {**SMALL, "verify_context": 0},
        {**SMALL, "verify_context": 5, "verify_rows": 40, "verify_candidates": 6},
        {"window_length": 1},
        {"window_length": 3, "score_layers": "all"},
        {**SMALL, "eos": "rightmost"},
        {**SMALL, "eos": "first", "confidence_eos_eot_inf": True, "gamma": 0.05},
        {**SMALL, "logits_eos_inf": True},
        {**SMALL, "slots": 2},
        {**SMALL, "track": -1},
    ],
    ids=str,
)
def test_options_equal_the_reference(model, rule, options):
    prompts = prompts_of(7, 1, 19, seed=6)
    assert_equals_cached(CachedPrograms(model), prompts, config_of(rule, **options))


@pytest.mark.parametrize("rule", RULES)
def test_masks_inside_a_prompt(model, rule):
    (prompt,) = prompts_of(14, seed=4)
    prompt[[2, 3, 9]] = MASK
    output, _ = assert_equals_cached(CachedPrograms(model), [prompt], config_of(rule, infill=True, **SMALL))
    known = prompt != MASK
    assert output.sequences[0, :14][known].tolist() == prompt[known].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_above_one_it_is_the_threshold_rule(model, rule):
    """T4: nothing is accepted; tokens and steps are those of confidence mode, and every pass is counted."""
    prompts = prompts_of(*LENGTHS, seed=3)
    config = config_of(rule, gamma=1.1, **SMALL)
    plain = DecodingConfig(cache="flash", threshold=0.6, max_new_tokens=20, **SMALL)
    verified, confident = (decode(CachedPrograms(model), FACTS, prompts, one) for one in (config, plain))
    assert torch.equal(verified.sequences, confident.sequences)
    passes = [len(one.passes) for one in cached(model, prompts, config)]
    steps = confident.stats.forwards_per_row
    assert verified.stats.forwards_per_row == tuple(a + b for a, b in zip(steps, passes, strict=True))
    assert verified.stats.forwards == 2 * confident.stats.forwards, "a pass without drafts is run all the same"


def test_at_zero_every_draft_is_accepted(model):
    """T4: so a step commits min(masks, window) tokens where the draft rule leaves no more than the candidates."""
    for result in cached(model, prompts_of(*LENGTHS, seed=3), config_of(gamma=0.0, eos="none", **SMALL)):
        assert result.accepted
        assert all(tried == kept for tried, kept in result.accepted)
    config = config_of(gamma=0.0, eos="none", verify_candidates=6, **SMALL)
    output = decode(CachedPrograms(model), FACTS, prompts_of(9, seed=3), config)
    assert output.stats.forwards == 2 * 4  # 20 tokens, six a step


def test_product_never_takes_fewer_steps_than_needed(model):
    """T5 at work: in the first step, where both rules see the same, the product accepts a prefix of the other's."""
    for prompt in prompts_of(*LENGTHS, seed=9):
        rules = [config_of(rule, gamma=0.55) for rule in RULES]
        by_product, by_token = (cached(model, [prompt], config)[0] for config in rules)
        assert by_product.passes[:1] == by_token.passes[:1]
        if by_product.accepted:
            assert by_product.accepted[0][0] == by_token.accepted[0][0]
            assert by_product.accepted[0][1] <= by_token.accepted[0][1]


@pytest.mark.parametrize("rule", RULES)
def test_one_layer_equals_whole_sequences(rule):
    """G2 and T1: keys of layer 0 are never stale, so every forward is a dense one over its own sequence."""
    model = sharp(seed=2, layers=1)
    config = config_of(rule, eos="none", **SMALL)
    for prompt in prompts_of(*LENGTHS, seed=8):
        canvas = prompt.tolist() + [MASK] * 20
        forwards = 0
        while MASK in canvas:
            window = [p for p, token in enumerate(canvas) if token == MASK][:6]
            found = dense(model, canvas, window)
            forwards += 1
            ranked = sorted(window, key=lambda p: (-found[p][1], p))
            taken = [p for i, p in enumerate(ranked) if i == 0 or found[p][1] >= 0.6]
            for p in taken:
                canvas[p] = found[p][0]
            left = [p for p in ranked if p not in taken][:3]
            forwards += bool(left)
            joint, filled = 1.0, list(canvas)
            for p in left:
                token, q, share = dense(model, filled, [p], found[p][0])[p]
                joint *= share
                passes = joint >= config.gamma if rule == "product" else token == found[p][0] and q >= config.gamma
                if not passes:
                    break
                canvas[p] = found[p][0]
                filled[p] = found[p][0]
        output = decode(CachedPrograms(model), FACTS, [prompt], config)
        assert output.sequences[0].tolist() == canvas
        assert output.stats.forwards_per_row == (forwards,)


def dense(model, canvas, positions, given=0):
    """Best token, its probability and that of `given` at some positions, by one forward over the whole canvas."""
    share = model.forward(torch.tensor([canvas]))[0].double().softmax(-1)
    best = share.index_fill(1, torch.tensor([MASK]), -1.0).argmax(-1)
    return {p: (int(best[p]), float(share[p, best[p]]), float(share[p, given])) for p in positions}


@pytest.mark.parametrize("check_every", [1, 3, 50])
def test_looks_change_nothing(model, check_every):
    """G8."""
    prompts = prompts_of(*LENGTHS, seed=3)
    config = config_of(**SMALL)
    once, seldom = (
        decode(CachedPrograms(model), FACTS, prompts, config.replace(check_every=n)) for n in (1, check_every)
    )
    assert torch.equal(once.sequences, seldom.sequences)
    assert once.stats.forwards_per_row == seldom.stats.forwards_per_row
    assert once.stats.row_forwards == seldom.stats.row_forwards


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_sample_does_not_depend_on_the_others(model, slots):
    """G4, also through few slots."""
    prompts = prompts_of(3, 17, 1, 9, 26, 5, 12, seed=5)
    config = config_of("per_token", slots=slots, **SMALL)
    output = decode(CachedPrograms(model), FACTS, prompts, config)
    for i, (row, prompt) in enumerate(zip(canvases(output, prompts, config), prompts, strict=True)):
        alone = decode(CachedPrograms(model), FACTS, [prompt], config)
        assert row == alone.sequences[0].tolist()
        assert output.stats.forwards_per_row[i] == alone.stats.forwards_per_row[0]


@pytest.mark.parametrize("rule", RULES)
def test_buffers_that_stay_change_nothing(model, rule):
    """A session serves calls with other prompts; left over rows and empty seats verify nothing and see nothing."""
    pool, config = SessionPool(), config_of(rule, slots=3, **SMALL)
    programs = CachedPrograms(model)
    for seed, lengths in enumerate([(3, 17, 1, 9, 26, 5), (30, 2, 7), (4, 1, 30, 2)]):
        prompts = prompts_of(*lengths, seed=seed)
        kept = decode(programs, FACTS, prompts, config, sessions=pool)
        fresh = decode(CachedPrograms(model), FACTS, prompts, config)
        assert torch.equal(kept.sequences, fresh.sequences)
        assert kept.stats.forwards_per_row == fresh.stats.forwards_per_row
        assert kept.stats.row_forwards == fresh.stats.row_forwards
    assert {len(inputs.ids) for inputs, _ in programs.verify_calls} == {3 * 12}, "three seats, twelve rows each"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads):
    """G9."""
    assert_equals_cached(
        CachedPrograms(sharp(seed=3, kv_heads=kv_heads)), prompts_of(5, 12, seed=1), config_of(**SMALL)
    )


@pytest.mark.parametrize("new_tokens", [1, 3, 15, 16, 17])
def test_nothing_is_committed_behind_the_canvas(model, new_tokens):
    """Fewer masks than the window holds, as many, and more; a commit too far would show in the next sample."""
    prompts = prompts_of(4, 20, 2, seed=3)
    config = config_of("per_token", gamma=0.0, max_new_tokens=new_tokens, eos="none")
    output, _ = assert_equals_cached(CachedPrograms(model), prompts, config)
    assert output.stats.canvas_tokens == 3 * new_tokens


def test_committed_tokens_are_context_and_then_tracked(model):
    """10.6 and 11.1: tokens of the first forward have a row in the pass, and all of a step are computed in the next."""
    (prompt,) = prompts_of(30, seed=2)
    config = config_of(gamma=0.0, threshold=0.7, eos="none", track=0, window_length=8, lookahead=0, verify_candidates=7)
    programs = CachedPrograms(model)
    decode(programs, FACTS, [prompt], config)
    calls = [
        {int(p): int(t) for p, t in zip(call.positions, ids, strict=True)}
        for call, ids in zip(programs.calls, programs.ids, strict=True)
    ]
    several = 0
    for before, after, (inputs, verify) in zip(calls, calls[1:], programs.verify_calls, strict=False):
        views = zip(inputs.positions.tolist(), inputs.ids.tolist(), verify.views.tolist(), strict=True)
        rows = [(position, token) for position, token, (depth, *_) in views if depth >= 0]
        tokens = {p: t for p, t in rows if t != MASK}
        window = [p for p, t in before.items() if t == MASK][:8]
        assert set(window) <= set(after), "tokens of both forwards are computed in the next step"
        assert MASK not in {after[p] for p in window}, "gamma = 0 keeps every draft"
        if rows:
            assert {p: after[p] for p in window} == {p: tokens[p] for p in window}, "each is context, or a draft"
            several += len(window) > 1
    assert several > 1


class Scripted(ScriptedPrograms):
    """Also says how likely a draft is under its mask, by canvas position."""

    def __init__(self, tokens, confidence, verified):
        super().__init__(tokens, confidence)
        self.verified = torch.tensor(verified)
        self.asked: list[list[int]] = []

    def verify_step(self, inputs, verify):
        at = inputs.positions[inputs.wanted]
        depth = verify.views[inputs.wanted, 0]
        self.asked.append(at[(inputs.ids[inputs.wanted] == MASK) & (depth >= 0)].tolist())
        return self.tokens[at], self.verified[at], self.verified[at]


def test_a_stop_id_of_the_first_forward_ends_the_search():
    """T7: a candidate behind the new end is none, however confident, and blocks nobody before it."""
    tokens = [0, 9, 8, EOS, 7, 6, 5, 4]
    programs = Scripted(tokens, [0.0, 0.3, 0.2, 0.95, 0.8, 0.7, 0.6, 0.5], [0.9] * 8)
    config = config_of(threshold=0.9, gamma=0.8, max_new_tokens=7)
    output = decode(programs, FACTS, [torch.tensor([1])], config)
    assert programs.asked == [[1, 2]]
    # 0.9 >= 0.8, 0.81 >= 0.8: both are kept, and the answer is complete.
    assert output.sequences[0].tolist() == [1, 9, 8, EOS, EOS, EOS, EOS, EOS]
    assert output.stats.forwards_per_row == (2,)
    assert output.stats.canvas_tokens == 3


def test_a_stop_id_of_the_second_forward_ends_the_answer():
    """The leftmost of the step, whichever forward committed it."""
    tokens = [0, 9, EOS, 8, EOS, 7, 6]
    confidence = [0.0, 0.5, 0.6, 0.4, 0.95, 0.3, 0.2]
    for eos, end in (("first", 2), ("rightmost", 4)):
        programs = Scripted(tokens, confidence, [1.0] * 7)
        config = config_of(threshold=0.9, gamma=0.8, max_new_tokens=6, eos=eos)
        output = decode(programs, FACTS, [torch.tensor([1])], config)
        assert programs.asked[0] == [2, 1, 3], "by confidence"
        assert output.stats.canvas_tokens == end
        assert output.sequences[0, :4].tolist() == [1, 9, EOS, 8]


def test_a_pass_without_drafts_is_not_counted():
    """S = 0: everything was confident. The pass runs in the batch, but no row had a forward more."""
    programs = Scripted([0, 9, 8, 7], [0.0, 0.95, 0.95, 0.95], [0.0] * 4)
    output = decode(programs, FACTS, [torch.tensor([1])], config_of(threshold=0.9, max_new_tokens=3, eos="none"))
    assert programs.asked == [[]]
    assert output.stats.forwards_per_row == (1,)
    assert output.stats.forwards == 2


def test_stop_ids_that_come_last_are_never_accepted():
    """confidence_eos_eot_inf: no confidence in the first forward, none in the second."""
    tokens = [0, 9, EOS, 8]
    for rule in RULES:
        programs = Scripted(tokens, [0.0, 0.95, 0.8, 0.7], [1.0] * 4)
        config = config_of(rule, threshold=0.9, gamma=0.8, max_new_tokens=3, confidence_eos_eot_inf=True)
        decode(programs, FACTS, [torch.tensor([1])], config)
        assert programs.asked[0] == [3, 2]
        assert programs.asked[1:] == [[]], "8 was accepted, the stop id left to the next step"


def test_bounds_of_the_appendix_by_enumeration():
    """Total variation of an accepted group and the model's own sequential distribution of it, every outcome counted.

    One accepted token: 1 - q <= 1 - gamma. A group of m: 1 - gamma^m (per token), 1 - gamma (product).
    """
    checked = 0
    for seed in range(4):
        model = sharp(seed=seed, layers=1, factor=1.8)
        (prompt,) = prompts_of(6, seed=seed)
        config = config_of(threshold=0.99, max_new_tokens=8, eos="none", window_length=4, verify_candidates=2)
        # The first pass of a run; one layer, so that its conditionals are those of the model.
        (result,) = cached(model, [prompt], config)
        rows = result.passes[0]
        left = [row for row in rows if row.kind == "draft"]
        canvas = prompt.tolist() + [MASK] * 8
        for row in rows:
            if row.kind == "context":
                canvas[row.position] = row.token
        joint = enumerate_joint(model, canvas, [row.position for row in left])
        assert abs(joint.sum().item() - 1) < 1e-9
        drafts = [row.token for row in left]
        first = joint.sum(1)
        verdicts = [first.max().item(), (joint[drafts[0]] / first[drafts[0]]).max().item()]
        chosen = [first[drafts[0]].item(), (joint[drafts[0], drafts[1]] / first[drafts[0]]).item()]
        for gamma in (0.2, 0.4, 0.55, 0.7, 0.8, 0.9):
            for rule in RULES:
                (other,) = cached(model, [prompt], config.replace(gamma=gamma, verify_rule=rule))
                assert other.passes[0] == rows
                kept = other.accepted[0][1]
                distribution = {0: torch.ones(()), 1: first, 2: joint}[kept]
                point = torch.zeros_like(distribution)
                point[tuple(drafts[:kept])] = 1.0
                distance = 0.5 * (point - distribution).abs().sum().item()
                mass = torch.tensor(chosen[:kept], dtype=torch.float64).prod().item()
                assert abs(distance - (1 - mass)) < 1e-9, "the distance of a point mass is what it misses"
                assert distance <= (1 - gamma if rule == "product" else 1 - gamma**kept) + 1e-9
                if rule == "per_token":
                    assert all(q >= gamma for q in verdicts[:kept])
                checked += kept
    assert checked > 20


def enumerate_joint(model, canvas, positions):
    """(V, V) fp64: probability of every pair of tokens when the positions are sampled one after the other."""
    first, second = positions
    share = model.forward(torch.tensor([canvas]))[0, first].double().softmax(-1)
    rows = []
    for token in range(VOCAB):
        filled = list(canvas)
        filled[first] = token
        rows.append(share[token] * model.forward(torch.tensor([filled]))[0, second].double().softmax(-1))
    return torch.stack(rows)
