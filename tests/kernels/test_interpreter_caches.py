# SPDX-License-Identifier: Apache-2.0
"""Indexing, masks and arithmetic of the caches' Triton kernels, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .test_interpreter import DTYPES, ROOT, pytestmark  # noqa: F401  (skipped where that one is)

FACACHE = [
    "one row, its own block",
    "a block of one row",
    "first, last, whole and middle",
    "several parts a tile",
    "tiles larger than all",
    "head dim 128",
]
LAYOUTS = ["heads outside", "dims outside", "NaN stays", "chosen blocks"]
ROPE_WRITE = [
    "one row",
    "grouped heads",
    "one key head",
    "heads no multiple of the share",
    "head dim no power of two",
    "share larger than all",
    "chosen share",
]
SCORES = [
    "one key",
    "grouped, padded window",
    "many spans in one block",
    "no window, no span",
    "width no power of two",
    "chosen cut",
]


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-m", "tests.kernels.interpreted_caches"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_case_is_looked_at(measured):
    def of_both(names):
        return [f"{name}, {dtype}" for name in names for dtype in DTYPES]

    assert list(measured["facache"]) == of_both(FACACHE)
    assert list(measured["layouts"]) == LAYOUTS
    assert list(measured["rope write"]) == of_both(ROPE_WRITE)
    assert list(measured["scores"]) == of_both(SCORES)


@pytest.mark.parametrize("name", FACACHE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_facache(measured, name, dtype):
    found = measured["facache"][f"{name}, {dtype}"]
    # fp16 weights and results: half a unit in the last place (2^-11) of values below 4, and of sums of those in num.
    out, num = {"torch.float32": (1e-6, 5e-6), "torch.float16": (4 * 2**-10, 4 * 2**-10)}[dtype]
    assert found["first"] < out
    assert found["step"] < out
    assert found["m"] < 2e-6  # scores up to 6
    assert found["den"] < 6e-6  # up to 10
    assert found["num"] < num
    assert found["inside touched"] == 0
    assert found["state changed"] == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_facache_layouts(measured, name):
    assert measured["layouts"][name] is True


@pytest.mark.parametrize("name", ROPE_WRITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write_is_bit_equal(measured, name, dtype):
    assert measured["rope write"][f"{name}, {dtype}"] == 0


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(measured, name, dtype):
    assert measured["scores"][f"{name}, {dtype}"] < 3e-7  # of the products' magnitudes
