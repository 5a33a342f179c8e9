# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmarks: every case can be asked for, and a result says how it was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES, COMMANDS, main
from benchmarks.figures import Result


@pytest.mark.parametrize("name", [*CASES, *COMMANDS])
def test_every_case_has_options(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_the_help_shows_percentages_as_they_are_typed(capsys: pytest.CaptureFixture[str]):
    shown = {}
    for words in (["compare", "--help"], ["--help"]):
        with pytest.raises(SystemExit):
            main(words)
        shown[words[0]] = capsys.readouterr().out
        assert "%%" not in shown[words[0]]
    assert "--fail-on 5%\n" in shown["compare"]


def test_a_result_holds_what_compare_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The bundled model on two problems: rows computed, settings, date."""
    path = tmp_path / "small.json"
    words = ["small-model", "-n", "2", "--batch-size", "2", "--device", "cpu", "--no-compile", "--families", "code"]
    assert main([*words, "--configs", "threshold 0.7", "--json", str(path)]) == 0
    assert "row_forwards" in capsys.readouterr().out
    data = json.loads(path.read_text(encoding="utf-8"))
    (row,) = data["rows"]
    assert row["row_forwards"] > row["batch_forwards"]
    assert row["config"]["check_every"] == 1  # rows of samples that have ended are not counted
    assert data["settings"]["problems"] == 2
    assert data["environment"]["date"][:2] == "20"
    assert Result.read(path).case == "small-model"
