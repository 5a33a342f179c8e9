# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: the same numbers and tokens, one graph each, whatever sizes and settings they meet."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.utils import counters

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile._compat import has_cxx_compiler
from tests.conftest import tiny_model
from tests.real import assert_plain, model_logits, prompts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_cxx_compiler(), reason="needs a C++ compiler"),
]
SHORT = DecodingConfig(max_new_tokens=8, block_length=4)


@pytest.fixture(scope="module")
def fast():
    """Shared, so that each program is compiled once for the whole file."""
    return dllm_compile.optimize(tiny_model(), compile=True)


@pytest.fixture
def graphs():
    """How many graphs were compiled since the test began."""
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


def built(fast) -> int:
    assert all(program.compiled for program in fast.programs.built)
    return len(fast.programs.built)


def test_one_graph_of_the_forward_for_all_sizes(fast, graphs):
    """Rows of one, two and many samples, R = 1 and R = 2 among them; logits equal the model's."""
    before = built(fast)
    for batch, length in ((1, 1), (1, 2), (2, 1), (1, 37), (3, 5), (5, 3), (2, 64), (1, 128)):
        ids = torch.randint(0, 120, (batch, length), generator=torch.Generator().manual_seed(batch * length))
        expected, actual = model_logits(fast.model, ids), fast(ids).logits
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert actual.shape == expected.shape
    assert graphs() == built(fast) - before == 1


def test_one_graph_of_the_step_for_all_sizes(fast, graphs):
    """Different R, W and numbers of samples; W = 1; R = W is as near as a prompt of one token comes."""
    before = built(fast)
    for lengths, new, block in (
        ((5,), 8, 4),
        ((1,), 1, 1),
        ((1, 1), 1, 1),
        ((2, 9, 4), 6, 6),
        ((30,), 3, 2),
        ((1,), 2, 2),
    ):
        assert_plain(fast, prompts_of(*lengths), DecodingConfig(max_new_tokens=new, block_length=block))
    for options in (
        {"threshold": 0.4},
        {"factor": 1.0},
        {"frechet_margin": 0.2},
        {"eos": "first"},
        {"logits_eos_inf": True},
    ):
        assert_plain(fast, prompts_of(3, 7), SHORT.replace(**options))
    mask = fast.facts.mask_token_id
    for width in (2, 3, 11):
        # Every row is wanted: R = W.
        prompt = torch.full((width,), mask)
        prompt[0] = 5
        assert_plain(fast, [prompt], DecodingConfig(max_new_tokens=1, block_length=1, infill=True))
    assert graphs() == built(fast) - before == 1


def test_rows_equal_to_wanted_rows(fast, graphs):
    """R = W exactly, as a program can be called."""
    from dllm_compile.runtime.row_programs import StepInputs

    program = fast.programs
    fast.generate([[3]], SHORT)
    before = graphs()
    for rows in (1, 2, 11, 37):
        ids = torch.arange(rows)
        tiles = torch.tensor([[0, rows, 0, rows]], dtype=torch.int32)
        positions, wanted = ids.clone(), ids.clone()
        inputs = StepInputs(ids=ids, positions=positions, tiles=tiles, wanted=wanted, banned=torch.tensor([-1]))
        token, confidence = program.step(inputs)
        z = model_logits(fast.model, ids[None])[0]
        probability = z.softmax(-1)
        z[:, fast.facts.mask_token_id] = -torch.inf
        assert torch.equal(token, z.argmax(-1))
        torch.testing.assert_close(confidence, probability.gather(1, token[:, None])[:, 0], rtol=1e-5, atol=1e-6)
    assert graphs() == before


def test_sampled_and_guided(fast, graphs):
    before = built(fast)
    for seed in (0, 3):
        config = SHORT.replace(temperature=0.7, cfg_scale=0.5, seed=seed)
        assert_plain(fast, prompts_of(4, 2), config)
    assert_plain(fast, prompts_of(1), SHORT.replace(temperature=1.0, cfg_scale=1.0, block_length=1))
    assert graphs() == built(fast) - before == 1


def test_surroundings_compile_nothing_again(fast, graphs):
    prompts = prompts_of(6, 3)
    expected = fast.generate(prompts, SHORT).sequences
    before = graphs()
    results = []
    for surround in (
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        with surround():
            results.append(fast.generate(prompts, SHORT).sequences)
    threads = torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        results.append(fast.generate(prompts, SHORT).sequences)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    thread = threading.Thread(target=lambda: results.append(fast.generate(prompts, SHORT).sequences))
    thread.start()
    thread.join()
    assert len(results) == 5
    assert all(torch.equal(result, expected) for result in results)
    assert graphs() == before


def test_updates_in_place_reach_compiled_programs(fast, graphs):
    """Last in this file: it changes the shared model's weights."""
    ids = torch.arange(12)[None]
    fast(ids)
    before = graphs()
    with torch.no_grad():
        for p in fast.model.parameters():
            p.mul_(0.8)
    expected = model_logits(fast.model, ids)
    assert (fast(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert_plain(fast, prompts_of(4, 2), SHORT)
    assert graphs() == before
