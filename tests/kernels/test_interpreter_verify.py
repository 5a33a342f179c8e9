# SPDX-License-Identifier: Apache-2.0
"""Indexing, masks, cuts and merges of the verify pass's Triton kernels, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .test_interpreter import DTYPES, ROOT, pytestmark  # noqa: F401  (skipped where that one is)

ATTENTION = [
    "one part",
    "four parts",
    "ragged, four parts",
    "parts without keys",
    "every key is hidden",
    "head dim 128, 24 rows in a block of 32",
    "chosen blocks",
]
LAYOUTS = ["heads outside", "dims outside", "rows nobody may read", "runs are equal"]
HEAD = ["one row", "ragged everything", "persistent"]


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-m", "tests.kernels.interpreted_verify"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_case_is_looked_at(measured):
    assert list(measured["attention"]) == ATTENTION
    assert list(measured["layouts"]) == LAYOUTS
    assert list(measured["head"]) == HEAD


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(measured, name, dtype):
    found = measured["attention"][name]
    # fp16: half a unit in the last place (2^-11) of the weights and of the result, on values below 4.
    assert found[dtype] < {"torch.float32": 1e-6, "torch.float16": 4 * 2**-10}[dtype]
    assert found[f"{dtype}, not zero"] == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_layouts(measured, name):
    assert measured["layouts"][name] is True


@pytest.mark.parametrize("name", HEAD)
def test_head(measured, name):
    assert measured["head"][name]["token"] == 0
    assert measured["head"][name]["confidence"] == 0
    assert measured["head"][name]["given"] < 2e-6
