# SPDX-License-Identifier: Apache-2.0
"""What the committed expected figures must cover: a kind or a depth that is dropped would gate nothing, unnoticed."""

from __future__ import annotations

import re

import pytest

from benchmarks.gates import Expected, expected_path
from benchmarks.gates.expected import _KINDS
from dllm_compile.passes import FUSE, NORMALIZE

FILES = sorted(expected_path("graphs").parent.glob("torch-*.json"))
PROGRAMS = ("forward", "step", "cached_step", "verify_step", "lacache_first", "lacache_step")
OF_A_CARD = {"captures", "captured again"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def names(request: pytest.FixtureRequest) -> set[str]:
    return set(Expected.read(request.param).figures)


def test_files_of_both_ends_of_the_supported_versions():
    assert {path.stem for path in FILES} >= {"torch-2.11", "torch-2.13"}


def test_every_kind_of_figure_is_measured(names: set[str]):
    found = {part for name in names for part in name.split("/")} & set(_KINDS)
    assert found == set(_KINDS) - OF_A_CARD


@pytest.mark.parametrize("layers", [2, 4])
def test_graphs_of_two_and_four_layers(names: set[str], layers: int):
    """Matches of every pass over the canonical graph; of each program its calls, FLOPs, bytes and state."""
    where = f"graphs/{layers} layers"
    for graph_pass in (*NORMALIZE, *FUSE):
        assert f"{where}/canonical/matches/{graph_pass.name}" in names
    for program in PROGRAMS:
        assert any(name.startswith(f"{where}/{program}/calls/") for name in names), program
        assert any(name.startswith(f"{where}/{program}/matches/") for name in names) or program == "forward"
        for kind in () if program == "forward" else ("flops", "bytes", "state bytes"):
            assert f"{where}/{program}/{kind}" in names


def test_generated_code_and_decoding(names: set[str]):
    for decoding in ("uncached", "dual", "flash, verify"):
        assert f"compiled/{decoding}/recompiles" in names
        for kind in ("generated kernels", "library calls", "operator calls"):
            assert any(re.fullmatch(rf"compiled/{re.escape(decoding)}/\w+.*/{kind}", name) for name in names)
    for decoding in ("threshold", "factor, dual", "threshold, flash", "verify, flash"):
        for problem in range(4):
            assert f"decoding/{decoding}/forwards/problem {problem}" in names
