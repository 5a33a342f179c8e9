# SPDX-License-Identifier: Apache-2.0
"""What `optimize` says: the report, switches for bisecting, and missing compilers said aloud."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys

import pytest
import torch

import dllm_compile
from dllm_compile import _compat, api, cards
from dllm_compile.errors import ConfigError
from dllm_compile.inspection import launches, work
from dllm_compile.passes import FUSE, NORMALIZE
from tests.conftest import tiny_model
from tests.passes.pieces import Mini
from tests.real import assert_plain, model_logits, prompts_of

SHORT = dllm_compile.DecodingConfig(max_new_tokens=6, block_length=3)


@pytest.fixture(scope="module")
def fast():
    fast = dllm_compile.optimize(tiny_model(), compile=False)
    fast.generate(prompts_of(4, 2), SHORT)
    return fast


def test_facts(fast):
    report = fast.report()
    assert (report.model, report.layers) == ("LLaDAForMaskedDiffusion", 2)
    assert (report.dtype, report.device) == ("float32", "cpu")
    assert report.logits_error <= 1e-5
    assert report.capture_seconds > 0
    found = {result.name: (result.matches, result.required, result.error) for result in report.passes}
    assert found == {
        "normalize_norm": (5, 5, 0.0),
        "normalize_attention": (2, 2, 0.0),
        "normalize_swiglu": (2, 2, 0.0),
        "normalize_embedding": (1, 1, None),
        "normalize_head": (1, 1, None),
        "pack_qkv": (2, None, None),
        "pack_gate_up": (2, None, None),
    }
    # q [64, 64], k and v [32, 64], gate and up [96, 64]: fp32, two layers.
    assert report.packed_bytes == 2 * (64 + 32 + 32 + 96 + 96) * 64 * 4
    step = next(program for program in report.programs if program.name == "step")
    assert not step.compiled
    assert step.operators["dllm.row_attention"] == 2
    assert step.operators["aten.linear"] == 8
    assert step.operators["dllm.head_confidence"] == 1
    assert [result.name for result in step.passes] == ["flatten_rows", "select_wanted_rows", "fuse_head_confidence"]
    assert [(result.matches, result.required) for result in step.passes] == [(3, 3), (1, 1), (1, 1)]


def test_text(fast):
    lines = str(fast.report()).splitlines()
    assert lines[0].startswith("LLaDAForMaskedDiffusion: 2 layers, float32 on cpu; captured in ")
    table = {line.split()[0]: line.split() for line in lines if "exact" in line}
    assert table["normalize_norm"][1:4] == ["exact", "5", "5"]
    assert table["normalize_norm"][7] == "bit-equal"
    assert table["pack_qkv"][2:4] == ["2", "-"]
    assert any(line.startswith("program step (not compiled, ") for line in lines)
    assert any(line.startswith("  inputs: ids i64[s") for line in lines)
    # Two layers, k and v of two heads of 16 fp32 numbers each.
    assert "cache prefix, dual, vicinity, dkv, flash: 512 B a row = 2 x 2 layers x 2 key heads x 16 x 4 bytes" in lines
    assert "packed weights: 0.2 MiB, shared with the model's parameters (0 extra)" in lines
    assert "note: programs run uncompiled (compile=False)" in lines
    assert not [line for line in lines if line.startswith("left as it was")]
    assert all(line == line.rstrip() for line in lines)


def test_dictionary(fast):
    data = json.loads(json.dumps(fast.report().to_dict()))
    assert data["layers"] == 2
    assert [result["name"] for result in data["passes"]] == [one.name for one in (*NORMALIZE, *FUSE)]
    assert {result["level"] for result in data["passes"]} == {"exact"}
    assert {program["name"] for program in data["programs"]} >= {"step"}
    assert data["programs"][0]["passes"][0]["level"] == "exact"
    assert data["notes"] == ["programs run uncompiled (compile=False)"]


def test_work_of_a_step(fast):
    """One sample of 64 + 64 tokens (the model has 128 positions): q, k, v and attention of all to all in two layers.

    What stands behind attention is computed for all rows in the first layer and for the wanted ones in the last.
    """
    step = next(program for program in fast.report().programs if program.name == "step")
    rows, wanted, width, hidden, vocabulary = 128, 16, 64, 96, 128
    linear = 2 * 2 * rows * width * (64 + 32 + 32) + 2 * (rows + wanted) * width * (64 + 3 * hidden)
    attention = 4 * rows * rows * 64 * 2
    assert step.work.flops == linear + attention + 2 * wanted * width * vocabulary
    assert step.work.size == "1 sample of 64 + 64 tokens, block 16"
    assert (step.work.rows, step.work.card, step.work.floor_us) == (rows, None, None)
    assert step.launches is None, "nothing was compiled"
    assert step.inputs["tiles"].startswith("i32[s")
    assert step.inputs["tiles"].endswith(", 4]")


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA L40", None),
        ("Some other card", None),
    ],
)
def test_cards_by_name(device, card):
    found = cards.card_named(device)
    assert (None if found is None else found.name) == card


def test_floor_is_the_slower_of_moving_and_computing():
    card = cards.Card("mine", bytes_per_second=1e9, flops=1e12, fp8_flops=2e12)
    assert card.floor(2_000_000_000, 10**12) == 2.0
    assert card.floor(1_000_000_000, 3 * 10**12) == 3.0
    assert card.floor(0, 3 * 10**12, fp8_flops=2 * 10**12) == 2.0
    assert dataclasses.replace(card, fp8_flops=None).floor(1, 2, fp8_flops=1) is None


def test_floor_is_that_of_the_present_card(monkeypatch):
    """Only the name of the card is played: the bytes of the bf16 program over its bandwidth."""
    fast = dllm_compile.optimize(tiny_model(dtype=torch.bfloat16), compile=False)
    fast.generate(prompts_of(4), SHORT)
    monkeypatch.setattr(work, "card_of", lambda device: cards.card_named("NVIDIA H200"))
    (step,) = fast.report().programs
    assert step.work.card == "H200"
    assert step.work.floor_us == pytest.approx(step.work.bytes / 4.35e12 * 1e6)
    assert f"floor on H200 {step.work.floor_us:.0f} us" in str(step.work)


def test_launches_of_generated_code():
    source = """
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], "cpp_fused_add_0(x)")
triton_poi_1 = async_compile.triton('triton_', "code")
def partition_0(args):
    triton_poi_1.run(buf0, stream=stream0)
