# SPDX-License-Identifier: Apache-2.0
"""The LaCache pass: what a step still computes, counted from its graph."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile.costs import pairs, program_costs
from dllm_compile.passes import run_passes
from dllm_compile.passes.flatten_rows import WHOLE_SAMPLE, flatten_rows_pass
from dllm_compile.passes.graph import find, placeholders, share
from dllm_compile.passes.insert_lacache import insert_lacache_pass, state_names
from dllm_compile.runtime.block_tiles import block_tile_table

from ..conftest import tiny_model

PROMPT, LENGTH, BLOCK = (40, 7), (104, 55), ((56, 72), (136, 152))  # block rows in the flat axis


@pytest.fixture(scope="module")
def rewritable():
    """A tiny model together with its canonical graph."""
    model = tiny_model()
    return model, dllm_compile.optimize(model, compile=False)._captured.gm


def _program(rewritable, layers, kind):
    gm = share(rewritable[1])
    results = run_passes(gm, (flatten_rows_pass(WHOLE_SAMPLE), insert_lacache_pass(layers, kind)), layers=2)
    return gm, results[-1]


def _inputs(gm, tile_rows=None):
    rows = sum(LENGTH)
    start = torch.tensor([0, LENGTH[0]])
    table = block_tile_table(start, torch.tensor(LENGTH), torch.tensor(BLOCK), tile_rows, max(LENGTH))
    known = {
        "tiles": torch.tensor([[0, 104, 0, 104], [104, 159, 104, 159]], dtype=torch.int32),
        "block_tiles": table,
        "block_rows": torch.zeros(32, dtype=torch.int64),
    }
    inputs = {}
    for node in placeholders(gm):
        value = node.meta["val"]
        inputs[node.target] = known.get(
            node.target, torch.empty((rows, *map(int, value.shape[1:])), dtype=value.dtype, device="meta")
        )
    return inputs


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", ["first", "step"])
def test_rewrites_the_chosen_layers_only(rewritable, layers, kind):
    gm, result = _program(rewritable, layers, kind)
    ops = torch.ops.dllm
    assert result.matches == result.required == len(layers)
    assert len(find(gm, getattr(ops, f"facache_{kind}").default)) == len(layers)
    assert len(find(gm, ops.row_attention.default)) == 2 - len(layers)
    names = {node.target for node in placeholders(gm)}
    assert set(state_names(layers)) <= names
    assert ("block_rows" in names) == (kind == "step")
    assert result.level.value == ("exact" if layers == (0,) else "policy")


@pytest.mark.parametrize("tile_rows", [None, 16, 64])
def test_layer_zero_of_a_step_costs_what_the_formula_says(rewritable, tile_rows):
    """q, k, v of the block's rows only; (N - b) * b + b * N scores a sample instead of N * N."""
    step, _ = _program(rewritable, (0,), "step")
    first, _ = _program(rewritable, (0,), "first")
    costs = {kind: program_costs(gm, _inputs(gm, tile_rows)) for kind, gm in (("first", first), ("step", step))}
    config = rewritable[0].config
    width, heads, kv_heads = config.d_model, config.n_heads, config.n_kv_heads
    head_dim = width // heads
    qkv = {kind: next(c for c in cost if c.operator == "aten.linear") for kind, cost in costs.items()}
    projected = (heads + 2 * kv_heads) * head_dim
    assert qkv["step"].flops == 2 * 32 * width * projected
    assert qkv["first"].flops == 2 * sum(LENGTH) * width * projected
    weight = projected * width
    assert qkv["step"].bytes == 4 * (weight + 32 * (width + projected))
    scores = sum((n - 16) * 16 + 16 * n for n in LENGTH)
    attention = next(c for c in costs["step"] if c.operator == "dllm.facache_step")
    assert attention.flops == 4 * scores * width
    dense = next(c for c in costs["first"] if c.operator == "dllm.facache_first")
    assert dense.flops == 4 * sum(n * n for n in LENGTH) * width
    # Everything behind layer 0's attention is untouched.
    tail = [
        [c.flops for c in cost if c.operator in ("aten.linear", "dllm.row_attention", "dllm.head")][1:]
        for cost in costs.values()
    ]
    assert tail[0] == tail[1]


def test_pairs_of_a_table_do_not_depend_on_its_tiles():
    start, length, block = torch.tensor([0, 50]), torch.tensor([50, 33]), torch.tensor([[0, 8], [80, 83]])
    counts = {
        tile_rows: pairs("dllm.facache_step", block_tile_table(start, length, block, tile_rows, 50).tolist())
        for tile_rows in (None, 1, 7, 16, 64)
    }
    assert set(counts.values()) == {(42 * 8 + 8 * 50) + (30 * 3 + 3 * 33)}
