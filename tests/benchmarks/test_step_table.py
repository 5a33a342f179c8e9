# SPDX-License-Identifier: Apache-2.0
"""The table of steps: what kernels are for, and the least time of a step counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import step_table
from dllm_compile.cards import Card

KERNELS = [
    {"kernel": "nvjet_sm90_x", "us": 50.0},
    {"kernel": "fp8_linear_kernel", "us": 10.0},
    {"kernel": "row_attention_kernel", "us": 15.0},
    {"kernel": "verify_attention_kernel", "us": 5.0},
    {"kernel": "tile_kernel", "us": 4.0},
    {"kernel": "fp8_linear_add_rms_norm_kernel", "us": 6.0},
    {"kernel": "swiglu_quant_kernel", "us": 2.0},
    {"kernel": "triton_poi_fused__to_copy_add_cat_index_mul_neg_row_attention_split", "us": 3.0},
    {"kernel": "others", "us": 5.0},
]
ROW = {"name": "flash step", "precision": "fp8", "batch": 2, "canvas": 100, "median_ms": 1.0}


def _result(*rows: dict[str, Any]) -> dict[str, Any]:
    environment = {"card": "NVIDIA H200", "torch": "2.11", "commit": "abc"}
    return {"environment": environment, "settings": {"shape": "tiny", "layers": 3}, "rows": [*rows]}


def test_each_kernel_belongs_to_one_part():
    shares = dict(zip((name for name, _ in step_table.PARTS), step_table.shares_of(KERNELS), strict=True))
    assert shares == {
        "products": pytest.approx(0.60),
        "attention": pytest.approx(0.20),
        "head": pytest.approx(0.04),
        "norms, SwiGLU, codes": pytest.approx(0.08),
        "rotation, writes": pytest.approx(0.03),
        "everything else": pytest.approx(0.05),
    }


def test_the_floor_is_that_of_a_count_by_hand():
    """Width 128, feed-forward 256, vocabulary 512, 3 layers, of which 2 in FP8; 2 samples of 100 keys."""
    projections, feed_forward, head = 4 * 128 * 128, 3 * 128 * 256, 128 * 512
    read = 2 * (3 * projections + feed_forward + head) + 2 * feed_forward + 2 * 100 * 3 * 2 * 128 * 2
    slow_to_read = Card("x", bytes_per_second=1e6, flops=1e15, fp8_flops=1e15)
    assert step_table.floor_ms(slow_to_read, ROW, "tiny", 3) == pytest.approx(1e3 * read / 1e6)
    verify = {**ROW, "name": "flash step + verify"}
    assert step_table.floor_ms(slow_to_read, verify, "tiny", 3) == pytest.approx(2e3 * read / 1e6)
    slow_to_multiply = Card("x", bytes_per_second=1e15, flops=1e6, fp8_flops=2e6)
    rows, attention = 2 * 128, 2 * 2 * 128 * 100 * 3
    products = rows * (2 * (3 * projections + feed_forward) + attention) + 2 * 16 * 2 * head
    expected = products / 1e6 + rows * 2 * 2 * feed_forward / 2e6
    assert step_table.floor_ms(slow_to_multiply, ROW, "tiny", 3) == pytest.approx(1e3 * expected)
    assert step_table.floor_ms(Card("x", 1e6, 1e6, None), ROW, "tiny", 3) is None


def test_what_is_not_profiled_or_not_in_fp8_has_no_line():
    profiled, other = {**ROW, "kernels": KERNELS}, {**ROW, "kernels": KERNELS, "precision": "checkpoint"}
    lines = step_table.table(_result(ROW, profiled, other)).splitlines()
    assert lines[0] == "NVIDIA H200, torch 2.11, commit abc; FP8 in layers 1 to 2."
    assert len(lines) == 5
    assert lines[4].startswith("| flash step | 2 | 1.00 | 0 % | 20 % | 4 % | 60 % |")
    with pytest.raises(LookupError, match="--profile"):
        step_table.table(_result(ROW, other))
