# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation: made from results, put between their marks, and the committed ones are up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.figures import ResultError
from benchmarks.paired_accuracy import paired, table

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
        pages.joined([_result(tmp_path / "4.json", "prose", case="decoding")])
    (tmp_path / "5.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ResultError, match="is no result"):
        pages.joined([tmp_path / "5.json"])


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
