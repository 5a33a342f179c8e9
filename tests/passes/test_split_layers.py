# SPDX-License-Identifier: Apache-2.0
"""Programs cut at their layers: which segments are equal, and that nothing but the order of calls decides."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import dllm_compile
from dllm_compile.passes import (
    INLINE_REFERENCES,
    GraphPass,
    head_passes,
    insert_kv_cache_pass,
    insert_lacache_pass,
    run_passes,
)
from dllm_compile.passes.flatten_rows import WHOLE_SAMPLE, flatten_rows_pass
from dllm_compile.passes.fuse_linear_add_norm import FUSE_LINEAR_ADD_NORM
from dllm_compile.passes.graph import aten, attribute, find, placeholders, set_buffer, share
from dllm_compile.passes.split_layers import Segment, segment_graph, split_layers
from dllm_compile.runtime import compiling
from tests.conftest import tiny_model

LAYERS = 6


@pytest.fixture(scope="module")
def canonical() -> GraphModule:
    """The canonical graph of a model with grouped heads, its weights packed."""
    fast = dllm_compile.optimize(tiny_model(n_layers=LAYERS, d_model=32, mlp_hidden_size=48), compile=False)
    return fast._captured.gm


def program(
    canonical: GraphModule, *middle: GraphPass, change: Callable[[GraphModule], None] | None = None
) -> GraphModule:
    """A step as it is compiled, after `change` was made to it."""
    gm = share(canonical)
    last = [one for one in middle if one is FUSE_LINEAR_ADD_NORM]
    first = [one for one in middle if one is not FUSE_LINEAR_ADD_NORM]
    run_passes(gm, (flatten_rows_pass(WHOLE_SAMPLE), *first, *head_passes(127), *last), layers=LAYERS)
    if change is not None:
        change(gm)
    INLINE_REFERENCES.apply(gm)
    gm.recompile()
    return gm


def groups(segments: list[Segment]) -> list[int]:
    """Segments by number, equal ones by the same number."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(segment.key, len(numbers)) for segment in segments]


