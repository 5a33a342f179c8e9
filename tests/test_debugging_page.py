# SPDX-License-Identifier: Apache-2.0
"""`docs/debugging.md`: every switch of its table can be written as it stands there, and takes its layer away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig, _compat
from dllm_compile.errors import ConfigError, PassError
from dllm_compile.passes import OPTIONAL
from dllm_compile.runtime.stages import run_compiled
from tests.conftest import tiny_model
from tests.passes.fp8_pieces import wide_model
from tests.passes.pieces import Mini
from tests.real import model_logits, prompts_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "debugging.md"
SHORT = DecodingConfig(max_new_tokens=8, block_length=4, threshold=0.2)
PROMPTS = prompts_of(4, 7, seed=3)


def table() -> dict[str, str]:
    """Layer and switch of each row under "Take a layer away by hand"."""
    text = PAGE.read_text(encoding="utf-8").partition("## Take a layer away by hand")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:3] for line in text.splitlines() if line.startswith("| ")]
    return {layer.strip(): switch.strip() for layer, switch in rows[1:]}


ROWS = table()


def calls(text: str) -> list[object]:
    """The configurations that a cell spells out, made."""
    spelled = re.findall(r"`((?:CompileConfig|DecodingConfig)\([^`]*\))`", text)
    return [eval(one, {"CompileConfig": CompileConfig, "DecodingConfig": DecodingConfig}) for one in spelled]


def optimized(**options) -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(tiny_model(n_layers=3), **{"compile": False, **options})


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    return optimized()


def passes(fast: dllm_compile.OptimizedModel) -> set[str]:
    report = fast.report()
    return {one.name for results in (report.passes, *(p.passes for p in report.programs)) for one in results}


# --- a row each -----------------------------------------------------------------------------------------------------


def one_pass(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    assert set(re.findall(r"`([a-z_]+)`", switch.partition("OPTIONAL")[2])) == set(OPTIONAL)
    assert calls(switch)[0].disable == ("pack_qkv",)
    pytest.importorskip("torchao")
    without = dllm_compile.optimize(wide_model(), compile=False, precision="fp8", disable=OPTIONAL)
    without.generate(PROMPTS, SHORT)
    assert not set(OPTIONAL) & passes(without)
    whole = dllm_compile.optimize(wide_model(), compile=False, precision="fp8")
    whole.generate(PROMPTS, SHORT)
    assert set(OPTIONAL) - {"inline_references"} <= passes(whole), (
        "each of them ran, so that leaving it out is something"
    )


def refused_region(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    assert calls(switch)[0].strict is False
    with pytest.raises(PassError):
        dllm_compile.optimize(Mini(ffn_kind="chunked"), compile=False)
    report = dllm_compile.optimize(Mini(ffn_kind="chunked"), calls(switch)[0], compile=False).report()
    assert any(result.refusals for result in report.passes)
    assert "left as it was" in str(report)


def fp8(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    pytest.importorskip("torchao")
    quantized = dllm_compile.optimize(wide_model(), compile=False, precision="fp8")
    assert quantized.report().fp8 is not None
    assert dllm_compile.optimize(wide_model(), calls(switch)[0], compile=False).report().fp8 is None
    assert "`fp8_skip_layers`" in switch
    assert "`fp8_granularity`" in switch
    other = {"fp8_skip_layers": (0, 1), "fp8_granularity": "row"}
    found = dllm_compile.optimize(wide_model(), compile=False, precision="fp8", **other).report().fp8
    assert (found.skipped, found.granularity) == ((0, 1), "row")


def caches(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    """None: no cached program is made. Kept but harmless: the tokens of the uncached loop."""
    fresh = optimized()
    fresh.generate(PROMPTS, calls(switch)[0].replace(max_new_tokens=8, block_length=4))
    assert {program.name for program in fresh.programs.built} == {"step"}
    plain = fast.generate(PROMPTS, SHORT).sequences
    harmless = {
        "refresh_interval=1": ["prefix", "dual", "vicinity"],
        "cache_steps=1": ["dkv"],
        'lacache_layers="first"': ["lacache"],
    }
    for option, names in harmless.items():
        assert f"`{option}`" in switch
        for name in names:
            options = {"cache": name, **eval(f"dict({option})")}
            assert torch.equal(fast.generate(PROMPTS, SHORT, **options).sequences, plain), options
    assert "`track=-1`" in switch
    window = SHORT.replace(cache="flash", window_length=4, lookahead=0)
    every, few = (fast.generate(PROMPTS, window, track=track) for track in (-1, 0))
    length = sum(len(prompt) + 8 for prompt in PROMPTS)
    assert every.stats.row_forwards >= length * (every.stats.forwards - 2)
    assert few.stats.row_forwards < every.stats.row_forwards


def dropped_masks(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    """One token a step: all rows in each, and two masks of each sample fewer while the first block is decoded."""
    config = SHORT.replace(threshold=None, eos="none")
    whole = fast.generate(PROMPTS, config, suffix=calls(switch)[0].suffix)
    window, dropping = (fast.generate(PROMPTS, config, suffix=name, suffix_window=2) for name in ("window", "dpad"))
    assert torch.equal(whole.sequences, fast.generate(PROMPTS, config).sequences)
    assert whole.stats.row_forwards == (4 + 8 + 7 + 8) * 8
    assert window.stats.row_forwards == whole.stats.row_forwards - 2 * 2 * 4
    assert dropping.stats.row_forwards <= window.stats.row_forwards


def verify_pass(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    for commit, expected in ((calls(switch)[0].commit, False), ("flash_verify", True)):
        fresh = optimized()
        fresh.generate(PROMPTS, max_new_tokens=8, cache="flash", commit=commit)
        assert any(program.name == "verify_step" for program in fresh.programs.built) == expected


def commit_rule(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    assert set(re.findall(r"`(\w+)`", switch)) == {"threshold", "factor", "frechet_margin"}
    plain = fast.generate(PROMPTS, SHORT.replace(threshold=None, eos="none"))
    assert plain.stats.forwards_per_row == (8, 8)
    for options, rule in (({"threshold": 0.1}, "threshold"), ({"threshold": None, "factor": 5.0}, "factor")):
        config = SHORT.replace(eos="none", **options)
        assert config.rule == rule
        assert fast.generate(PROMPTS, config).stats.forwards < 8
    assert SHORT.replace(threshold=None, frechet_margin=0.2).rule == "frechet"
    assert SHORT.replace(threshold=None).rule == "quota"


def slots_and_batch(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    assert "`slots`" in switch
    together = fast.generate(prompts_of(4, 7, 2, seed=3), SHORT, slots=2)
    assert DecodingConfig().slots is None
    for i, prompt in enumerate(prompts_of(4, 7, 2, seed=3)):
        alone = fast.generate([prompt], SHORT)
        assert torch.equal(alone.sequences[0], together.sequences[i, 7 - len(prompt) :])


def torch_compile(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    assert calls(switch)[0].compile is False
    fast.generate(PROMPTS, SHORT)
    assert not any(program.compiled for program in fast.programs.built)


def bookkeeping(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    (off,) = calls(switch)
    assert off == CompileConfig(fuse_bookkeeping=False)
    assert optimized(fuse_bookkeeping=off.fuse_bookkeeping)._sessions is None
    assert optimized()._sessions is None, "on a CPU the default is off"
    if _compat.can_compile(torch.device("cpu")):  # nothing is compiled before it is needed
        assert optimized(compile=True, fuse_bookkeeping=True)._sessions.run is run_compiled


def cuda_graphs(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    """What they do without a card; `runtime/test_captured.py` plays `new_shapes`, `gpu/test_sessions.py` has graphs."""
    assert '`new_shapes="eager"`' in switch
    assert CompileConfig(new_shapes="eager").new_shapes == "eager"
    assert optimized(cuda_graphs=calls(switch)[0].cuda_graphs)._sessions is None
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA"):
            optimized(cuda_graphs=True)


def triton_kernels(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    variable, value = re.search(r"`(\w+)=(\w+)`", switch).groups()
    assert variable == _compat.TRITON_VARIABLE
    code = "from dllm_compile import _compat; _compat.is_triton_installed = lambda: True; print(_compat.has_triton())"
    for set_to, expected in ((value, "False"), ("1", "True")):
        environment = {**os.environ, variable: set_to}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        assert done.stdout.strip() == expected


def everything(switch: str, fast: dllm_compile.OptimizedModel) -> None:
    model = tiny_model()
    own = dllm_compile.optimize(model, compile=False)
    ids = torch.arange(9)[None]
    assert own.model is model
    with torch.no_grad():
        assert torch.equal(own.model(ids).logits, model_logits(tiny_model(), ids))


CHECKS: dict[str, Callable[[str, dllm_compile.OptimizedModel], None]] = {
    "one packing or fusing pass": one_pass,
    "a region that is refused": refused_region,
    "FP8": fp8,
    "caches": caches,
    "dropped masks": dropped_masks,
    "verify pass": verify_pass,
    "commit rule": commit_rule,
    "slots and batch": slots_and_batch,
    "torch.compile": torch_compile,
    "compiled bookkeeping": bookkeeping,
    "CUDA graphs": cuda_graphs,
    "Triton kernels of this package": triton_kernels,
    "everything": everything,
}


def test_every_row_has_a_check():
    assert list(ROWS) == list(CHECKS)


LONG = ("one packing or fusing pass", "FP8")


@pytest.mark.parametrize(
    "layer", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CHECKS]
)
def test_a_switch_takes_its_layer_away(layer, fast):
    CHECKS[layer](ROWS[layer], fast)


def test_every_field_that_adds_a_layer_is_on_the_page():
    """A new option of compiling must be placed on the page, or named here as one that adds nothing."""
    text = PAGE.read_text(encoding="utf-8")
    no_layer = {"fp8_linears"}
    for name in CompileConfig.__dataclass_fields__:
        assert name in text or name in no_layer, name


def test_the_page_names_real_things():
    """Files, attributes and arguments in what it shows."""
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"`dllm_compile\.([\w.]+)`", text):
        value = dllm_compile
        for part in name.split("."):
            value = getattr(value, part)
    for path in re.findall(r"`(dllm_compile/[\w/]+\.py)`", text):
        assert (PAGE.parents[1] / path).is_file()
