# SPDX-License-Identifier: Apache-2.0
"""The demonstration: its plain loop is the definition, its verdict comes from the tokens, and it shows what it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_compile import DecodingConfig, OptimizedModel, cli, demo
from tests.reference.plain_loop import PlainOptions, plain_decode


@pytest.mark.parametrize("block_length", [4, 5, 16])
def test_its_plain_loop_is_the_definition(make_tiny: Any, block_length: int):
    model = make_tiny(seed=3)
    mask_id, eos_id = model.config.mask_token_id, model.config.eos_token_id
    config = DecodingConfig(max_new_tokens=16, block_length=block_length)
    options = PlainOptions(
        mask_id=mask_id, stop_ids=(eos_id,), fill_id=eos_id, max_new_tokens=16, block_length=block_length
    )
    for prompt in ([5, 9, 77], [1], list(range(20))):
        with torch.no_grad():
            expected = plain_decode(lambda ids: model(ids).logits, prompt, options).canvas
        assert demo.plain_decode(model, prompt, config, mask_id, eos_id).tolist() == expected


def test_an_early_end_fills_the_canvas(make_tiny: Any):
    model = make_tiny(seed=3)
    config = DecodingConfig(max_new_tokens=12, block_length=4)
    first = demo.plain_decode(model, [5, 9, 77], config, mask_id=127, eos_id=126)[3:].tolist()
    stop = first[1]  # a token of the first block, taken for the end
    ended = demo.plain_decode(model, [5, 9, 77], config, mask_id=127, eos_id=stop)[3:].tolist()
    assert ended == first[:4] + [stop] * 8


def test_the_demo_runs_and_finds_the_same_tokens(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", "--problems", "1", "--no-compile", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "Same tokens" in shown
    assert "normalize_attention" in shown
    assert "threshold 0.9" in shown


def test_the_demo_says_so_when_tokens_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    original = OptimizedModel.generate

    def changed(self: OptimizedModel, *arguments: Any, **options: Any) -> Any:
        output = original(self, *arguments, **options)
        output.sequences[:, -1] += 1
        return output

    monkeypatch.setattr(OptimizedModel, "generate", changed)
    assert demo.run(problems=1, device="cpu", compile=False) == 1
    assert "Different tokens" in capsys.readouterr().out
