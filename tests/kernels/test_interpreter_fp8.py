# SPDX-License-Identifier: Apache-2.0
"""Indexing, masks and arithmetic of the FP8 operators' Triton kernels, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .test_interpreter import DTYPES, ROOT, pytestmark  # noqa: F401  (skipped where that one is)

NORM = [
    "one group",
    "one row, two parts",
    "one part",
    "width no power of two",
    "four parts, width no power of two",
    "eight parts",
]
SWIGLU = ["one row", "ragged rows", "ragged columns", "rectangle larger than all", "chosen rectangle"]
EDGES = ["poisoned groups", "their codes", "other codes", "other scales"]
LINEAR = [
    "one row, swapped",
    "ragged rows, swapped, turned",
    "ragged rows, turned",
    "parts of unequal length",
    "parts, several row tiles",
    "a part of one step",
    "chosen, 16",
    "chosen, 64",
]
PARTS = ["one row, swapped", "ragged everything, swapped", "ragged everything", "unequal parts"]


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-m", "tests.kernels.interpreted_fp8"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_case_is_looked_at(measured):
    assert list(measured["norm"]) == [f"{name}, {kind}" for name in NORM for kind in ("exact", "random")]
    kinds = ("known", "random", "as it is")
    assert list(measured["swiglu"]) == [f"{name}, {kind}" for name in SWIGLU for kind in kinds]
    assert list(measured["edges"]) == EDGES
    assert list(measured["linear"]) == [f"{name}, {how}" for name in LINEAR for how in ("descriptors", "pointers")]
    assert list(measured["parts"]) == [f"{name}, {dtype}" for name in PARTS for dtype in DTYPES]


@pytest.mark.parametrize("name", NORM)
def test_add_and_norm_are_exact_where_sums_are(measured, name):
    assert set(measured["norm"][f"{name}, exact"].values()) == {0}


@pytest.mark.parametrize("name", NORM)
def test_add_and_norm(measured, name):
    found = measured["norm"][f"{name}, random"]
    assert found["total"] == 0
    assert found["normed"] < 1e-6  # the order of the sum of squares
    assert found["scales"] < 1e-6
    assert found["codes"] <= 1  # a value within 1e-6 of a tie
    assert found["beyond"] == 0


@pytest.mark.parametrize("name", SWIGLU)
@pytest.mark.parametrize("kind", ["known", "random", "as it is"])
def test_swiglu(measured, name, kind):
    found = measured["swiglu"][f"{name}, {kind}"]
    # The correction of the quotient is rounded twice here and once on a card: a unit in the last place, 1.2e-7.
    assert found["scales"] <= (5e-7 if kind == "random" else 0.0)
    assert found["before"] < (1e-6 if kind == "random" else 1.3e-7)
    assert found["codes"] <= (1 if kind == "random" else 0)


@pytest.mark.parametrize("name", EDGES)
def test_edges(measured, name):
    assert measured["edges"][name] is True


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("how", ["descriptors", "pointers"])
def test_linear(measured, name, how):
    assert measured["linear"][f"{name}, {how}"] < 5e-7


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts(measured, name, dtype):
    assert measured["parts"][f"{name}, {dtype}"] < 5e-7


def test_parts_summed_by_the_next_kernel(measured):
    assert measured["chain"]["total"] < 1e-6
    assert measured["chain"]["normed"] < 1e-6
