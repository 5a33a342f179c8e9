# SPDX-License-Identifier: Apache-2.0
"""The picture of one block: three drawings in one file, and the one in the README is what is drawn today."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.__main__ import main

SHOWN = Path(__file__).resolve().parents[2] / "docs" / "block.svg"


def captions(path: Path) -> list[str]:
    picture = ET.fromstring(path.read_text(encoding="utf-8"))
    return [one.text for one in picture if one.tag.endswith("text")]


def test_the_picture_is_drawn_and_shows_what_there_is(tmp_path):
    path = tmp_path / "new" / "block.svg"
    assert main(["block-picture", "--out", str(path)]) == 0
    found, shown = captions(path), captions(SHOWN)
    names = [caption.partition(":")[0] for caption in found]
    assert names == ["captured", "rewritten", "in a step of Flash-Cache"]
    first, second, third = (int(re.search(r"(\d+) calls", caption)[1]) for caption in found)
    assert first > 3 * second > 3 * third
    assert found[1:] == shown[1:]  # how many calls are captured is torch's affair
    pictures = [one for one in ET.fromstring(path.read_text(encoding="utf-8")) if one.tag.endswith("svg")]
    boxes = [len(re.findall("<rect", ET.tostring(one, encoding="unicode").replace("ns0:", ""))) for one in pictures]
    assert all(count >= calls for count, calls in zip(boxes, (first, second, third), strict=True))
