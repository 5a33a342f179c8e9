# SPDX-License-Identifier: Apache-2.0
"""The command line: its options follow the configuration, its output follows the library, its errors are one line."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import dllm_compile
from dllm_compile import DecodingConfig, cli
from dllm_compile._decoding_options import add_decoding_options, decoding_config
from dllm_compile.errors import ConfigError
from dllm_compile.evaluate import FAMILIES
from dllm_compile.models.small import CHECKPOINT
from dllm_compile.presets import PRESETS
from tests.conftest import tiny_model

FIELDS = [field.name for field in dataclasses.fields(DecodingConfig)]


def parse(*words: str) -> DecodingConfig:
    parser = argparse.ArgumentParser()
    add_decoding_options(parser)
    return decoding_config(parser.parse_args(words))


def test_no_option_is_the_default_configuration():
    assert parse() == DecodingConfig()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_an_option_with_its_help(name: str):
    parser = argparse.ArgumentParser()
    add_decoding_options(parser)
    (action,) = (action for action in parser._actions if action.dest == name)
    assert f"--{name.replace('_', '-')}" in action.option_strings
    assert len(str(action.help)) > 10
    parser.format_help()  # a stray % in a help text would raise


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--threshold", "0.9"], {"threshold": 0.9}),
        (["--max-new-tokens", "64", "--block-length", "16", "--steps", "32"], None),
        (["--factor", "1.5", "--last-rank", "released"], {"factor": 1.5, "last_rank": "released"}),
        (["--eos-token-id", "3"], {"eos_token_id": (3,)}),
        (["--eos-token-id", "3", "4"], {"eos_token_id": (3, 4)}),
        (["--cache", "lacache", "--lacache-layers", "wide"], {"cache": "lacache", "lacache_layers": "wide"}),
        (["--cache", "lacache", "--lacache-layers", "0", "3"], {"cache": "lacache", "lacache_layers": (0, 3)}),
        (["--infill", "--no-logits-eos-inf"], {"infill": True, "logits_eos_inf": False}),
        (["--temperature", "0.5", "--seed", "7", "--remasking", "random"], None),
    ],
)
def test_options_reach_the_fields(words: list[str], fields: dict[str, Any] | None):
    expected = fields or {
        name.removeprefix("--").replace("-", "_"): value if not value.replace(".", "").isdigit() else json.loads(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert parse(*words) == DecodingConfig(**expected)


def test_a_preset_and_what_stands_beside_it():
    assert parse("--preset", "flash/mbpp") == PRESETS["flash/mbpp"]
    changed = parse("--preset", "flash/mbpp", "--max-new-tokens", "64", "--track", "32", "--threshold", "0.8")
    assert changed == PRESETS["flash/mbpp"].replace(max_new_tokens=64, track=32, threshold=0.8)


def test_an_unknown_preset_is_answered_with_the_names(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", "x", "--preset", "flash/gsm"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "--preset: invalid choice: 'flash/gsm'" in error
    assert all(name in error for name in PRESETS)


def test_what_contradicts_a_preset_is_said_with_what_it_sets():
    with pytest.raises(ConfigError, match=r"\(--preset flash/gsm8k sets .*threshold=0\.9.*\)"):
        parse("--preset", "flash/gsm8k", "--factor", "1")


@pytest.mark.parametrize("command", ["generate", "eval", "bench"])
def test_presets_are_in_the_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = "".join(capsys.readouterr().out.split())  # names are broken at their hyphens
    assert ",".join(PRESETS) in shown


def test_families_are_in_the_help(capsys: pytest.CaptureFixture[str]):
    from dllm_compile.models.small.families import MAKERS

    assert tuple(MAKERS) == FAMILIES
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    assert f"{{{','.join(MAKERS)}}}" in capsys.readouterr().out


def test_contradiction_is_one_line_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]):
    status = cli.main(["generate", "x", "--model", "/nowhere", "--threshold", "0.9", "--factor", "1"])
    error = capsys.readouterr().err
    assert status == 1
    assert error.startswith("dllm-compile: ")
    assert "threshold" in error
    assert "factor" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--device", "foo"], "device 'foo' cannot be used"),
        (["report", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["demo", "--device", "foo"], "device 'foo' cannot be used"),
        (["demo", "--problems", "0"], "problems must be an integer of at least 1, not 0"),
        (["demo", "--threshold", "nan"], "threshold must be a finite number"),
        (["generate", "x", "--cache", "lacache", "--lacache-layers", "wide", "3"], "lacache_layers must be"),
        (["generate", "x", "--temperature", "inf"], "temperature must be a finite number"),
        (["report", "--dump", __file__], "--dump needs a folder"),
        (["report", "--dump", f"{__file__}/graphs"], "--dump needs a folder"),
        (["report", "--html", __file__], "--html needs a folder"),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    """Said before a model is loaded."""
    assert cli.main(words) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("dllm-compile: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_missing_folder_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["report", "--model", str(tmp_path / "none")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_trusting_code_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    assert cli.main(["report", "--model", str(checkpoint), "--trust-remote-code"]) == 1
    assert "--trust-remote-code" in capsys.readouterr().err


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]):
    for words in ([], ["generate"], ["generate", "x", "--commit", "best"], ["unknown"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.split() == ["dllm-compile", dllm_compile.__version__]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A user's folder: a tiny random model with the bundled tokenizer's files."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    ids = {"mask_token_id": small_tokenizer.mask_token_id, "eos_token_id": small_tokenizer.eos_token_id}
    tiny_model(vocab_size=len(small_tokenizer), pad_token_id=ids["eos_token_id"], **ids).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder / name)
    return folder


SHORT = ["--no-compile", "--device", "cpu", "--max-new-tokens", "8", "--block-length", "4"]


def test_generate_prints_what_the_library_gives(
    small_fast: Any, small_tokenizer: Any, capsys: pytest.CaptureFixture[str]
):
    prompt = "Tom has 3 pens and buys 4 more."
    assert cli.main(["generate", prompt, "--no-chat", "--threshold", "0.7", *SHORT]) == 0
    ids = small_tokenizer(prompt)["input_ids"]
    out = small_fast.generate([ids], DecodingConfig(max_new_tokens=8, block_length=4, threshold=0.7))
    text = small_tokenizer.decode(out.answers[0], skip_special_tokens=True)
    assert capsys.readouterr().out == text + "\n"


def test_generate_reads_stdin_and_several_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Ann has 2 apples."))
    words = ["generate", "-", "Tom has 3 pens and buys 4 more.", "--model", str(checkpoint), "--stats", *SHORT]
    assert cli.main(words) == 0
    together = capsys.readouterr()
    assert "batch 2" in together.err
    alone = ""
    for prompt in ("Ann has 2 apples.", "Tom has 3 pens and buys 4 more."):
        assert cli.main(["generate", prompt, "--model", str(checkpoint), *SHORT]) == 0
        alone += capsys.readouterr().out
    assert together.out == alone


CODE_PROMPT = (
    "Write a Python function process(nums) that returns the sum of the numbers above 15 plus 10 in the list nums."
)


def test_stream_into_a_pipe_gives_the_answer_as_it_is(capsys: pytest.CaptureFixture[str]):
    """An answer of several lines: they stay lines."""
    words = ["generate", CODE_PROMPT, "--no-chat", "--threshold", "0.9", *SHORT[:3]]
    assert cli.main(words) == 0
    plain = capsys.readouterr().out
    assert plain.count("\n") > 1
    assert cli.main([*words, "--stream"]) == 0
    assert capsys.readouterr().out == plain


def test_stream_into_a_terminal_draws(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path
):
    """Masks are seen, and what stands there at the end is the answer."""
    words = ["generate", "Tom has 3 pens and buys 4 more.", "--model", str(checkpoint), *SHORT]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main([*words, "--stream"]) == 0
    assert "░" in capsys.readouterr().out


def test_stream_takes_one_prompt(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["generate", "a", "b", "--stream", "--model", "/nowhere"]) == 1
    assert "--stream shows one prompt, not 2" in capsys.readouterr().err


def test_report_and_dump(capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path):
    words = ["report", "--model", str(checkpoint), "--no-compile", "--device", "cpu"]
    assert cli.main([*words, "--dump", str(tmp_path / "graphs")]) == 0
    assert "normalize_attention" in capsys.readouterr().out
    assert len(list((tmp_path / "graphs").iterdir())) > 2


def test_report_as_a_page_and_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path):
    words = ["report", "--model", str(checkpoint), "--no-compile", "--device", "cpu", "--json"]
    assert cli.main([*words, "--html", str(tmp_path), "--caches", "none", "flash"]) == 0
    shown = capsys.readouterr()
    names = [program["name"] for program in json.loads(shown.out)["programs"]]
    assert names == ["step", "cached_step_scored_0-1"]
    assert f"open {tmp_path / 'index.html'}" in shown.err
    assert "cached_step_scored_0-1" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "program_step.py").is_file()


def test_eval_prints_figures(capsys: pytest.CaptureFixture[str]):
    words = ["eval", "-n", "2", "--batch-size", "2", "--threshold", "0.5", "--no-compile", "--device", "cpu", "--json"]
    assert cli.main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["problems"] == 2
    assert 0 <= figures["accuracy"] <= 1
    assert figures["tokens_per_forward"] >= 1
    assert figures["row_forwards"] > figures["batch_forwards"] * figures["batch_size"]
