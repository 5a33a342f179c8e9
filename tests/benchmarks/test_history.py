# SPDX-License-Identifier: Apache-2.0
"""The drawing of results over commits: order, what is left out, and a file that comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import drawing, history
from benchmarks.__main__ import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three results of one card, one of another, and a file of another kind; names are not in order of dates."""
    for name, commit, date, card, ms in (
        ("a.json", "c3", "2026-03-01", "H200", 1.0),
        ("h200-2026-01-05-b.json", "c1", None, "H200", 4.0),
        ("c.json", "c2", "2026-02-01T10:00:00Z", "H200", 2.0),
        ("d.json", "c1", "2026-01-05", "A100", 8.0),
    ):
        environment = {"card": card, "torch": "2.13", "commit": commit, **({"date": date} if date else {})}
        rows = [{"name": "eager", "median_ms": 8.0}, {"name": "step", "median_ms": ms}]
        (tmp_path / name).write_text(json.dumps({"case": "decoding", "environment": environment, "rows": rows}))
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def test_results_are_in_order_of_dates(folder: Path):
    panels = history.read(folder)
    assert list(panels) == [("decoding", "A100"), ("decoding", "H200")]
    results = panels["decoding", "H200"]
    assert [result.environment["commit"] for result in results] == ["c1", "c2", "c3"]
    assert history.series(results, 8) == {"step": [2.0, 4.0, 8.0]}


def test_a_drawing(folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    out = folder / "drawn" / "history.svg"
    assert main(["history", str(folder), "--out", str(out)]) == 0
    assert "decoding on H200: c1, c2, c3" in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    assert "<svg" in text
    assert text.count("decoding on") >= 1 or "<use" in text


def test_nothing_to_draw(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["history", str(folder), "--only", "frontier", "--out", str(tmp_path / "x.svg")]) == 2
    assert "no result of frontier" in capsys.readouterr().err


def test_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["history", str(folder), "--out", str(folder / "x.svg")]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", drawing.ENDINGS)
def test_every_ending_is_its_format_and_the_same_twice(folder: Path, ending: str):
    pytest.importorskip("matplotlib")
    out = folder / f"drawn{ending}"
    drawn = []
    for _ in range(2):
        assert main(["history", str(folder), "--out", str(out)]) == 0
        drawn.append(out.read_bytes())
    assert drawn[0] == drawn[1]
    assert {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}[ending] == drawn[0][: 4 + (ending == ".svg")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h.xyz", "does not end in one of .svg, .pdf, .png"),
        ("h", "does not end in one of .svg, .pdf, .png"),
        ("/proc/h.svg", "cannot be written: "),
        ("a.json/h.svg", "cannot be written: "),
        ("folder.svg", "is a folder: give the name of a file in it"),
        (f"{'h' * 300}.svg", "cannot be written: File name too long"),
    ],
)
def test_where_nothing_can_be_drawn_is_said(name: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    (folder / "folder.svg").mkdir()
    before = sorted(folder.iterdir())
    assert main(["history", str(folder), "--out", str(folder / name)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"history: {folder / name} {said}")
    assert shown.err.count("\n") == 1
    assert not shown.out
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("most", ["0", "-1", "2.5", "all", ""])
def test_a_panel_has_lines(most: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["history", str(folder), "--out", str(folder / "x.svg"), f"--most={most}"])
    assert ended.value.code == 2
    assert f"argument --most: {most!r} is no whole number of at least 1" in capsys.readouterr().err
