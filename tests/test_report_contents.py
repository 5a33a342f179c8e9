# SPDX-License-Identifier: Apache-2.0
"""What a report must hold, field by field, in its dictionary and as text; cache bytes by their formula."""

from __future__ import annotations

import json
from typing import Any

import pytest

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig
from dllm_compile.report import cache_bytes, session_reports
from dllm_compile.runtime.capacity import Capacity
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.session import SessionPool
from tests.conftest import tiny_model
from tests.passes.pieces import Mini
from tests.real import prompts_of

SHORT = DecodingConfig(max_new_tokens=6, block_length=3)
# Every level occurs: exact passes, FP8's numeric one, policies.
KINDS = (
    SHORT,
    SHORT.replace(cache="dual"),
    SHORT.replace(cache="lacache", lacache_layers=(0, 1), lacache_interval=2),
    DecodingConfig(max_new_tokens=6, cache="flash", commit="flash_verify", window_length=4),
)

PASS = {
    "name": str, "level": str, "matches": int, "required": int | None, "refusals": list, "error": float | None,
    "nodes_before": int, "nodes_after": int, "milliseconds": float,
}  # fmt: skip
PROGRAM = {
    "name": str, "inputs": dict, "operators": dict, "passes": list, "compiled": bool, "seconds": float, "graphs": int,
    "launches": dict | None, "work": dict | None,
}  # fmt: skip
WORK = {"size": str, "rows": int, "bytes": int, "flops": int, "card": str | None, "floor_us": float | None}


def assert_fields(data: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, kind in fields.items():
        assert name in data, name
        assert isinstance(data[name], kind), name


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    fast = dllm_compile.optimize(tiny_model(n_layers=3), compile=False)
    for config in KINDS:
        fast.generate(prompts_of(4, 2), config)
    return fast


def test_every_fact_is_there(fast):
    """Of each pass and program; JSON and back changes nothing."""
    data = json.loads(json.dumps(fast.report().to_dict()))
    results = [*data["passes"], *(result for program in data["programs"] for result in program["passes"])]
    assert len(results) > 20
    for result in results:
        assert_fields(result, PASS)
        assert result["milliseconds"] >= 0
        assert result["nodes_before"] > 0
        assert result["nodes_after"] > 0
    assert {result["level"] for result in results} == {"exact", "policy"}
    names = {program["name"] for program in data["programs"]}
    assert {"step", "cached_step", "verify_step"} < names
    for program in data["programs"]:
        assert_fields(program, PROGRAM)
        assert program["inputs"]
        assert sum(program["operators"].values()) > 10
        assert_fields(program["work"], WORK)
        assert program["work"]["bytes"] > 0
        assert program["work"]["flops"] > 0
    assert all(cache["bytes_per_row"] > 0 for cache in data["caches"])
    rebuilt = next(one for one in data["passes"] if one["name"] == "normalize_norm")
    assert rebuilt["nodes_after"] < rebuilt["nodes_before"]
    assert rebuilt["error"] is not None, "a certificate"


def test_the_text_says_the_same(fast):
    """Numbers of the dictionary, where the text has them."""
    report, text = fast.report(), str(fast.report())
    for program in report.programs:
        part = text.partition(f"program {program.name} (")[2].partition("\nprogram ")[0]
        assert part
        for result in program.passes:
            line = next(line for line in part.splitlines() if line.startswith(f"{result.name} "))
            assert f"{result.nodes_before} -> {result.nodes_after}" in line
            assert result.level.value in line.split()
        assert f"{program.work.rows} rows" in part
        operator, count = next(iter(program.operators.items()))
        assert f"{operator} x{count}" in part


def test_refusals_say_where_and_why():
    fast = dllm_compile.optimize(Mini(ffn_kind="chunked"), CompileConfig(strict=False, compile=False))
    refusals = [one for result in fast.report().to_dict()["passes"] for one in result["refusals"]]
    assert refusals
    for refusal in refusals:
        assert refusal["where"]
        assert refusal["reason"]
        assert refusal["reason"] in str(fast.report())


def test_fp8_is_numeric():
    pytest.importorskip("torchao")
    from tests.passes.fp8_pieces import wide_model

    report = dllm_compile.optimize(wide_model(), precision="fp8", compile=False).report()
    assert [one.name for one in report.passes if one.level.value == "numeric"] == ["quantize_ffn_fp8"]
    assert report.to_dict()["fp8"]["fp8_bytes"] > 0


@pytest.mark.parametrize("slots", [1, 3])
def test_bytes_that_are_kept_follow_the_formula(fast, slots):
    """The longest canvases of as many samples as there are slots, rounded up as the buffers are, and a spare row."""
    config = DecodingConfig(max_new_tokens=6, block_length=3, cache="dual", slots=slots, eos="none")
    prompts, pool = prompts_of(40, 2, 9, 17, 33, seed=2), SessionPool()
    decode(fast.programs, fast.facts, prompts, config, sessions=pool)
    (kept,) = session_reports(pool.idle())
    rows = slots * (40 + 6)
    rounded = -(-(rows + 1) // 256) * 256
    assert kept.rows == rounded
    shape = fast.programs.shape
    per_row = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    assert cache_bytes(shape)[0].bytes_per_row == per_row
    assert kept.cache_bytes == per_row * (rounded + 1)
    (session,) = pool.idle()
    held = sum(tensor.nbytes for tensor in session.cache.caches(False).values())
    assert held == kept.cache_bytes
    assert Capacity.of(session.layout.samples, slots, rows, config).rows == rounded


def test_kept_buffers_are_in_the_report(fast, monkeypatch):
    """As they are on a card: buffers, caches and captured steps between calls."""
    pool = SessionPool()
    decode(fast.programs, fast.facts, prompts_of(4), SHORT.replace(cache="dual"), sessions=pool)
    monkeypatch.setattr(fast, "_sessions", pool)
    (session,) = fast.report().sessions
    assert session.cache_bytes > 0
    assert f"buffers for {session.rows} rows, caches of " in str(fast.report())
    assert json.loads(json.dumps(fast.report().to_dict()))["sessions"][0]["captured_graphs"] == 0
