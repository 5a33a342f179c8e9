# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation: made from results, put between their marks, and the committed ones are up to date."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drawing, pages, plot_frontier, plot_lacache_interval
from benchmarks.__main__ import main
from benchmarks.figures import ResultError
from benchmarks.paired_accuracy import p_value, paired, table

ROOT = pages.ROOT
ENVIRONMENT = {"card": "a card", "torch": "2.13", "commit": "abc"}
ROW = {
    "problems": 10,
    "accuracy": 0.9,
    "difference": -0.1,
    "difference_error": 0.05,
    "p": 1.0,
    "tokens_per_forward": 4.0,
    "row_forwards": 800,
    "answer_tokens": 100,
}


def _result(path: Path, family: str, commit: str = "abc", case: str = "policies") -> Path:
    rows = [{**ROW, "family": family, "group": group, "name": "x"} for group in ("none", "flash")]
    result = {"case": case, "environment": {**ENVIRONMENT, "commit": commit}, "rows": rows}
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def test_parts_of_a_result_become_columns_of_one_table(tmp_path: Path):
    parts = [_result(tmp_path / f"{family}.json", family) for family in ("code", "prose")]
    lines = table(pages.joined(parts)).splitlines()
    assert lines[2].count("solved; difference (p)") == 2
    assert lines[4] == "| none, x | 90.0 %; 4.00; 8 | 90.0 %; 4.00; 8 |"
    assert lines[5].startswith("| flash, x | 90.0 %; -10.0 ± 5.0 (1.00); 4.00; 8 |")


def test_only_the_marked_part_of_a_page_changes():
    text = "before\n<!-- table: policies -->\nold\n<!-- end of table -->\nafter\n"
    assert pages.filled(text, "policies", "new\n") == text.replace("old", "new")
    with pytest.raises(ResultError, match="add them where the table belongs"):
        pages.filled(text, "frontier", "new\n")


