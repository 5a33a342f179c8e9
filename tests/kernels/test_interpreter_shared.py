# SPDX-License-Identifier: Apache-2.0
"""Programs that share a tile's keys, and scores of keys inside attention, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .test_interpreter import DTYPES, ROOT, pytestmark  # noqa: F401  (skipped where that one is)

SHARED = [
    "one key",
    "whole shares",
    "the last share is short",
    "shares without keys, pad rows",
    "several parts a tile",
    "head dim 128",
    "64 rows",
    "64 rows, whole blocks only",
    "64 rows, shared keys",
]
SCORED = [
    "one key",
    "grouped heads, gaps in the window",
    "the window ends in the third tile",
    "part of a tile, shared keys",
    "samples without a window",
    "head dim 128",
]


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-m", "tests.kernels.interpreted_shared"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_case_is_looked_at(measured):
    for kind, names in {"shared": SHARED, "scored": SCORED}.items():
        assert list(measured[kind]) == [f"{name}, {dtype}" for name in names for dtype in DTYPES]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_that_share_keys(measured, name, dtype):
    found = measured["shared"][f"{name}, {dtype}"]
    # fp16: half a unit in the last place (2^-11) of the weights and of the result, on values below 4.
    assert found["error"] < {"torch.float32": 1e-6, "torch.float16": 4 * 2**-10}[dtype]
    assert found["other bits"] == 0
    assert found["counted"] == 0


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_inside_attention(measured, name, dtype):
    found = measured["scored"][f"{name}, {dtype}"]
    assert found["error"] < 3e-7  # of the products' magnitudes; three fp16 parts hold an fp32 sum of this size
    assert found["outside"] == 0
    assert found["other bits"] == 0


def test_a_nan_stays_in_its_sample(measured):
    assert measured["NaN stays"] is True
