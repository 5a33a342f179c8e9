# SPDX-License-Identifier: Apache-2.0
"""Comparison of result files: ratios are judged, what says nothing is refused, and committed files can be read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.figures import Result, figures_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

ROWS: list[dict[str, Any]] = [
    {"name": "model, eager", "batch": 1, "median_ms": 40.0, "min_ms": 39.0, "max_ms": 41.0},
    {"name": "step", "batch": 1, "precision": "fp8", "median_ms": 4.0, "min_ms": 3.9, "max_ms": 4.1},
    {"name": "call", "batch": 8, "ms_per_forward": 8.0, "canvas_tokens_per_second": 100.0},
]
BASE: dict[str, Any] = {
    "case": "decoding",
    "environment": {"card": "NVIDIA H200", "torch": "2.11.0", "commit": "abc1234"},
    "settings": {"shape": "8b", "layers": 32, "rounds": 7},
    "rows": ROWS,
}


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Write BASE and a changed copy, compare them; status and what was said."""

    def run(*words: str, **changes: Any) -> tuple[int, str]:
        new = copy.deepcopy(BASE)
        for path, value in changes.items():
            *parents, last = path.split("__")
            target: Any = new
            for part in parents:
                target = target[int(part) if part.isdigit() else part]
            target[last] = value
        for name, data in (("old.json", BASE), ("new.json", new)):
            (tmp_path / name).write_text(json.dumps(data))
        status = main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *words])
        out, err = capsys.readouterr()
        return status, out + err

    return run


def test_equal_results_pass(compared: Any):
    status, text = compared()
    assert status == 0
    assert "none of 2 ratios fell by more than 5 %" in text
    assert "10.000" in text  # 40 ms over 4 ms


def test_a_slower_step_fails_by_name(compared: Any):
    """A planted regression of 6 %."""
    status, text = compared(rows__1__median_ms=4.0 / 0.94)
    assert status == 1
    assert "1 of 2 ratios fell by more than 5 %: step, fp8, batch 1" in text
    assert "SLOWER" in text
    assert compared("--fail-on", "7%", rows__1__median_ms=4.0 / 0.94)[0] == 0
    assert compared("--fail-on", "0.03", rows__2__ms_per_forward=8.0 / 0.96)[0] == 1


def test_a_faster_step_is_said_and_passes(compared: Any):
    status, text = compared(rows__1__median_ms=2.0)
    assert status == 0
    assert "+100.0 %" in text
    assert "faster" in text


def test_a_slower_clock_changes_no_ratio(compared: Any):
    """Everything takes half as long again: absolute times are shown, and nothing is judged by them."""
    status, text = compared(rows__0__median_ms=60.0, rows__1__median_ms=6.0, rows__2__ms_per_forward=12.0)
    assert status == 0
    assert "60.000 ms" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment__card": "NVIDIA A100-SXM4-80GB"}, "ratios differ from card to card"),
        ({"settings__layers": 16}, "layers 32 and 16"),
        ({"settings__shape": "tiny"}, "shape 8b and tiny"),
        ({"case": "ratios"}, "compare files of one case"),
        ({"rows": ROWS[:1]}, "no ratio in common"),
    ],
)
def test_what_says_nothing_is_refused(compared: Any, changes: dict[str, Any], said: str):
    status, text = compared(**changes)
    assert status == 2
    assert said in text


def test_more_rounds_are_comparable(compared: Any):
    assert compared(settings__rounds=21)[0] == 0


def test_what_only_one_file_has_is_listed(compared: Any):
    status, text = compared(rows=ROWS[:2])
    assert status == 0
    assert "only in old.json: call, batch 8" in text


