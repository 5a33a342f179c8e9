# SPDX-License-Identifier: Apache-2.0
"""The bundled checkpoint: what is in the folder, and that it solves problems it has never seen."""

from __future__ import annotations

import json

import pytest
import torch

from dllm_compile.models import load_small, load_small_tokenizer
from dllm_compile.models.llada import LLaDAForMaskedDiffusion
from dllm_compile.models.small import CHECKPOINT
from dllm_compile.models.small.evaluate import decode, measure
from dllm_compile.models.small.families import grade
from dllm_compile.models.small.problem import held_out


@pytest.fixture(scope="module")
def model() -> LLaDAForMaskedDiffusion:
    return load_small()


def test_folder() -> None:
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 16_000_000
    model, tokenizer = load_small(dtype=torch.bfloat16), load_small_tokenizer()
    config = model.config
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert config.head_dim in (64, 128)
    assert all(size % 128 == 0 for size in (config.d_model, config.ffn_size, config.vocab_size))
    assert len(tokenizer) <= config.vocab_size
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (config.mask_token_id, config.eos_token_id)
    assert json.loads((CHECKPOINT / "training.json").read_text())["parameters"] == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_solves_code_and_prose_one_token_a_step(model: LLaDAForMaskedDiffusion) -> None:
    tokenizer = load_small_tokenizer().backend_tokenizer
    for family in ("code", "prose"):
        figures, _, texts = measure(model, tokenizer, held_out(family, 4), None, gen_length=64)
        assert figures["accuracy"] >= 0.75, texts
        assert figures["forwards_per_problem"] <= 64


def test_solves_some_word_problems(model: LLaDAForMaskedDiffusion) -> None:
    tokenizer = load_small_tokenizer()
    problems = [problem for problem in held_out("arithmetic", 40) if problem.check["steps"] <= 4][:8]
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    decoded = decode(model, prompts, 96, 32, 0.9)
    texts = tokenizer.batch_decode(decoded.tokens)
    assert sum(map(grade, problems, texts)) >= 6, texts
    assert max(decoded.forwards) < 96


def test_decoding_together_equals_decoding_alone(model: LLaDAForMaskedDiffusion) -> None:
    tokenizer = load_small_tokenizer()
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in held_out("code", 2) + held_out("prose", 1)]
    together = decode(model, prompts, 64, 32, 0.9)
    for row, prompt in enumerate(prompts):
        alone = decode(model, [prompt], 64, 32, 0.9)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.forwards[0] == together.forwards[row]
