# SPDX-License-Identifier: Apache-2.0
"""The policies through the real row programs of a rewritten LLaDA in fp32: by their references, by stale states."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dllm_compile
from dllm_compile.capture import capture
from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError
from dllm_compile.passes import run_passes
from dllm_compile.passes.normalize_head import NORMALIZE_HEAD
from dllm_compile.runtime.cache import cache_policy
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.facts import ModelFacts
from dllm_compile.runtime.rectangular import RectangularPrograms
from dllm_compile.runtime.row_programs import CacheInputs, StepInputs
from tests.conftest import tiny_model
from tests.reference.llada_rows import LladaRows
from tests.reference.stale_rows import StaleCanvas

from .policies import POLICIES, REFRESH_ALL
from .tiny import cached, prompts_of

RULES = {
    "threshold": {"threshold": 0.2},
    "factor": {"factor": 1.5},
    "guided, sampled": {"threshold": 0.2, "cfg_scale": 0.6, "temperature": 0.7, "seed": 4},
}
STOPS = tuple(range(0, 126, 7))


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=3, n_layers=3)


@pytest.fixture(scope="module")
def fast(model) -> dllm_compile.OptimizedModel:
    """Programs that are not compiled: compiled ones are compared with them elsewhere."""
    return dllm_compile.optimize(model, compile=False)


def config_of(policy: str, rule: str, **options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 20, "block_length": 8, **POLICIES[policy], **RULES[rule], **options})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_the_reference(fast, model, policy, rule):
    """Token for token over the unmodified weights, ragged four and the first one alone."""
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    eos = "first" if policy.startswith("flash") or rule == "factor" else "block"
    config = config_of(policy, rule, eos=eos, eos_token_id=STOPS)
    expected = cached(LladaRows(model), prompts, config, fast.facts)
    output = fast.generate(prompts, config)
    for row, prompt, one in zip(output.sequences, prompts, expected, strict=True):
        assert row[12 - len(prompt) :].tolist() == one.canvas
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)
    halves = 2 if config.cfg_scale > 0 else 1
    assert output.stats.row_forwards == halves * sum(len(rows) for one in expected for rows in one.rows)
    assert fast.generate(prompts[0], config).sequences[0].tolist() == expected[0].canvas


@pytest.mark.parametrize("policy", REFRESH_ALL)
def test_refreshing_everything_equals_no_cache(fast, policy):
    """G1."""
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    config = DecodingConfig(max_new_tokens=20, block_length=8, threshold=0.2, eos_token_id=STOPS)
    plain, other = fast.generate(prompts, config), fast.generate(prompts, config, **REFRESH_ALL[policy])
    assert torch.equal(plain.sequences, other.sequences)
    assert plain.stats.forwards_per_row == other.stats.forwards_per_row


def stale_run(fast, model, steps):
    """Both ways through the same sequence of row sets on a random canvas: programs and reference, with canaries."""
    length, shape = 30, fast.programs.shape
    reference, spare, front = StaleCanvas(LladaRows(model), length), length + 9, 5
    sizes = (length + 10, shape.kv_heads, shape.head_dim)
    caches = {f"{kind}_cache_{i}": torch.full(sizes, 7.0) for i in range(shape.layers) for kind in "kv"}
    for i, rows in enumerate(steps):
        canvas = (torch.arange(length) * 7 + 11 * i) % 120  # another token at each position in each step
        window = rows[:3]
        before = {name: cache.clone() for name, cache in caches.items()}
        n, pad = len(rows), 2
        positions = torch.tensor([*rows, 0, 0])
        cache_rows = torch.tensor([front + p for p in rows] + [spare] * pad)
        inputs = StepInputs(
            ids=canvas[positions],
            positions=positions,
            tiles=torch.tensor([[0, n, front, front + length], [n, n + pad, 0, 0]], dtype=torch.int32),
            wanted=torch.arange(n),
            banned=torch.tensor([-1]),
        )
        scores = torch.zeros(length + 10)
        cache = CacheInputs(
            caches,
            cache_rows,
            scored=(1, 2),
            window=torch.tensor([[0, 1, 2 if n > 2 else -1], [-1, -1, -1]]),
            spans=torch.tensor([[front, front + length], [0, 0]], dtype=torch.int32),
            scores=scores,
        )
        token, confidence = fast.programs.cached_step(inputs, cache)
        logits = reference.forward(canvas.tolist(), rows, range(length))
        yield rows, before, caches, front, token, confidence, logits, scores, reference.scores(window, (1, 2))


STEPS = [list(range(30)), [3, 9, 10, 11], [0, 29], list(range(12, 27)), [5, 6, 7]]


def test_first_pass_and_steps_on_a_stale_state(fast, model):
    """First pass and step agree with the definition to 1e-5 of the largest probability and score."""
    for rows, _, _, front, token, confidence, logits, scores, expected in stale_run(fast, model, STEPS):
        z = torch.stack([logits[p] for p in rows]).double()
        z_no_mask = z.index_fill(1, torch.tensor([127]), -torch.inf)
        assert token.tolist() == z_no_mask.argmax(-1).tolist()
        probability = z.softmax(-1).gather(1, token[:, None]).squeeze(1).float()
        torch.testing.assert_close(confidence, probability, rtol=0, atol=1e-5)
        dense = torch.tensor([expected[p] for p in range(30)], dtype=torch.float32)
        torch.testing.assert_close(scores[front : front + 30], dense, rtol=1e-4, atol=1e-4)
        assert (scores[:front] == 0).all()
        assert (scores[front + 30 :] == 0).all()


def test_a_write_changes_the_named_rows_only(fast, model):
    """Canaries in front of and behind the sample's rows, and every row that is not in the step."""
    for rows, before, caches, front, *_ in stale_run(fast, model, STEPS):
        named = torch.zeros(40, dtype=torch.bool)
        named[[front + p for p in rows]] = True
        others = ~named
        others[39] = False  # the spare row belongs to padding
        for name, cache in caches.items():
            assert torch.equal(cache[others], before[name][others])
            assert (cache[named] != before[name][named]).flatten(1).any(1).all()


