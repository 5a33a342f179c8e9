# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' indexing, masks, online softmax and merges, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

pytestmark = pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton 3.6's interpreter cannot use a runtime value as a loop bound with NumPy 2.4",
)

ROOT = Path(__file__).parents[2]
ATTENTION = [
    "one row",
    "whole blocks only",
    "ragged samples and pad rows",
    "several parts a tile",
    "block larger than everything",
    "head dim 128",
]
LAYOUTS = ["rows in no tile", "heads outside", "odd rows", "dims outside", "NaN stays", "chosen blocks"]
HEAD = ["one row", "ragged everything", "persistent", "sampled", "banned tile", "more than a block of tiles"]
DTYPES = ["torch.float32", "torch.float16"]


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-m", "tests.kernels.interpreted"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_case_is_looked_at(measured):
    assert list(measured["head"]) == HEAD
    assert list(measured["attention"]) == ATTENTION
    assert list(measured["layouts"]) == LAYOUTS


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(measured, name, dtype):
    # fp16: half a unit in the last place (2^-11) of the weights and of the result, on values below 4.
    assert measured["attention"][name][dtype] < {"torch.float32": 1e-6, "torch.float16": 4 * 2**-10}[dtype]


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_layouts(measured, name):
    assert measured["layouts"][name] is True


@pytest.mark.parametrize("name", HEAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head(measured, name, dtype):
    # The logits are exact, so that tokens must be equal, ties included.
    assert measured["head"][name][f"{dtype} tokens"] == 0
    assert measured["head"][name][f"{dtype} confidence"] < 1e-6


def test_noise(measured):
    other_bits, difference = measured["noise"]
    assert other_bits == 0
    assert difference < 4e-6  # the logarithms' last places, at values up to 16
