# SPDX-License-Identifier: Apache-2.0
"""What `optimize` says: the report, dumped graphs, switches for bisecting, and missing compilers said aloud."""

from __future__ import annotations

import json

import pytest
import torch

import dllm_compile
from dllm_compile import _compat, api
from dllm_compile.errors import ConfigError
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


def test_dumped_graphs(fast, tmp_path):
    files = fast.dump_graphs(tmp_path / "new" / "folder")
    assert [file.name[:3] for file in files] == [f"{i:02d}_" for i in range(len(files))]
    names = [file.stem[3:] for file in files]
    assert names[:8] == ["captured", *(one.name for one in (*NORMALIZE, *FUSE))]
    assert {"step.flatten_rows", "step.fuse_head_confidence", "forward.flatten_rows"} <= set(names)
    for file in files:
        text = file.read_text(encoding="utf-8")
        compile(text, str(file), "exec")
        assert text.startswith(f"# {file.stem[3:]}: ")
    captured, last = files[0].read_text(encoding="utf-8"), files[7].read_text(encoding="utf-8")
    assert "scaled_dot_product_attention" in captured
    assert "dllm.attention" not in captured
    assert "dllm.attention" in last
    assert "scaled_dot_product_attention" not in last
    assert '"f32[64, 64][64, 1]"' in captured, "dtypes, shapes and strides are shown"


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


def test_progress(capsys):
    dllm_compile.optimize(Mini(layers=1), compile=False, progress=True)
    assert "certifying" in capsys.readouterr().err