def test_cache_bytes(fast):
    """L * rows * 2 * H_kv * hd values and one spare row, for what is decoded at the same time."""
    shape = fast.programs.shape
    for rows, guided in ((100, False), (64, True)):
        policy = cache_policy(DecodingConfig(cache="dual", cfg_scale=0.5 * guided), fast.programs, rows, 127)
        policy.caches(guided)
        values = shape.layers * (rows * (1 + guided) + 1) * 2 * shape.kv_heads * shape.head_dim
        assert policy.cache_bytes == 4 * values


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_tying": True},
        {"include_qkv_bias": True, "n_kv_heads": 4},
        {"attention_layer_norm": True},
        {"n_kv_heads": 1},
    ],
    ids=str,
)
def test_variants_of_the_model(changes):
    """G9 and G2: other heads, biases and norms; one layer, where every policy must give the uncached tokens."""
    fast = dllm_compile.optimize(tiny_model(seed=4, n_layers=1, **changes), compile=False)
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    options = {"max_new_tokens": 20, "block_length": 8, "threshold": 0.2, "eos_token_id": STOPS}
    plain = fast.generate(prompts, **options)
    for policy in ("prefix", "dual every 2", "vicinity", "dkv every 3"):
        assert torch.equal(fast.generate(prompts, **options, **POLICIES[policy]).sequences, plain.sequences), policy
    sliding = {"cache": "flash", "window_length": 5, "lookahead": 4}
    window = fast.generate(prompts, **options, **sliding, track=-1)
    assert torch.equal(fast.generate(prompts, **options, **sliding, track=6).sequences, window.sequences)


def test_threads_do_not_disturb_each_other(fast):
    """G10: four policies at the same time over one model."""
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    configs = [config_of(policy, "threshold") for policy in ("dual", "flash", "dkv", "dual, dpad")]
    alone = [fast.generate(prompts, config).sequences for config in configs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = list(pool.map(lambda config: fast.generate(prompts, config).sequences, configs))
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_fallback_has_no_caches(model):
    """Where an attention was refused there are no row programs; caches and dropped rows are refused by name."""
    captured = capture(model, 128, 128)
    run_passes(captured.gm, (NORMALIZE_HEAD,), layers=captured.layers, strict=False)
    programs = RectangularPrograms(captured.gm, mask_token_id=127, device=torch.device("cpu"))
    facts = ModelFacts.from_config(model.config)
    prompts = prompts_of(4, 7, seed=5)
    options = {"max_new_tokens": 20, "block_length": 8}
    for cache in ("lacache", "prefix", "dual", "vicinity", "dkv", "flash"):
        with pytest.raises(ConfigError, match="cache='none'"):
            decode(programs, facts, prompts, DecodingConfig(cache=cache, **options))
    with pytest.raises(ConfigError, match="suffix='all'"):
        decode(programs, facts, prompts, DecodingConfig(suffix="dpad", suffix_window=9, **options))
    assert decode(programs, facts, prompts, DecodingConfig(**options)).stats.forwards == 20
