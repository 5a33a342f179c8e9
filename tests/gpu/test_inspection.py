# SPDX-License-Identifier: Apache-2.0
"""Report, dumps, the switch for references, and `bisect` on a card."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig
from dllm_compile._compat import TRITON_VARIABLE, has_triton, references_only
from dllm_compile.cards import card_of
from dllm_compile.inspection.dumped import recorded_outputs
from dllm_compile.kernels import row_attention
from tests.conftest import tiny_model
from tests.inspection.test_dump import load_module, outputs_of
from tests.real import prompts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]

SHORT = DecodingConfig(max_new_tokens=8, block_length=4)
FLASH = DecodingConfig(max_new_tokens=8, cache="flash", window_length=4, commit="flash_verify", threshold=0.5)
KINDS = (SHORT, SHORT.replace(cache="dual"), SHORT.replace(cache="lacache"), FLASH)
PLAIN = CompileConfig(compile=False, cuda_graphs=False)


@pytest.mark.parametrize("decoding", KINDS, ids=lambda decoding: decoding.cache)
def test_references_give_the_kernels_tokens(decoding, monkeypatch):
    fast = dllm_compile.optimize(tiny_model().cuda(), PLAIN)
    prompts = prompts_of(6, 3)
    expected = fast.generate(prompts, decoding).sequences
    with references_only():
        assert not has_triton()
        assert torch.equal(fast.generate(prompts, decoding).sequences, expected)
    monkeypatch.setenv(TRITON_VARIABLE, "0")
    assert not has_triton()
    assert torch.equal(fast.generate(prompts, decoding).sequences, expected)


@pytest.mark.parametrize("decoding", KINDS, ids=lambda decoding: decoding.cache)
def test_bisect_finds_nothing_where_nothing_is_wrong(decoding):
    result = dllm_compile.bisect(tiny_model().cuda(), prompts_of(6)[0], CompileConfig(compile=False), decoding)
    assert result.fault is None, result
    names = {finding.layer for finding in result.findings}
    assert {"Triton kernels in forward", "Triton kernels in step", "decode loop with Triton kernels"} <= names
    assert ("CUDA graphs" in names) == decoding.is_capturable


def test_bisect_names_a_kernel(monkeypatch):
    """The graphs are right with references; the kernel leaves out the last key."""
    right = row_attention.row_attention_cuda

    def wrong(q, k, v, tiles, tile_rows, arrived=None):
        if has_triton():
            tiles = tiles - torch.tensor([0, 0, 0, 1], dtype=torch.int32, device=tiles.device)
        return right(q, k, v, tiles, tile_rows, arrived)

    monkeypatch.setattr(row_attention, "row_attention_cuda", wrong)
    result = dllm_compile.bisect(tiny_model().cuda(), prompts_of(6)[0], PLAIN, SHORT)
    assert result.first is not None
    assert result.first.layer == "Triton kernels in forward", result


def test_report_on_a_card():
    fast = dllm_compile.optimize(tiny_model(dtype=torch.bfloat16).cuda())
    for _ in range(3):
        fast.generate(prompts_of(6, 3), SHORT.replace(cache="dual"))
    report = fast.report()
    step = next(program for program in report.programs if program.name == "cached_step")
    assert step.launches is not None
    assert step.launches.operators > 0
    card = card_of(fast.device)
    assert (step.work.floor_us is None) == (card is None)
    if card is not None:
        assert step.work.card == card.name
    assert sum(session.captured_graphs for session in report.sessions) > 0
    assert all(session.cache_bytes > 0 for session in report.sessions)


def test_dumped_programs_run_on_a_card(tmp_path):
    fast = dllm_compile.optimize(tiny_model(dtype=torch.bfloat16).cuda(), PLAIN)
    for decoding in KINDS:
        fast.generate(prompts_of(6, 3), decoding)
    fast.dump_graphs(tmp_path)
    for program in fast.programs.built:
        path = tmp_path / f"program_{program.name.replace('-', '_')}.py"
        module = load_module(path)
        module.load(device="cuda")
        actual = outputs_of(module, module.example("cuda"))
        for expected, value in zip(recorded_outputs(tmp_path, path.stem), actual, strict=True):
            torch.testing.assert_close(value.cpu(), expected, rtol=2e-2, atol=2e-2)
