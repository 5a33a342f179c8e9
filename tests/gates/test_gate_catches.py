# SPDX-License-Identifier: Apache-2.0
"""The gates do their work: each planted change fails with a message that names it, and unchanged code passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import dllm_compile
from benchmarks.gates import Expected, Figures, compare, compiled, decoding, graphs
from benchmarks.models import random_llada
from dllm_compile import CompileConfig, OptimizedModel, api
from dllm_compile._compat import has_cxx_compiler
from dllm_compile.passes import FUSE, GraphPass, Level
from dllm_compile.passes.framework import Outcome
from dllm_compile.passes.graph import find
from dllm_compile.runtime import compiling

FILE = Path("expected/torch-0.0.json")
DUAL = graphs.DECODINGS[4:5]
UNCOMPILED = CompileConfig(compile=False)

needs_compiler = pytest.mark.skipif(not has_cxx_compiler(), reason="needs a C++ compiler")


def graph(config: CompileConfig = UNCOMPILED) -> Figures:
    return graphs.model_figures(2, DUAL, config)[1]


@pytest.fixture(scope="module")
def clean() -> Figures:
    return graph()


def optimized() -> OptimizedModel:
    return dllm_compile.optimize(random_llada("tiny", 2, "cpu"), compile=True)


def code(fast: OptimizedModel) -> Figures:
    return compiled.code_figures(fast, "dual", compiled.DECODINGS["dual"])


@pytest.fixture(scope="module")
def clean_code() -> Figures:
    return code(optimized())


def insert_cast(gm: GraphModule) -> Outcome:
    """A cast to the dtype that the value has already, in front of the first product."""
    product = find(gm, torch.ops.aten.linear.default)[0]
    x = product.args[0]
    with gm.graph.inserting_before(product):
        cast = gm.graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float32})
    cast.meta.update(x.meta)
    product.replace_input_with(x, cast)
    outcome = Outcome()
    outcome.accept()
    return outcome


def test_an_extra_cast(clean: Figures, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "FUSE", (*FUSE, GraphPass("plant_cast", Level.EXACT, insert_cast)))
    text = compare(clean, graph(), FILE)
    assert "2 layers/cached_step: calls of aten._to_copy: 1, expected none (worse: an operator was added" in text
    assert '"2 layers/cached_step/calls/aten._to_copy": 1,' in text


def test_a_disabled_pass(clean: Figures):
    text = compare(clean, graph(CompileConfig(compile=False, disable=("pack_qkv",))), FILE)
    assert "regions rewritten by pack_qkv: none, expected 2 (worse: the pass is disabled" in text
    assert "pack_gate_up" not in text
    assert "calls of aten.linear: " in text


def test_a_pass_that_matches_less(clean: Figures, monkeypatch: pytest.MonkeyPatch):
    """One region of two is left as it was, as when a matcher becomes too strict."""
    pass_ = FUSE[0]

    def fewer(gm: GraphModule) -> Outcome:
        outcome = pass_.apply(gm)
        outcome.matches -= 1
        return outcome

    planted = GraphPass(pass_.name, pass_.level, fewer)
    monkeypatch.setattr(api, "FUSE", (planted, *FUSE[1:]))
    text = compare(clean, graph(), FILE)
    assert f"2 layers/canonical: regions rewritten by {pass_.name}: 1, expected 2 (worse" in text
    assert text.startswith("1 of ")


@needs_compiler
@pytest.mark.slow
def test_a_lost_fusion(clean_code: Figures):
    with torch._inductor.config.patch(max_fusion_size=1):
        text = compare(clean_code, code(optimized()), FILE)
    assert "dual/cached_step: kernels of Inductor: " in text
    assert "(worse: a fusion was lost)" in text


@needs_compiler
@pytest.mark.slow
def test_a_recompile(clean_code: Figures, monkeypatch: pytest.MonkeyPatch):
    """Sizes are no longer marked as free, so that the first ones are compiled in."""
    monkeypatch.setattr(compiling, "_mark", lambda nodes, values: None)
    text = compare(clean_code, code(optimized()), FILE)
    assert "dual: compiled again: " in text
    assert "(worse: a size or a setting became part of what the code is compiled for)" in text


def test_more_forwards(small_fast: OptimizedModel, monkeypatch: pytest.MonkeyPatch):
    """A commit rule that keeps less."""
    usual = {"threshold": {"threshold": 0.9}}
    monkeypatch.setattr(decoding, "DECODINGS", usual)
    monkeypatch.setattr(decoding, "PROBLEMS", (("code", 1),))
    monkeypatch.setattr(decoding, "TOKENS", 32)
    expected = decoding.decoding_figures(small_fast)
    monkeypatch.setattr(decoding, "DECODINGS", {"threshold": {"threshold": 2.0}})
    text = compare(expected, decoding.decoding_figures(small_fast), FILE)
    assert "threshold: forwards problem 0: " in text
    assert "(worse: fewer tokens are committed in a step)" in text


def test_an_unexplained_improvement(clean: Figures):
    """Fewer calls than expected: a projection and its norm have become one operator."""
    fast, _ = graphs.model_figures(2, DUAL)
    better = graphs.program_figures("2 layers", fast, graphs.programs_of(fast, graphs.card_passes()), DUAL)
    figures = {name: value for name, value in clean.items() if "canonical" in name} | better
    text = compare(clean, figures, FILE)
    fewer = [line for line in text.splitlines() if "calls of aten.linear" in line]
    assert fewer
    assert all("better than expected and nobody said so" in line for line in fewer)
    assert "python -m benchmarks gates --update" in text


@pytest.mark.parametrize(("by", "saying"), [(1, "better than expected"), (-1, "worse: ")])
@pytest.mark.parametrize("kind", ["flops", "bytes", "state bytes"])
def test_both_ways(clean: Figures, kind: str, by: int, saying: str):
    name = f"2 layers/cached_step/{kind}"
    text = compare({**clean, name: clean[name] + by}, clean, FILE)
    assert text.startswith("1 of ")
    assert saying in text
    assert f'paste:  "{name}": {clean[name]},' in text


def test_the_pasted_line_makes_the_gate_pass(clean: Figures, tmp_path: Path):
    """As a person would do it: put the line that is shown in the place of the old one."""
    name = "2 layers/cached_step/flops"
    path = tmp_path / "expected.json"
    Expected({**clean, name: clean[name] + 7}).write(path)
    text = compare(Expected.read(path).figures, clean, path)
    line = next(line for line in text.splitlines() if "paste:" in line).partition("paste:")[2].strip()
    lines = [line if old.startswith(f'"{name}"') else old for old in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    assert compare(Expected.read(path).figures, clean, path) == ""


def test_a_figure_that_is_gone_is_removed_by_hand(clean: Figures):
    text = compare({**clean, "2 layers/old_step/flops": 5}, clean, FILE)
    assert 'remove: "2 layers/old_step/flops"' in text


def test_unchanged_code_passes_ten_times(clean: Figures):
    fast, _ = graphs.model_figures(2, ())
    programs = {name: value for name, value in clean.items() if "canonical" not in name}
    for _ in range(10):
        found = graphs.program_figures("2 layers", fast, graphs.programs_of(fast), DUAL)
        assert compare(programs, found, FILE) == ""


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("measure", [graphs.graph_figures, compiled.compiled_figures, decoding.decoding_figures])
def test_every_gate_passes_ten_times(measure: Callable[[], Any]):
    expected = measure()
    for _ in range(10):
        assert compare(expected, measure(), FILE) == ""
