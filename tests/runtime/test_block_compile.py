# SPDX-License-Identifier: Apache-2.0
"""Layers compiled once: as many graphs as there are distinct layers, for all sizes, writing in place."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import dllm_compile
from dllm_compile._compat import can_compile
from dllm_compile.passes.split_layers import split_layers
from dllm_compile.runtime.compiling import LayerByLayer
from tests.conftest import tiny_model
from tests.real import model_logits, prompts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler"),
]
LAYERS = 7
OPTIONS = {"max_new_tokens": 12, "block_length": 4, "threshold": 0.2}
POLICIES = {
    "none": {},
    "dual": {"cache": "dual"},
    "flash": {"cache": "flash", "window_length": 4, "lookahead": 3, "track": 4},
    "lacache": {"cache": "lacache"},
}
# Prologue, layers, last layer; two layers that are not scored; a first layer that keeps its state.
GRAPHS = {"step": 3, "cached_step": 3, "cached_step_scored_2-6": 4, "lacache_first": 3, "lacache_step": 3}


@pytest.fixture(scope="module")
def both() -> list[dllm_compile.OptimizedModel]:
    """Not compiled and compiled, over weights of their own."""
    return [dllm_compile.optimize(tiny_model(seed=3, n_layers=LAYERS), compile=on) for on in (False, True)]


@pytest.fixture
def graphs():
    """How many graphs were compiled since the test began."""
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("policy", POLICIES)
def test_one_graph_for_each_distinct_layer(both, graphs, policy):
    """The same tokens as uncompiled for batches of all sizes; nothing is compiled again for layers or sizes."""
    plain, fast = both
    known = {program.name for program in fast.programs.built}
    for i, lengths in enumerate(((5, 11, 2), (1,), (3, 30, 7, 8), (1, 1))):
        prompts = prompts_of(*lengths, seed=i)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            output = fast.generate(prompts, **OPTIONS, **POLICIES[policy])
        assert torch.equal(output.sequences, plain.generate(prompts, **OPTIONS, **POLICIES[policy]).sequences)
    new = [program for program in fast.programs.built if program.name not in known]
    assert new
    for program in new:
        assert isinstance(program.run, LayerByLayer)
        assert program.graphs == len({segment.key for segment in split_layers(program.gm)}) == GRAPHS[program.name]
        assert sum(program.calls) >= LAYERS
    assert graphs() == sum(program.graphs for program in new)


def test_logits(both):
    """Within rounding of the model, one row and many."""
    _, fast = both
    for size in ((1, 1), (2, 37), (1, 128)):
        ids = torch.randint(0, 120, size, generator=torch.Generator().manual_seed(size[1]))
        expected = model_logits(fast.model, ids)
        assert (fast(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_writes_are_in_place():
    """Each distinct layer calls the writing operator on the cache it is given: no clone, no copy."""
    fast = dllm_compile.optimize(tiny_model(seed=4, n_layers=LAYERS), compile=True)
    _, sources = run_and_get_code(fast.generate, prompts_of(6), **OPTIONS, **POLICIES["flash"])
    (program,) = fast.programs.built
    writes = [len(re.findall(r"torch\.ops\.dllm\.qkv_rope_cache_write\.default\(", code)) for code in sources]
    assert sorted(writes) == [0, 1, 1, 1]
    assert sum(n * calls for n, calls in zip(writes, program.calls, strict=True)) == LAYERS
    assert not [line for code in sources for line in code.splitlines() if "copy_(" in line or "clone" in line]


def test_weights_are_read_where_they_lie(both, graphs):
    """Updated in place, frozen or not: the next call sees them, and nothing is compiled again."""
    _, fast = both
    ids = torch.arange(12)[None]
    fast(ids)
    before = graphs()
    try:
        with torch.no_grad():
            for parameter in fast.model.parameters():
                parameter.mul_(0.9)
        for parameter in list(fast.model.parameters())[::2]:
            parameter.requires_grad_(False)
        expected = model_logits(fast.model, ids)
        assert (fast(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert graphs() == before
    finally:
        with torch.no_grad():
            for parameter in fast.model.parameters():
                parameter.div_(0.9)


def test_two_models_of_one_shape_do_not_mix(both):
    """Layers of another model take their own weights."""
    _, fast = both
    other = dllm_compile.optimize(tiny_model(seed=9, n_layers=LAYERS), compile=True)
    ids = torch.arange(20)[None]
    for one in (fast, other, fast):
        expected = model_logits(one.model, ids)
        assert (one(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
