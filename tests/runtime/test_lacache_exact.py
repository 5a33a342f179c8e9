# SPDX-License-Identifier: Apache-2.0
"""LaCache inside: what a step keeps and computes, compared value by value, and the generic tests of section 1.7."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dllm_compile
from dllm_compile._compat import can_compile
from dllm_compile.config import DecodingConfig
from tests.conftest import tiny_model
from tests.reference.llada_rows import LladaRows
from tests.reference.stale_rows import dense_attention

from .tiny import cached, prompts_of

WIDE = {"lacache_layers": (0, 2), "lacache_interval": 3}
STOPS = tuple(range(0, 126, 7))
BATCHES = {"one": (9,), "four": (2, 11, 6, 6)}


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=3, n_layers=3)


@pytest.fixture(scope="module")
def fast(model) -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(model, compile=False)


def config_of(**options) -> DecodingConfig:
    return DecodingConfig(**{"max_new_tokens": 20, "block_length": 8, "threshold": 0.2, "cache": "lacache", **options})


class Heads(torch.fx.Interpreter):
    """Runs a program and keeps what its head reads."""

    def call_function(self, target, args, kwargs):
        if target is torch.ops.dllm.head_confidence.default:
            self.hidden = args[0].clone()
        return super().call_function(target, args, kwargs)


class Watched:
    """Stands in for the programs and remembers each call: its inputs, its state afterwards, what its head has read."""

    def __init__(self, programs) -> None:
        self._programs = programs
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        return getattr(self._programs, name)

    def lacache_step(self, inputs, cache):
        result = self._programs.lacache_step(inputs, cache)
        kind = "first" if cache.block_rows is None else "step"
        program = next(one for one in self._programs.built if one.name.startswith(f"lacache_{kind}"))
        extra = {} if cache.block_rows is None else {"block_rows": cache.block_rows}
        given = {name: value for name, value in vars(inputs).items() if value is not None}
        given |= {**cache.state, **extra, "block_tiles": cache.block_tiles}
        names = [node.target for node in program.gm.graph.nodes if node.op == "placeholder"]
        state = {name: buffer.clone() for name, buffer in cache.state.items()}
        heads = Heads(program.gm)
        with torch.no_grad():
            heads.run(*(given[name] for name in names))  # the same once more: what is written, it writes again
        seen = dataclasses.replace(inputs, ids=inputs.ids.clone())  # the canvas changes in place
        self.calls.append((kind, seen, cache.block_rows, state, heads.hidden))
        return result


@pytest.fixture
def watched(fast) -> Iterator[Watched]:
    real = fast.programs
    fast.programs = Watched(real)
    yield fast.programs
    fast.programs = real


def layer_zero(model, ids, positions):
    """The embedding and layer 0's rotated q, k and v of every row, anew, and the model's final hidden states."""
    found = {}

    def attend(q, k, v):
        if not found:
            found.update(q_0=q, k_0=k, v_0=v)
        return dense_attention(q, k, v)

    hidden = LladaRows(model).hidden(ids, positions, attend)
    return {"h": model.model.transformer["wte"].weight.detach()[ids], **found}, hidden


# --- section 9, T1 and 9.6 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_length", [1, 5, 8, 32, 48])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_step_computes_what_the_model_computes(fast, model, watched, batch, block_length):
    """T1: layer 0's inputs in the state equal new ones, final hidden states are within 1e-5; first, middle, last block.

    9.6: only the rows of the block reach the final norm, the head and the sampler.
    """
    config = config_of(block_length=block_length, max_new_tokens=50 if block_length == 48 else 20, eos="none")
    prompts = prompts_of(*BATCHES[batch], seed=block_length)
    fast.generate(prompts, config)
    kinds = [kind for kind, *_ in watched.calls]
    assert "first" in kinds
    assert block_length == 1 or "step" in kinds
    for _, inputs, block_rows, state, hidden in watched.calls:
        of_blocks = len(inputs.tiles) * min(block_length, config.max_new_tokens)  # a tile a sample
        assert len(hidden) == len(inputs.wanted) == of_blocks
        assert block_rows is None or len(block_rows) == of_blocks
        for begin, end, *_ in inputs.tiles.tolist():
            rows = slice(begin, end)
            fresh, expected = layer_zero(model, inputs.ids[rows], inputs.positions[rows])
            for name, values in fresh.items():
                torch.testing.assert_close(state[name][rows], values, rtol=1e-6, atol=1e-6)
            wanted = inputs.wanted
            mine = (wanted >= begin) & (wanted < end)
            error = (hidden[mine] - expected[wanted[mine] - begin]).abs().max()
            assert error <= 1e-5 * expected.abs().max()


def test_rows_outside_the_block_are_kept_bit_for_bit(fast, watched):
    """T1, bit for bit: outside the block layer 0's h, q, k and v in a step are those of a filling of that canvas."""
    (prompt,) = prompts_of(9, seed=4)
    stepped = fast.generate([prompt], config_of(threshold=None, eos="none"))
    steps = list(watched.calls)
    watched.calls.clear()
    filled = fast.generate([prompt], config_of(threshold=None, eos="none", lacache_interval=1, lacache_layers=(0,)))
    assert torch.equal(stepped.sequences, filled.sequences)
    assert len(steps) == len(watched.calls) == 20
    assert [kind for kind, *_ in steps].count("step") == 17
    assert {kind for kind, *_ in watched.calls} == {"first"}
    for (_, one, _, state, _), (_, other, _, anew, _) in zip(steps, watched.calls, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(state["h"], anew["h"])
        for name in ("q_0", "k_0", "v_0"):
            # A product of eight rows may round otherwise than one of all rows; outside the block it is the same one.
            outside = torch.ones(len(one.ids), dtype=torch.bool)
            outside[one.wanted] = False
            assert torch.equal(state[name][outside], anew[name][outside]), name
            torch.testing.assert_close(state[name], anew[name], rtol=1e-6, atol=1e-6)


# --- section 9, T4, and the generic tests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": True},
        {"include_qkv_bias": True, "n_kv_heads": 4},
        {"attention_layer_norm": True},
        {"n_kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [1, 2])
def test_variants_of_the_model(changes, layers):
    """G2, G9 and T4: layer 0 is exact in any model; in one of one layer nothing else is kept, whatever the interval."""
    fast = dllm_compile.optimize(tiny_model(seed=4, n_layers=layers, **changes), compile=False)
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    options = {"max_new_tokens": 20, "block_length": 8, "threshold": 0.2, "eos_token_id": STOPS}
    plain = fast.generate(prompts, **options)
    choices = [{}, {"lacache_interval": 1, "lacache_layers": tuple(range(layers))}]
    if layers == 1:
        choices += [{"lacache_layers": "wide"}, {"lacache_layers": (0,), "lacache_interval": 4}]
    for choice in choices:
        output = fast.generate(prompts, **options, cache="lacache", **choice)
        assert torch.equal(output.sequences, plain.sequences), choice
        assert output.stats.forwards_per_row == plain.stats.forwards_per_row


@pytest.mark.parametrize("options", [{}, WIDE], ids=["first", "wide"])
def test_committed_tokens_never_change(fast, watched, options):
    """G6 and G7; and G3: every forward computes all rows, of which a step's layer 0 computes the block's."""
    (prompt,) = prompts_of(6, seed=6)
    output = fast.generate([prompt], config_of(threshold=0.15, eos="none", **options))
    mask, final = fast.facts.mask_token_id, output.sequences[0]
    assert torch.equal(final[:6], prompt)
    left = 20
    for _, inputs, *_ in watched.calls:
        assert len(inputs.ids) == 26
        known = inputs.ids != mask
        assert torch.equal(inputs.ids[known], final[known])
        assert int((~known).sum()) <= left, "a forward without a commit"
        left = int((~known).sum()) - 1
    assert output.stats.forwards == len(watched.calls) < 20
    assert output.stats.row_forwards == 26 * len(watched.calls)


@pytest.mark.parametrize("options", [{}, WIDE], ids=["first", "wide"])
def test_whole_length_of_the_model(fast, model, options):
    """G12: the last position that the model has (one more is refused before a cache is chosen)."""
    prompts = prompts_of(128 - 12, 4, seed=9)
    config = config_of(max_new_tokens=12, **options)
    output = fast.generate(prompts, config)
    expected = cached(LladaRows(model), prompts, config, fast.facts)
    for row, prompt, one in zip(output.sequences, prompts, expected, strict=True):
        assert row[116 - len(prompt) :].tolist() == one.canvas


def test_threads_and_models_do_not_disturb_each_other(fast):
    """G10: two models and both kinds of LaCache at the same time; the same seed, the same tokens."""
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    other = dllm_compile.optimize(tiny_model(seed=8, n_layers=3), compile=False)
    runs = [(one, config_of(temperature=0.6, seed=2, **options)) for one in (fast, other) for options in ({}, WIDE)]
    alone = [one.generate(prompts, config).sequences for one, config in runs]
    assert not torch.equal(alone[0], alone[2])
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = list(pool.map(lambda run: run[0].generate(prompts, run[1]).sequences, runs))
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.parametrize("options", [{}, WIDE], ids=["first", "wide"])
def test_compiled_equals_eager(fast, options):
    """G11: tokens in fp32, for batches of several sizes with one program of each kind."""
    compiled = dllm_compile.optimize(tiny_model(seed=3, n_layers=3), compile=True)
    for seed, lengths in enumerate(((5, 11, 2, 8), (7,), (1, 30))):
        prompts = prompts_of(*lengths, seed=seed)
        expected, output = (one.generate(prompts, config_of(**options)) for one in (fast, compiled))
        assert torch.equal(output.sequences, expected.sequences)
        assert output.stats.forwards_per_row == expected.stats.forwards_per_row
    assert all(program.compiled for program in compiled.programs.built)
    assert len(compiled.programs.built) == 2