ENVIRONMENT = BASE["environment"]
NO_RESULTS: dict[str, tuple[Any, str]] = {
    "text": ("nothing", "it is not JSON"),
    "not UTF-8": (b"\xff\xfe", "it is not JSON"),
    "too deep": (b"[" * 100_000, "it is not JSON"),
    "list": ([], "it holds no object"),
    "empty": ({}, "it has no case"),
    "case": ({**BASE, "case": ["decoding"]}, "its case is no text"),
    "no rows": ({"case": "decoding", "environment": ENVIRONMENT}, "it has no rows"),
    "environment": ({**BASE, "environment": ["H200"]}, "its environment is no object"),
    "no commit": ({**BASE, "environment": {"card": "H200", "torch": "2.11.0"}}, "does not say the commit"),
    "card": ({**BASE, "environment": {**ENVIRONMENT, "card": ["H200"]}}, "does not say the card"),
    "settings": ({**BASE, "settings": None}, "its settings is no object"),
    "rows": ({**BASE, "rows": 3}, "its rows is no list"),
    "zero rows": ({**BASE, "rows": []}, "it has no rows"),
    "row": ({**BASE, "rows": [*ROWS, 3]}, "row 4 is no object"),
}


@pytest.mark.parametrize("command", ["compare", "pages", "history"])
@pytest.mark.parametrize(("content", "said"), NO_RESULTS.values(), ids=NO_RESULTS)
def test_no_result_is_refused(
    content: Any, said: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """By every command that reads one; a folder's other files are left out of a history."""
    file = tmp_path / "x.json"
    raw = content.encode() if isinstance(content, str) else content
    file.write_bytes(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    words = {"compare": [file, file], "pages": [file], "history": [tmp_path, "--out", tmp_path / "x.svg"]}[command]
    assert main([command, *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    if command == "history":
        assert f"{tmp_path} holds no result" in error
    else:
        assert error.startswith(f"{command}: {file} is no result of `python -m benchmarks CASE --json FILE`: ")
        assert said in error


@pytest.mark.parametrize("command", ["compare", "pages"])
def test_a_file_that_is_not_there_is_said(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for path in (tmp_path / "none.json", tmp_path):
        assert main([command, *[str(path)] * (2 if command == "compare" else 1)]) == 2
        assert f"{command}: {path} cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        {"median_ms": 0},
        {"median_ms": "fast"},
        {"median_ms": True},
        {"ms_per_forward": float("nan")},
        {"median_ms": 1.0, "min_ms": 0.5, "max_ms": None},
        {"median_ms": 1.0, "min_ms": 0.5},
        {"eager": {"median_ms": [1.0]}, "step": {"median_ms": 1.0}},
        {"unit": "us", "eager": 4.0, "fused": 0.0},
        {"ratio": 0.0, "ms": 1.0},
        {"ratio": "2", "ms": 1.0},
        {"ratio": 2.0, "ms": None},
        {"ratio": 2.0, "ms": 1.0, "highest": 3.0},
    ],
    ids=str,
)
def test_a_time_that_is_none_is_refused(compared: Any, row: dict[str, Any]):
    status, text = compared(rows=[*ROWS, {"name": "planted", **row}])
    assert status == 2
    assert "new.json: row 4: " in text
    assert "which is no positive number" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("limit", ["5 percent", "120%", "-1%"])
def test_a_limit_is_a_share(limit: str):
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", f"--fail-on={limit}"])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_can_be_read(path: Path):
    result = Result.read(path)
    assert result.figures
    assert any(figure.ratio for figure in result.figures.values())
    assert all(figure.time > 0 for figure in result.figures.values())


def test_ratios_of_times_side_by_side():
    """The first is the baseline; rates are no times."""
    rows = [
        {"kernel": "qkv", "rows": 32, "unit": "us", "eager": 90.0, "fused": 30.0, "fused_TBps": 1.5},
        {"batch": 1, "model, eager": {"median_ms": 6.0}, "step": {"median_ms": 2.0, "min_ms": 1.0, "max_ms": 3.0}},
    ]
    figures = figures_of(rows)
    assert {name: figure.ratio for name, figure in figures.items()} == {
        "qkv, rows 32: eager": None,
        "qkv, rows 32: fused": 3.0,
        "batch 1: model, eager": None,
        "batch 1: step": 3.0,
    }
    assert figures["batch 1: step"].spread == 1.0