def test_what_does_not_belong_together_is_refused(tmp_path: Path):
    one = _result(tmp_path / "1.json", "code")
    with pytest.raises(ResultError, match="differ in commit"):
        pages.joined([one, _result(tmp_path / "2.json", "prose", commit="def")])
    with pytest.raises(ResultError, match="give one case"):
        pages.joined([one, _result(tmp_path / "3.json", "prose", case="frontier")])
    with pytest.raises(ResultError, match="shown on no page"):
        pages.joined([_result(tmp_path / "4.json", "prose", case="startup")])
    (tmp_path / "5.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ResultError, match="is no result"):
        pages.joined([tmp_path / "5.json"])


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page of `policies`, alone in a repository."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / pages.PAGES["policies"].path
    page.parent.mkdir()
    page.write_text(f"<!-- table: policies -->\nold\n{pages.END}\n", encoding="utf-8")
    return page


@pytest.mark.parametrize(
    ("row", "change", "said"),
    [
        (0, {"name": None}, "row 1 of policies has no name"),
        (1, {"group": ["flash"]}, "row 2 of policies has no group"),
        (1, {"family": {}}, "row 2 of policies has no family"),
        (1, {"group": "none"}, "policies has 2 rows of none, x on code: give each part once"),
        (1, {"family": "prose"}, "policies has no row of none, x on prose: measure every setting on every family"),
        (1, {"problems": 20}, "rows of policies were measured on 10 and 20 problems"),
        (1, {"accuracy": None}, "paired_accuracy.table cannot show these rows (TypeError: "),
        (1, {"answer_tokens": 0}, "paired_accuracy.table cannot show these rows (ZeroDivisionError: "),
        (1, {"p": "small"}, "paired_accuracy.table cannot show these rows (TypeError: "),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_rows_that_fill_no_table_are_refused(
    row: int, change: dict[str, Any], said: str, tmp_path: Path, policies: Path, capsys: pytest.CaptureFixture[str]
):
    path = _result(tmp_path / "1.json", "code")
    assert main(["pages", str(path)]) == 0
    before = policies.read_text(encoding="utf-8")
    assert "90.0 %" in before
    result = json.loads(path.read_text(encoding="utf-8"))
    result["rows"][row].update(change)
    path.write_text(json.dumps(result), encoding="utf-8")
    assert main(["pages", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"pages: {said}")
    assert shown.err.count("\n") == 1
    assert policies.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("case", pages.PAGES)
@pytest.mark.parametrize("kept", [(), ("name",), ("group", "name", "precision", "family", "problems")])
def test_every_page_says_that_figures_are_missing(
    case: str, kept: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    row = {name: ROW.get(name, "x") for name in kept}
    content = {"case": case, "environment": ENVIRONMENT, "rows": [row]}
    (tmp_path / "x.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["pages", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert f"measure them with `python -m benchmarks {case}`" in error or "row 1" in error
    assert error.count("\n") == 1


def test_a_file_given_twice_is_said(tmp_path: Path, policies: Path, capsys: pytest.CaptureFixture[str]):
    path = str(_result(tmp_path / "1.json", "code"))
    assert main(["pages", path, path]) == 2
    assert "give each part once" in capsys.readouterr().err


def test_a_page_that_is_not_there_is_said(tmp_path: Path, policies: Path, capsys: pytest.CaptureFixture[str]):
    path = str(_result(tmp_path / "1.json", "code"))
    policies.unlink()
    assert main(["pages", path]) == 2
    assert f"pages: {policies} cannot be read" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_stays_as_it_is(
    tmp_path: Path, policies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = str(_result(tmp_path / "1.json", "code"))
    before = policies.read_text(encoding="utf-8")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert main(["pages", path]) == 2
    assert f"pages: {policies} cannot be written: No space left on device" in capsys.readouterr().err
    assert policies.read_text(encoding="utf-8") == before
    assert list(policies.parent.iterdir()) == [policies]


@pytest.mark.parametrize("page", pages.PAGES.values(), ids=pages.PAGES)
def test_every_page_has_its_marks(page: pages.Page):
    text = (pages.ROOT / page.path).read_text(encoding="utf-8")
    (case,) = (case for case, one in pages.PAGES.items() if one is page)
    assert pages.filled(text, case, "").count(f"<!-- table: {case} -->") == 1


def test_pairs():
    base, other = (True, True, True, False, False), (True, False, False, True, False)
    assert paired(base, other) == {
        "gained": 1,
        "lost": 2,
        "difference": pytest.approx(-0.2),
        "difference_error": pytest.approx(((3 / 5 - 0.04) / 5) ** 0.5),
        "p": 1.0,
    }
    assert paired((True,) * 6, (False,) * 6)["p"] == pytest.approx(2 / 64)


@pytest.mark.parametrize(
    ("p", "shown"),
    [(1.0, "1.00"), (0.047, "0.05"), (0.0051, "0.01"), (0.005, "0.01"), (0.00499, "< 0.005"), (0.0, "< 0.005")],
)
def test_no_p_value_is_shown_as_zero(p: float, shown: str):
    assert p_value(p) == shown


def _results(case: str) -> list[Path]:
    """The committed files that a page's table was made of: those of its card and commit, in the order of names."""
    text = (ROOT / pages.PAGES[case].path).read_text(encoding="utf-8")
    where = re.match(r"(.*), torch .*, commit (\w+);", text.partition(f"<!-- table: {case} -->\n")[2])
    assert where is not None
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        environment = result["environment"]
        if (result["case"], environment["card"], environment["commit"]) == (case, *where.groups()):
            found.append(path)
    return found


@pytest.mark.parametrize("case", ["frontier", "policies", "fp8-accuracy", "lacache-interval", "decoding"])
def test_committed_tables_are_those_of_committed_results(case: str):
    text = (ROOT / pages.PAGES[case].path).read_text(encoding="utf-8")
    table_of = pages._function(pages.PAGES[case].table)
    assert pages.filled(text, case, table_of(pages.joined(_results(case)))) == text


# --- pictures -------------------------------------------------------------------------------------------------------

PICTURES = [case for case, page in pages.PAGES.items() if page.drawing]


def _repository(top: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """A copy of a case's page alone: the words of the command that fills it, and where its picture goes."""
    page = pages.PAGES[case]
    assert page.drawing is not None
    (top / page.path).parent.mkdir()
    shutil.copy(pages.ROOT / page.path, top / page.path)
    monkeypatch.setattr(pages, "ROOT", top)
    return ["pages", *map(str, _results(case))], top / page.drawing


@pytest.mark.parametrize("case", PICTURES)
def test_without_matplotlib_it_is_said_and_nothing_is_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words, picture = _repository(tmp_path, case, monkeypatch)
    page = tmp_path / pages.PAGES[case].path
    page.write_text(f"<!-- table: {case} -->\nold\n{pages.END}\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(words) == 2
    assert capsys.readouterr().err == "pages: drawing needs matplotlib: pip install -e '.[plot]'\n"
    assert "old" in page.read_text(encoding="utf-8")
    assert not picture.exists()


@pytest.mark.parametrize("case", PICTURES)
def test_drawing_twice_gives_the_same_bytes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    words, picture = _repository(tmp_path, case, monkeypatch)
    assert main(words) == 0
    first = picture.read_bytes()
    picture.unlink()
    assert main(words) == 0
    assert picture.read_bytes() == first
    assert b"<dc:date>" not in first


def _figure(case: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is drawn, before it is written."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: figures.append(figure))
    draw = {"frontier": plot_frontier.draw, "lacache-interval": plot_lacache_interval.draw}[case]
    draw(pages.joined(_results(case))["rows"], Path("nowhere.svg"))
    (figure,) = figures
    figure.canvas.draw()
    return figure


def test_ticks_of_a_logarithmic_axis_are_plain_numbers_side_by_side(monkeypatch: pytest.MonkeyPatch):
    axes = [axis for axis in _figure("frontier", monkeypatch).axes if axis.get_xscale() == "log"]
    assert len(axes) == 3
    for axis in axes:
        low, high = axis.get_xlim()
        ticks = [*axis.xaxis.get_major_ticks(), *axis.xaxis.get_minor_ticks()]
        shown = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
        assert len(shown) > 2
        assert all(float(label.get_text()) > 0 for label in shown)  # in full: no power of ten
        boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_the_dashed_line_is_in_the_legend(monkeypatch: pytest.MonkeyPatch):
    (legend,) = [axis.get_legend() for axis in _figure("frontier", monkeypatch).axes if axis.get_legend()]
    assert legend.get_texts()[0].get_text() == "quota, one token a step"


def test_no_marker_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    """Nor hidden in part by the frame: there is room above the highest one."""
    figure = _figure("lacache-interval", monkeypatch)
    for axis in figure.axes:
        for line in (line for line in axis.get_lines() if line.get_marker() == "o"):
            radius = (line.get_markersize() + line.get_markeredgewidth()) / 2 * figure.dpi / 72
            highest = max(y for _, y in axis.transData.transform(line.get_xydata()))
            assert highest + 2 * radius < axis.bbox.y1
