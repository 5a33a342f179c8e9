# SPDX-License-Identifier: Apache-2.0
"""`dllm-compile bench`: the plain loop is the definition, rates are their definitions, the floor is what is moved."""

from __future__ import annotations

import datetime as dt
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig, OptimizedModel, cli
from dllm_compile.bench import Bench, bench, environment
from dllm_compile.bench.floor import call_work, floor_seconds
from dllm_compile.bench.plain import decode_plainly, plain_config
from dllm_compile.bench.prompts import held_out_prompts, made_prompts
from dllm_compile.bench.run import OURS
from dllm_compile.cards import Card
from dllm_compile.errors import ConfigError
from dllm_compile.models.small import CHECKPOINT
from tests.conftest import tiny_model
from tests.real import RULES, plain, prompts_of

SHORT = DecodingConfig(max_new_tokens=10, block_length=4)
UNCOMPILED = CompileConfig(compile=False)


@pytest.fixture(scope="module")
def fast() -> OptimizedModel:
    return dllm_compile.optimize(tiny_model(seed=3), UNCOMPILED)


def looped(fast: OptimizedModel, prompts: list[torch.Tensor], config: DecodingConfig) -> Any:
    model = fast.model
    given = [prompt.tolist() for prompt in prompts]
    return decode_plainly(lambda ids: model(ids).logits, given, config, fast.facts, torch.device("cpu"))


# --- the plain loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", ["block", "first", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_the_plain_loop_is_the_definition(fast: OptimizedModel, rule: str, eos: str):
    """Tokens, forwards and decoded positions; a stop id that occurs, prompts of different lengths."""
    prompts = prompts_of(5, 2, 5, seed=4)
    first = plain(fast, prompts, SHORT.replace(eos="none"))[0].canvas
    config = SHORT.replace(eos=eos, eos_token_id=first[6], **RULES[rule])  # a token of the first block
    output, expected = looped(fast, prompts, config), plain(fast, prompts, config)
    rows = [row[5 - len(p) :].tolist() for row, p in zip(output.sequences, prompts, strict=True)]
    assert rows == [one.canvas for one in expected]
    assert output.stats.canvas_tokens == sum(one.decoded for one in expected)
    ours = fast.generate(prompts, config)
    assert [answer.tolist() for answer in output.answers] == [answer.tolist() for answer in ours.answers]
    assert output.stats.canvas_tokens == ours.stats.canvas_tokens
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)


def test_a_batch_counts_what_it_computes(fast: OptimizedModel):
    """Two lengths: 10 forwards of two rows of 15 tokens, and 10 of one of 12."""
    output = looped(fast, prompts_of(5, 2, 5), SHORT.replace(eos="none"))
    assert output.stats.forwards == 20
    assert output.stats.row_forwards == 10 * 2 * 15 + 10 * 12
    assert output.stats.canvas_tokens == 30
    assert output.stats.forwards_per_row == (10, 10, 10)


def test_with_a_sliding_window_the_candidates_are_the_leftmost_masks(fast: OptimizedModel):
    """Flash-Cache that computes every row (negative `track`) is the same algorithm without staleness."""
    prompts = prompts_of(6, 6, seed=1)
    config = DecodingConfig(max_new_tokens=12, cache="flash", window_length=3, lookahead=2, track=-1, threshold=0.4)
    config = config.replace(eos="none")
    output, expected = looped(fast, prompts, config), fast.generate(prompts, config)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.forwards_per_row == expected.stats.forwards_per_row