PROGRAMS: dict[str, tuple[tuple[Any, ...], list[int]]] = {
    "plain": ((), [0, *[1] * (LAYERS - 1), 2]),
    "cached": ((insert_kv_cache_pass(),), [0, *[1] * (LAYERS - 1), 2]),
    # Two layers that are not scored, then three that are; the last one is scored as well.
    "scored": ((insert_kv_cache_pass((2, 3, 4, 5)),), [0, 1, 1, 2, 2, 2, 3]),
    # Layer 0 keeps a state and is joined with what stands before it.
    "lacache": ((insert_lacache_pass((0,), "step"),), [0, *[1] * (LAYERS - 2), 2]),
    # One layer in the middle keeps a state: alone between equal ones.
    "lacache, layer 3": ((insert_lacache_pass((3,), "first"),), [0, 1, 1, 1, 2, 1, 3]),
    "fused": ((insert_kv_cache_pass(), FUSE_LINEAR_ADD_NORM), [0, *[1] * (LAYERS - 1), 2]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_groups(canonical, name):
    """Every call is in one segment, in order; equal layers are found, whatever stands around them."""
    passes, expected = PROGRAMS[name]
    gm = program(canonical, *passes)
    segments = split_layers(gm)
    assert groups(segments) == expected
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [node for segment in segments for node in segment.nodes] == calls


def test_what_crosses(canonical):
    """Cuts stand in front of the packed projection: the stream and its norm cross, and no weight is shared."""
    for passes in ((), (FUSE_LINEAR_ADD_NORM,)):
        segments = split_layers(program(canonical, *passes))
        for before, segment in pairwise(segments):
            assert segment.nodes[0].target is aten.linear.default
            assert "qkv_proj" in str(segment.nodes[0].args[1])
            assert len(before.outputs) == 2
            assert set(before.outputs) <= set(segment.inputs)
        weights = [{n for n in s.inputs if n.op == "get_attr" and "rope" not in str(n.target)} for s in segments]
        assert not set.intersection(*weights[1:])
        assert len({len(group) for group in weights[1:-1]}) == 1


def inputs_of(gm: GraphModule, rows: int, cache_rows: int) -> dict[str, torch.Tensor]:
    """Random inputs of two samples of unequal length."""
    generator = torch.Generator().manual_seed(rows)
    split = rows // 3
    given = {
        "ids": torch.randint(0, 120, (rows,), generator=generator),
        "positions": torch.arange(rows),
        "tiles": torch.tensor([[0, split, 0, split], [split, rows, split, rows]], dtype=torch.int32),
        "wanted": torch.tensor([1, rows - 1]),
        "banned": torch.tensor([-1, 5]),
        "cache_rows": torch.arange(rows),
        "window": torch.tensor([[0, 1], [rows - 2, rows - 1]]),
        "spans": torch.tensor([[0, split], [split, rows]], dtype=torch.int32),
        "scores": torch.zeros(cache_rows),
    }
    for node in placeholders(gm):
        name, value = str(node.target), node.meta["val"]
        if name not in given:
            given[name] = torch.randn((cache_rows, *map(int, value.shape[1:])), generator=generator)
    return {str(node.target): given[str(node.target)] for node in placeholders(gm)}


@pytest.mark.parametrize("name", ["plain", "cached", "scored", "fused"])
def test_segments_one_after_the_other_are_the_program(canonical, monkeypatch, name):
    """Bit for bit, with each segment run as a graph of its own and every write to a cache in place."""
    gm = program(canonical, *PROGRAMS[name][0])
    monkeypatch.setattr(compiling, "_compiled", lambda segment: segment.forward)
    layered = compiling.LayerByLayer(gm, split_layers(gm))
    assert layered.graphs == len(set(PROGRAMS[name][1]))
    for rows in (7, 30):
        mine, theirs = inputs_of(gm, rows, 40), inputs_of(gm, rows, 40)
        with torch.no_grad():
            expected, actual = gm(**theirs), layered(**mine)
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_values_are_dropped_when_they_are_no_longer_read(canonical, monkeypatch):
    """While a layer runs, what earlier ones handed on to others is gone."""
    gm = program(canonical)
    alive: list[int] = []
    references: list[Any] = []

    def watched(segment: GraphModule) -> Any:
        def run(*arguments: torch.Tensor) -> Any:
            results = segment.forward(*arguments)
            references.extend(weakref.ref(result) for result in results)
            alive.append(sum(reference() is not None for reference in references))
            return results

        return run

    monkeypatch.setattr(compiling, "_compiled", watched)
    with torch.no_grad():
        compiling.LayerByLayer(gm, split_layers(gm))(**inputs_of(gm, 9, 40))
    assert max(alive) == 4, "the stream and its norm, before and behind the layer"


# --- what makes a segment another one -------------------------------------------------------------------------------


def _other_eps(gm: GraphModule) -> None:
    node = find(gm, torch.ops.dllm.rms_norm.default)[7]  # behind the attention of layer 3
    node.args = (*node.args[:2], 2e-5)


def _other_operator(gm: GraphModule) -> None:
    node = find(gm, torch.ops.dllm.swiglu.default)[3]
    node.args = tuple(reversed(node.args))


def _other_stride(gm: GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.op == "get_attr" and "blocks.3.attn_out" in str(n.target))
    value = attribute(gm, node).detach()
    set_buffer(gm, "transposed", value.t().contiguous().t())
    node.target = "transposed"


def _other_dtype(gm: GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.op == "get_attr" and "blocks.3.ff_norm" in str(n.target))
    set_buffer(gm, "in_double", attribute(gm, node).detach().double())
    node.target = "in_double"


CHANGES = [_other_eps, _other_operator, _other_stride, _other_dtype]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_layer_that_differs_is_compiled_by_itself(canonical, change):
    gm = program(canonical, change=change)
    assert groups(split_layers(gm)) == [0, 1, 1, 1, 2, 1, 3]


def test_one_weight_in_two_places(canonical):
    """The norms of a layer share a weight: its function has one input less. The first of them ends the layer before."""
    gm = program(canonical)
    names = [f"transformer.blocks.{i}.{norm}.weight" for i, norm in ((3, "ff_norm"), (4, "attn_norm"))]
    first, second = (next(n for n in gm.graph.nodes if n.op == "get_attr" and n.target == name) for name in names)
    second.replace_all_uses_with(first)
    assert groups(split_layers(gm)) == [0, 1, 1, 1, 2, 1, 3]


def test_without_module_names(canonical):
    """Cuts are found where nodes do not say where they come from."""
    gm = program(canonical, insert_kv_cache_pass())
    for node in gm.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    segments = split_layers(gm)
    assert len(set(groups(segments))) <= 3
    assert len(segments) >= LAYERS


def test_one_layer_is_one_segment():
    fast = dllm_compile.optimize(tiny_model(n_layers=1), compile=False)
    gm = fast.programs.forward_program().gm
    (segment,) = split_layers(gm)
    assert not [node for node in segment.inputs if node.op == "call_function"]
    text = segment_graph(segment).code
    assert "return (" in text


def test_when_it_pays(canonical):
    """Two layers are compiled together, many apart."""
    assert compiling._pays(split_layers(program(canonical)))
    two = dllm_compile.optimize(tiny_model(n_layers=2), compile=False).programs.forward_program().gm
    assert not compiling._pays(split_layers(two))
