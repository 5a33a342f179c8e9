# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmarks: every case can be asked for, and a result says how it was measured."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import small_model
from benchmarks.__main__ import CASES, COMMANDS, main
from benchmarks.figures import Result, ResultError, write


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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the hours of a measurement, and records that it was made."""
    calls: list[Any] = []
    monkeypatch.setattr(small_model, "run", lambda arguments: calls.append(arguments) or [{"name": "measured"}])
    return calls


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is a folder: give the name of a file in it"),
        ("/proc/x.json", "cannot be written: "),
        ("file/x.json", "cannot be written: "),
        ("file/deep/x.json", "cannot be written: "),
        (f"{'x' * 300}.json", "cannot be written: File name too long"),
        ("link", "cannot be written: "),
    ],
)
def test_a_path_that_cannot_be_written_is_said_before_measuring(
    name: str, said: str, tmp_path: Path, measured: list[Any], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("old", encoding="utf-8")
    (tmp_path / "link").symlink_to("/proc/none/x.json")
    assert main(["small-model", "--json", str(tmp_path / name)]) == 2
    shown = capsys.readouterr()
    assert not measured
    assert shown.err.startswith(f"small-model: {tmp_path / name} {said}")
    assert shown.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_path_that_could_be_written_and_no_longer_can_leaves_the_figures_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "new" / "x.json"
    assert not path.parent.exists()

    def run(arguments: Any) -> list[dict[str, Any]]:
        assert not list(path.parent.iterdir())  # the folder is there, nothing in it
        path.parent.rmdir()
        path.parent.write_text("", encoding="utf-8")
        return [{"name": "measured"}]

    monkeypatch.setattr(small_model, "run", run)
    assert main(["small-model", "--json", str(path)]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rows"] == [{"name": "measured"}]
    assert "cannot be written" in shown.err


def test_figures_are_written_where_they_cannot_be_printed(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
):
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        main(["small-model", "--json", str(tmp_path / "x.json")])
    assert Result.read(tmp_path / "x.json").case == "small-model"


@pytest.mark.parametrize("failing", ["open", "replace"])
def test_what_was_there_stays_where_writing_fails(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.json"
    path.write_text("old", encoding="utf-8")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if failing == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(os, "fsync", fail)  # where a full disk may be noticed first
    with pytest.raises(ResultError, match=r"x\.json cannot be written: No space left on device"):
        write(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_a_file_is_replaced_with_its_mode_and_a_link_stays_one(tmp_path: Path):
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    link.symlink_to("x.json")
    write(link, "nouveau, é")
    assert link.is_symlink()
    assert path.read_text(encoding="utf-8") == "nouveau, é"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    plain = tmp_path / "plain"
    plain.write_text("", encoding="utf-8")
    write(tmp_path / "new", b"bytes")
    assert (tmp_path / "new").stat().st_mode == plain.stat().st_mode


def test_a_pipe_is_written_into(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