@pytest.mark.parametrize(
    "options", [{"temperature": 0.5}, {"cfg_scale": 1.0}, {"infill": True}, {"remasking": "random"}]
)
def test_what_the_plain_loop_lacks_is_refused(options: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        plain_config(SHORT.replace(**options))


def test_a_verify_pass_becomes_its_threshold():
    config = DecodingConfig(cache="flash", commit="flash_verify", threshold=0.7, gamma=0.9, verify_candidates=3)
    assert plain_config(config).rule == "threshold"
    assert plain_config(config).threshold == 0.7


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(fast: OptimizedModel) -> Bench:
    prompts = [prompt.tolist() for prompt in prompts_of(5, 5)]
    return bench(fast, prompts, SHORT.replace(threshold=0.1, eos="none"), rounds=3)


def test_rates_are_their_definitions(found: Bench):
    assert [one.name for one in found.contenders] == [OURS, "plain loop, one token a step", "plain loop, same rule"]
    for one in found.contenders:
        stats, figures = one.stats, one.figures()
        assert stats.seconds == sorted(one.seconds)[1]
        assert figures["answer_tokens_per_second"] == pytest.approx(stats.answer_tokens / stats.seconds)
        assert figures["answer_tokens_per_second_per_row"] == pytest.approx(stats.answer_tokens / stats.seconds / 2)
        assert figures["canvas_tokens_per_second"] == pytest.approx(20 / stats.seconds)
        assert figures["canvas_tokens_per_second_per_row"] == pytest.approx(10 / stats.seconds)
        assert figures["canvas_tokens_per_forward"] == pytest.approx(20 / sum(stats.forwards_per_row))
        assert figures["ms_per_forward"] == pytest.approx(1e3 * stats.seconds / stats.forwards)
        assert one.peak_bytes is None
    ours, one_a_step, same = (one.stats for one in found.contenders)
    assert one_a_step.forwards == 10
    assert ours.answer_tokens_per_row == same.answer_tokens_per_row
    assert ours.forwards_per_row == same.forwards_per_row
    assert ours.forwards < 10


def test_ratios_are_medians_over_rounds(found: Bench):
    ours = found.contenders[0]
    for one in found.contenders[1:]:
        rounds = sorted(a / b for a, b in zip(one.seconds, ours.seconds, strict=True))
        assert found.ratios[one.name]["call"] == pytest.approx(rounds[1])
        share = one.stats.forwards / ours.stats.forwards
        assert found.ratios[one.name]["forward"] == pytest.approx(rounds[1] / share)


def test_json_and_text_hold_the_figures(found: Bench):
    data = json.loads(json.dumps(found.to_dict()))
    ours = data["contenders"][0]
    assert ours["figures"]["ms_per_forward"] == pytest.approx(found.contenders[0].stats.ms_per_forward)
    assert data["prompt_lengths"] == [5, 5]
    text = str(found)
    assert f"{OURS} against plain loop, same rule: {found.ratios['plain loop, same rule']['call']:.2f} times" in text
    assert "no floor" in text
    assert "torch.compile alone was not measured" in text


@pytest.mark.slow
@pytest.mark.skipif(not dllm_compile._compat.has_cxx_compiler(), reason="needs a C++ compiler")
def test_torch_compile_alone():
    prompts = [prompt.tolist() for prompt in prompts_of(4)]
    config = DecodingConfig(max_new_tokens=2, block_length=2, eos="none")
    fast = dllm_compile.optimize(tiny_model(n_layers=1), compile=True)
    found = bench(fast, prompts, config, rounds=1)
    compiled = found.contenders[-1]
    assert compiled.name == "plain loop, same rule, torch.compile"
    assert compiled.stats.answer_tokens == found.contenders[0].stats.answer_tokens
    assert compiled.first_seconds > compiled.stats.seconds


# --- where it was measured ------------------------------------------------------------------------------------------

# What every committed result of `python -m benchmarks` says of itself.
FACTS = {"card", "date", "cuda", "torch", "triton", "transformers", "python", "dllm_compile", "commit"}


def test_a_measurement_says_where_and_with_what(found: Bench):
    facts = found.environment
    assert facts.keys() >= FACTS
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    age = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(facts["date"])
    assert dt.timedelta(0) <= age < dt.timedelta(hours=1)
    assert facts["card"] == f"{environment.processor()}, {torch.get_num_threads()} threads"
    assert f"on {facts['card']}, torch" in str(found)


def test_committed_results_hold_the_same_facts():
    results = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*2026-11-30*.json"))
    assert results
    for path in results:
        facts = json.loads(path.read_text(encoding="utf-8"))["environment"].keys()
        assert facts <= FACTS, path


def test_a_processor_has_its_name_or_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(environment, "_CPUINFO", file)
    assert environment.processor() == (platform.processor() or platform.machine())
    file.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")  # as on ARM
    assert environment.processor() == (platform.processor() or platform.machine())
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: Some CPU @ 2 GHz\n")
    assert environment.processor() == "Some CPU @ 2 GHz"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_the_packages_own(tmp_path: Path):
    """Not that of a repository in which an installed package happens to lie."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert environment.checkout_commit(tmp_path / "nowhere") is None
    git("init", "-q")
    (tmp_path / "other").touch()
    git("add", "other")
    git("commit", "-q", "-m", "other")
    assert environment.checkout_commit(package) is None
    git("add", "package")
    git("commit", "-q", "-m", "package")
    assert environment.checkout_commit(package) == git("rev-parse", "--short", "HEAD")


# --- the floor ------------------------------------------------------------------------------------------------------


def test_the_floor_counts_every_forward(fast: OptimizedModel):
    """Products and attention of an uncached step of the tiny model, by hand."""
    prompts = [prompt.tolist() for prompt in prompts_of(5, 2)]
    work = call_work(fast, prompts, SHORT.replace(eos="none"))
    assert work is not None
    assert len(work) == 10
    c = fast.model.config
    rows, wanted, head_dim = 15 + 12, 2 * 4, c.d_model // c.n_heads  # two blocks of four, the last of them padded
    qkv = c.d_model * (c.n_heads + 2 * c.n_kv_heads) * head_dim
    behind = c.d_model**2 + 3 * c.d_model * c.mlp_hidden_size
    # Behind the attention of the last layer: the wanted rows.
    products = 2 * (rows * qkv * c.n_layers + (rows * (c.n_layers - 1) + wanted) * behind)
    scores = 4 * (15**2 + 12**2) * c.d_model * c.n_layers
    head = 2 * wanted * c.d_model * c.vocab_size
    assert {one.flops for one in work} == {products + scores + head}
    assert {one.fp8_flops for one in work} == {0}


def test_the_floor_is_the_slower_of_moving_and_computing(fast: OptimizedModel):
    work = call_work(fast, [[5, 6, 7]], SHORT.replace(cache="dual", eos="none"))
    assert work is not None
    moving, computing = Card("moves", 1e3, 1e30, None), Card("computes", 1e30, 1e3, None)
    assert floor_seconds(work, moving) == pytest.approx(sum(one.bytes for one in work) / 1e3)
    assert floor_seconds(work, computing) == pytest.approx(sum(one.flops for one in work) / 1e3)
    both = floor_seconds(work, Card("both", 1e3, 1e3, None))
    assert both == pytest.approx(sum(max(one.bytes, one.flops) for one in work) / 1e3)
    # Steps over a cache move less than those that begin a block.
    assert min(one.bytes for one in work) < max(one.bytes for one in work)


# --- prompts and the command ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    from dllm_compile import _checkpoints

    return _checkpoints.load(device="cpu")


def test_prompts_have_the_wanted_lengths_and_differ(checkpoint: Any):
    for length in (1, 40, 300):
        prompts = made_prompts(checkpoint, length, 3)
        assert [len(prompt) for prompt in prompts] == [length] * 3
        assert checkpoint.model.config.mask_token_id not in prompts[0]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    problems = held_out_prompts(checkpoint, 4)
    assert len({len(prompt) for prompt in problems}) == 1
    assert len({tuple(prompt) for prompt in problems}) == 4
    with pytest.raises(ConfigError, match="--prompt-lengths"):
        held_out_prompts(checkpoint, 500)


BENCH = ["bench", "--no-compile", "--device", "cpu", "--rounds", "1", "--max-new-tokens", "8", "--block-length", "8"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]):
    assert cli.main([*BENCH, "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "answer tok/s" in shown
    assert "times as fast a call" in shown
    assert "plain loop, same rule" in shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> str:
    """A user's checkpoint: a tiny random model with the bundled tokenizer's files."""
    place = tmp_path_factory.mktemp("checkpoint") / "model"
    ids = {"mask_token_id": small_tokenizer.mask_token_id, "eos_token_id": small_tokenizer.eos_token_id}
    tiny_model(vocab_size=len(small_tokenizer), pad_token_id=ids["eos_token_id"], **ids).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, place / name)
    return str(place)


def test_the_command_prints_json_for_each_length(folder: str, capsys: pytest.CaptureFixture[str]):
    words = [*BENCH, "--model", folder]
    assert cli.main([*words, "--prompt-lengths", "3", "9", "--batch", "2", "--no-baselines", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["prompt_lengths"] for one in found] == [[3, 3], [9, 9]]
    assert [len(one["contenders"]) for one in found] == [1, 1]
    assert "made up" in found[0]["notes"][0]


def test_the_command_takes_a_file_of_prompts(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "prompts.txt"
    file.write_text("Tom has 3 pens.\n\nAna has 12 eggs and buys 5 more.\n")
    assert cli.main([*BENCH, "--model", folder, "--prompts", str(file), "--json", "--steps", "2"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["batch"] == 2
    assert any("no padding" in note for note in found["notes"])
    for words, said in (
        (["--prompts", str(tmp_path / "no.txt")], "cannot be read"),
        (["--prompts", str(file), "--batch", "3"], "fewer than --batch 3"),
        (["--prompts", str(file), "--prompt-lengths", "4"], "give one of them"),
        (["--temperature", "0.5"], "temperature"),
        (["--prompt-lengths", "4", "--rounds", "0"], "rounds"),
    ):
        assert cli.main([*BENCH, "--model", folder, *words]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Zoë has 3 pens.".encode("latin-1"), "is not UTF-8 (byte 0xeb at 2)"),
        ("Tom has 3 pens.".encode("utf-16"), "is not UTF-8 (byte 0xff at 0)"),
        (b"\n \n", "holds 0 prompts"),
    ],
    ids=["latin-1", "utf-16", "empty"],
)
def test_a_file_that_holds_no_prompts_is_one_line(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert cli.main([*BENCH, "--prompts", str(file)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"dllm-compile: --prompts {file} {said}")
    assert shown.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_a_card_has_a_peak_and_perhaps_a_floor():
    model = tiny_model(n_layers=2, dtype=torch.bfloat16).cuda()
    prompts = [prompt.tolist() for prompt in prompts_of(20, 20)]
    found = bench(dllm_compile.optimize(model), prompts, SHORT.replace(cache="dual", eos="none"), rounds=2)
    weights = sum(p.nbytes for p in model.parameters())
    assert all(one.peak_bytes is not None and one.peak_bytes >= weights for one in found.contenders)
    assert len(found.contenders) == 3
    if found.floor_share is not None:
        assert 0 < found.floor_share < 1
