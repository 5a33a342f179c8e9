# SPDX-License-Identifier: Apache-2.0
"""The README is run: its Python blocks, its commands, and its table is the committed measurement.

What needs a real checkpoint (`<!-- needs: checkpoint -->`) runs on the bundled model, and the rewritten graphs run
uncompiled, since compiling the same programs once for every block would prove nothing more.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages, paired_accuracy, small_model
from dllm_compile import api, cli
from dllm_compile.models.small import CHECKPOINT

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- needs: checkpoint -->\n)?```(\w*)\n(.*?)```", TEXT, re.DOTALL)
PYTHON = [(bool(needs), code) for needs, language, code in BLOCKS if language == "python"]
COMMANDS = [
    line.partition("#")[0].strip()
    for _, language, code in BLOCKS
    if not language
    for line in code.splitlines()
    if line.startswith(("make", "dllm-compile"))
]

QUESTION = "Max has 324 stamps. Max gets 11 boxes of 84 stamps. How many stamps are left with Max?"

# Lines that fetch a real checkpoint -> the bundled model.
SUBSTITUTES = {
    r"^model = dllm_compile\.load_remote\(.*$": "model = dllm_compile.models.load_small()",
    r"^tokenizer = AutoTokenizer\.from_pretrained\(.*$": "tokenizer = dllm_compile.models.load_small_tokenizer()",
}


pytestmark = pytest.mark.filterwarnings("ignore:programs run uncompiled:RuntimeWarning")


@pytest.fixture(autouse=True)
def aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, without compiling."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "can_compile", lambda device: False)


def test_the_readme_has_what_is_tested():
    assert len(PYTHON) >= 4
    assert sum(needs for needs, _ in PYTHON) == 1
    assert {"make demo", "make test"} <= set(COMMANDS)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_block_runs(number: int):
    needs_checkpoint, code = PYTHON[number]
    if needs_checkpoint:
        for pattern, line in SUBSTITUTES.items():
            code, count = re.subn(pattern, line, code, flags=re.MULTILINE)
            assert count == 1, pattern
    exec(compile(code, f"README block {number}", "exec"), {})


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("dllm-compile")])
def test_command_runs(command: str, capsys: pytest.CaptureFixture[str]):
    words = shlex.split(command)[1:]
    shorter = {"/path/to/LLaDA-8B-Instruct": str(CHECKPOINT), "500": "2", "…": QUESTION}
    assert cli.main([shorter.get(word, word) for word in words]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make")])
def test_make_target_exists(command: str):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def _measured() -> dict[str, Any]:
    newest = max((ROOT / "benchmarks" / "results").glob("h200-*-small-model.json"))
    return json.loads(newest.read_text(encoding="utf-8"))


def test_the_table_is_the_committed_measurement():
    assert pages.filled(TEXT, "small-model", small_model.table(_measured())) == TEXT


def test_the_measurement_covers_what_the_case_measures():
    rows = _measured()["rows"]
    assert [(row["family"], row["name"]) for row in rows] == [
        (family, name) for family in paired_accuracy.FAMILIES for name in small_model.CONFIGS
    ]
    assert {row["problems"] for row in rows} == {500}
    for row in rows:
        assert row["accuracy"] == row["correct"] / row["problems"]
