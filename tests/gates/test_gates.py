# SPDX-License-Identifier: Apache-2.0
"""Deterministic figures of this code are the expected ones, neither worse nor better.

A failure says what changed and which line to paste where that was meant; `python -m benchmarks gates --update` writes
all of them.
"""

from __future__ import annotations

import pytest

import dllm_compile
from benchmarks import gates
from dllm_compile._compat import has_cxx_compiler

pytestmark = pytest.mark.slow


def assert_expected(group: str, found: gates.Figures) -> None:
    path = gates.expected_path(group)
    if not path.exists():
        pytest.skip(f"no expected figures for this torch: {path.name}, written by python -m benchmarks gates --update")
    text = gates.compare(gates.Expected.read(path).of(group), found, path)
    assert not text, f"\n{text}"


@pytest.mark.parametrize("group", ["graphs", "fp8"])
def test_graphs(group: str):
    """Matches of every pass, calls of every program, FLOPs and bytes of a step, bytes of caches."""
    if not gates.is_possible(group):
        pytest.skip("needs torchao")
    assert_expected(group, gates.measure(group))


@pytest.mark.skipif(not has_cxx_compiler(), reason="needs a C++ compiler")
def test_generated_code():
    """Segments, kernels, library calls; nothing is compiled again for another size."""
    assert_expected("compiled", gates.measure("compiled"))


def test_decoding(small_fast: dllm_compile.OptimizedModel):
    """Forwards and rows for the fixed problems."""
    found = gates.decoding_figures(small_fast)
    assert_expected("decoding", {f"decoding/{name}": value for name, value in found.items()})


def test_every_figure_expected_belongs_to_a_group():
    for path in gates.expected_path("graphs").parent.glob("*.json"):
        figures = gates.Expected.read(path).figures
        assert figures
        assert {name.partition("/")[0] for name in figures} <= set(gates.GROUPS)
        assert all(isinstance(value, int) for value in figures.values())
