# SPDX-License-Identifier: Apache-2.0
"""Folders that the command line cannot load are refused in one line, with and without the folder's own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dllm_compile import cli
from dllm_compile.models.small import CHECKPOINT
from tests.conftest import tiny_model

pytestmark = pytest.mark.usefixtures("remote_modules")

TRUST = "--trust-remote-code"


def _said(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that `generate` ends with."""
    capsys.readouterr()
    assert cli.main(["generate", "hi", "--model", str(folder), "--device", "cpu", "--no-compile", *words]) == 1
    shown = capsys.readouterr()
    assert not shown.out
    line = shown.err.splitlines()[-1]  # transformers may have warned before
    assert line.startswith("dllm-compile: ")
    assert "Traceback" not in shown.err
    return line


@pytest.mark.parametrize("words", [(), (TRUST,)], ids=["own code", "trusted code"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "config.json is not valid JSON: Expecting value"),
        (b'{"auto_map"', "config.json is not valid JSON: Expecting ':' delimiter"),
        (b"\xff\xfe{}", "config.json is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "config.json is not valid JSON: maximum recursion depth"),
        (b"[]", "config.json holds no object but list"),
        (b"3", "config.json holds no object but int"),
        (b"null", "config.json holds no object but NoneType"),
    ],
    ids=["empty", "cut off", "not UTF-8", "too deep", "list", "number", "null"],
)
def test_a_config_that_is_none_is_said(
    words: tuple[str, ...], content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_bytes(content)
    assert said in _said(tmp_path, capsys, *words)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "names no code of its own"),
        ({"auto_map": "AutoModel"}, "names no code of its own"),
        ({"auto_map": {}}, "names no modelling code"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "ValueError: Unrecognized model"),
        ({"auto_map": {"AutoModel": 3}}, "ValueError: Unrecognized model"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "does not appear to have a file named x.py"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "x"}}, "cannot be loaded with its own code"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "broken.Y"}}, "SyntaxError"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "failing.Y"}}, "RuntimeError: first line"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "failing2.Y"}}, "has no attribute 'Y'"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_code_that_cannot_be_run_is_said(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "broken.py").write_text("def def", encoding="utf-8")
    (tmp_path / "failing.py").write_text("raise RuntimeError('first line\\nsecond line')", encoding="utf-8")
    (tmp_path / "failing2.py").write_text("", encoding="utf-8")
    line = _said(tmp_path, capsys, TRUST)
    assert said in line
    assert str(tmp_path) in line


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "has no tokenizer.json"), (b"{}", "cannot be loaded"), (b"\xff", "cannot be loaded")],
    ids=["missing", "no tokenizer", "not UTF-8"],
)
def test_a_tokenizer_that_is_none_is_said(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tiny_model().save_pretrained(tmp_path)
    if content is not None:
        shutil.copy(CHECKPOINT / "tokenizer_config.json", tmp_path)
        (tmp_path / "tokenizer.json").write_bytes(content)
    line = _said(tmp_path, capsys)
    assert said in line
    assert "copy the checkpoint's tokenizer files there" in line