class Runner:
    def call(self, args):
        cpp_fused_add_0(arg0_1, buf0)
        extern_kernels.mm(buf0, reinterpret_tensor(arg2_1, (64, 128), (1, 64), 0), out=buf1)
        buf2 = torch.ops.dllm.row_attention.default(buf1)
        buf3 = torch.ops.aten.sort.stable(buf2)
        aten.index_put_(buf3, [arg1_1], buf2, False)
        buf4 = alloc_from_pool(buf0, 0)
        partition_0([buf4])
def benchmark_compiled_module(args):
    cpp_fused_add_0(arg0_1, buf0)
"""
    assert launches.source_launches(source) == launches.Launches(generated=2, library=3, operators=1)
    assert launches.program_launches((source, source), (1, 3)) == launches.Launches(8, 12, 4)
    assert launches.program_launches((source,), (1, 3)) is None
    assert launches.program_launches((), ()) is None


def test_shown_as_text_in_a_file_and_in_colour_in_a_terminal(fast, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    plain = io.StringIO()
    fast.report().show(plain)
    assert plain.getvalue() == f"{fast.report()}\n"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    fast.report().show(terminal)
    shown = re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue())
    for word in ("normalize_attention", "bit-equal", "program step", "packed weights", "compile=False"):
        assert word in shown
    assert shown != plain.getvalue()


def test_shown_as_text_without_rich(fast, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    fast.report().show(terminal)
    assert terminal.getvalue() == f"{fast.report()}\n"


def test_refusals_are_reported():
    fast = dllm_compile.optimize(Mini(ffn_kind="chunked"), strict=False, compile=False)
    report = fast.report()
    line = (
        "left as it was - normalize_swiglu: blocks.1: the gate is not the output of a linear layer (a chunked SwiGLU?)"
    )
    assert line in str(report)
    refusals = json.loads(json.dumps(report.to_dict()))["passes"][2]["refusals"]
    assert [refusal["where"] for refusal in refusals] == ["blocks.0", "blocks.1"]
    ids = torch.arange(9)[None]
    torch.testing.assert_close(fast(ids).logits, model_logits(fast.model, ids), rtol=1e-5, atol=1e-5)
    assert_plain(fast, prompts_of(4, 2, vocab=38), SHORT)


@pytest.mark.parametrize("names", [("pack_qkv",), ("pack_gate_up",), ("pack_qkv", "pack_gate_up", "inline_references")])
def test_optional_passes_change_no_tokens(fast, names):
    model = tiny_model()
    storages = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    without = dllm_compile.optimize(model, compile=False, disable=names)
    prompts = prompts_of(5, 1, 8)
    for options in ({}, {"threshold": 0.5}, {"temperature": 0.6}):
        config = SHORT.replace(**options)
        assert torch.equal(without.generate(prompts, config).sequences, fast.generate(prompts, config).sequences)
    ran = {result.name for result in without.report().passes}
    assert not ran & set(names)
    packed = {"pack_qkv", "pack_gate_up"} - set(names)
    # Each layer saves two storages by packing q, k, v and one by packing gate and up.
    saved = 2 * (2 * ("pack_qkv" in packed) + ("pack_gate_up" in packed))
    assert storages - len({p.untyped_storage().data_ptr() for p in model.parameters()}) == saved
    assert (without.report().packed_bytes == 0) == (not packed)


# --- no compiler ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(api, "can_compile", lambda device: False)


def test_a_missing_compiler_is_said_aloud(no_compiler):
    with pytest.warns(RuntimeWarning, match="programs run uncompiled on cpu, slower: a C\\+\\+ compiler") as caught:
        fast = dllm_compile.optimize(tiny_model())
    assert [warning.filename for warning in caught] == [__file__]
    assert any("a C++ compiler (g++ or clang++) was not found" in note for note in fast.report().notes)
    assert_plain(fast, prompts_of(4), SHORT)


def test_a_compiler_that_must_be_there(no_compiler):
    model = tiny_model()
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ConfigError, match="compile=True, but a C\\+\\+ compiler"):
        dllm_compile.optimize(model, compile=True)
    assert [p.data_ptr() for p in model.parameters()] == places, "the model is as it was"


def test_what_counts_as_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not _compat.has_cxx_compiler()
    assert not _compat.can_compile(torch.device("cpu"))
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert _compat.can_compile(torch.device("cpu"))
    monkeypatch.setattr(_compat, "is_triton_installed", lambda: False)
    assert not _compat.can_compile(torch.device("cuda"))


def test_switch_for_references(monkeypatch):
    """It turns kernels off and leaves the compiler, which needs Triton as well, alone."""
    monkeypatch.setattr(_compat, "is_triton_installed", lambda: True)
    monkeypatch.delenv(_compat.TRITON_VARIABLE, raising=False)
    assert _compat.has_triton()
    with _compat.references_only():
        assert not _compat.has_triton()
        assert _compat.can_compile(torch.device("cuda"))
    assert _compat.has_triton()
    monkeypatch.setenv(_compat.TRITON_VARIABLE, "0")
    assert not _compat.has_triton()
    assert _compat.can_compile(torch.device("cuda"))


def test_progress(capsys):
    dllm_compile.optimize(Mini(layers=1), compile=False, progress=True)
    assert "certifying" in capsys.readouterr().err
