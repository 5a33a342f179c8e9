# SPDX-License-Identifier: Apache-2.0
"""LLaDA's own modelling code, unmodified: what is captured, rewritten and decoded, revision by revision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dllm_compile
from dllm_compile.capture import capture
from dllm_compile.passes import NORMALIZE, run_passes
from dllm_compile.passes.graph import operator_counts
from dllm_compile.remote_code import load_remote
from tests.passes.pieces import assert_same
from tests.real import RULES, assert_plain, model_logits, prompts_of
from tests.remote import SMALL

pytestmark = pytest.mark.remote
LAYERS = SMALL["n_layers"]


@pytest.fixture
def model(remote_path: Path) -> Any:
    return load_remote(remote_path, dtype=torch.float32)


@pytest.mark.parametrize("inner", [False, True], ids=["wrapper", "inner"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counts_and_canonical_graph(model, inner, dtype):
    model = model.to(dtype)
    config, source = model.config, model.model if inner else model
    captured = capture(source, config.max_sequence_length, config.embedding_size)
    assert captured.source is model.model
    assert captured.layers == LAYERS
    counts = operator_counts(captured.gm)
    assert counts["aten.rsqrt"] == 2 * LAYERS + 1
    assert counts["aten.silu"] == counts["aten.scaled_dot_product_attention"] == LAYERS
    assert counts["aten.linear"] == 7 * LAYERS + 1
    assert counts["aten._to_copy"] == (6 * LAYERS + 2 if dtype == torch.bfloat16 else 0)
    assert {id(p) for p in captured.gm.parameters()} == {id(p) for p in model.parameters()}
    results = run_passes(captured.gm, NORMALIZE, layers=LAYERS)
    assert [result.matches for result in results] == [2 * LAYERS + 1, LAYERS, LAYERS, 1, 1]
    assert [result.error for result in results[:3]] == [0.0, 0.0, 0.0]
    assert_same(captured.gm, _with_config(source, config))


def _with_config(source: Any, config: Any) -> Any:
    """Sizes are read from the wrapper's configuration."""
    if source.config is not config:
        source.config.vocab_size = config.vocab_size
    return source


def test_padding_is_honoured_whatever_the_revision_does(model):
    fast = dllm_compile.optimize(model, compile=False)
    prompts = prompts_of(9, 4)
    ids, mask = torch.full((2, 9), 126), torch.zeros(2, 9, dtype=torch.int64)
    for side in ("left", "right"):
        mask.zero_()
        for row, prompt in enumerate(prompts):
            where = slice(9 - len(prompt), 9) if side == "left" else slice(0, len(prompt))
            ids[row, where], mask[row, where] = prompt, 1
        logits = fast(ids, attention_mask=mask).logits
        for row, prompt in enumerate(prompts):
            alone = model_logits(model, prompt[None])[0]
            torch.testing.assert_close(logits[row][mask[row] == 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_generate_equals_the_plain_loop(model, rule):
    fast = dllm_compile.optimize(model, compile=False)
    config = dllm_compile.DecodingConfig(max_new_tokens=12, block_length=8, **RULES[rule])
    assert_plain(fast, prompts_of(5, 1, 12, 7), config)
    assert_plain(fast, prompts_of(5, 3), config.replace(temperature=0.7))


def test_the_model_is_untouched_and_can_be_saved(model, tmp_path, remote_path):
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    keys, ids = list(model.state_dict()), torch.arange(11)[None]
    config, logits = model.config.to_json_string(), model_logits(model, ids)
    flash = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    fast = dllm_compile.optimize(model, compile=False)
    fast.generate(prompts_of(4), max_new_tokens=4)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()) == flash
    assert model.config.to_json_string() == config
    assert list(model.state_dict()) == keys
    for name, p in model.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
    assert torch.equal(model_logits(model, ids), logits)
    for file in remote_path.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    model.save_pretrained(tmp_path)
    again = load_remote(tmp_path, dtype=torch.float32)
    assert torch.equal(model_logits(again, ids), logits)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 1.1 * sum(
        p.nbytes for p in model.parameters()
    )
    with torch.no_grad():
        model.model.transformer.blocks[0].q_proj.weight.mul_(2)
    torch.testing.assert_close(fast(ids).logits, model_logits(model, ids), rtol=1e-5, atol=1e-5)
