# SPDX-License-Identifier: Apache-2.0
"""The real row programs of a rewritten LLaDA in fp32 against the plain loop over the unmodified model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dllm_compile
from dllm_compile.config import DecodingConfig
from tests.conftest import tiny_model
from tests.reference.plain_loop import plain_decode

from .tiny import options_of, prompts_of

RULES = {
    "quota": {},
    "steps": {"steps": 15},
    "threshold": {"threshold": 0.5},
    "factor": {"factor": 1.0},
    "released": {"factor": 0.8, "last_rank": "released"},
    "frechet": {"frechet_margin": 0.1},
    "sampled": {"threshold": 0.3, "temperature": 0.8, "seed": 4},
    "guided": {"cfg_scale": 1.0},
    "random": {"remasking": "random", "temperature": 0.5},
    "first": {"factor": 1.0, "eos": "first", "eos_token_id": tuple(range(0, 126, 9))},
    "switches": {"logits_eos_inf": True, "confidence_eos_eot_inf": True, "eos_token_id": tuple(range(0, 126, 9))},
}


@pytest.fixture(scope="module")
def pair():
    """The model, and its rewritten form with programs that are not compiled (that is compared elsewhere)."""
    model = tiny_model(seed=3)
    return model, dllm_compile.optimize(model, compile=False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [1, 8, 32])
def test_tokens_of_the_unmodified_model(pair, rule, block_length):
    model, fast = pair
    options = dict(RULES[rule])
    if rule == "steps" and block_length == 1:
        options["steps"] = 20
    if rule == "steps" and block_length == 32:
        options["steps"] = 7
    config = DecodingConfig(max_new_tokens=20, block_length=block_length, **options)
    prompts = prompts_of(5, 11, 2, seed=block_length)
    output = fast.generate(prompts, config)

    def forward(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(ids).logits

    plain = options_of(config, fast.facts)
    for i, prompt in enumerate(prompts):
        expected = plain_decode(forward, prompt.tolist(), plain, i)
        assert output.sequences[i, 11 - len(prompt) :].tolist() == expected.canvas
        assert output.stats.forwards_per_row[i] == expected.forwards


def test_padding_and_batch(pair):
    """Left padding, right padding, ragged and alone: one result."""
    _, fast = pair
    prompts = prompts_of(5, 9, seed=2)
    config = DecodingConfig(max_new_tokens=16, block_length=8, threshold=0.5)
    ragged = fast.generate(prompts, config).sequences
    ids, mask = torch.full((2, 9), 126), torch.ones(2, 9, dtype=torch.int64)
    ids[0, 4:], mask[0, :4], ids[1] = prompts[0], 0, prompts[1]
    assert torch.equal(fast.generate(ids, config, attention_mask=mask).sequences, ragged)
    ids[0, :5], mask[0] = prompts[0], torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 0])
    assert torch.equal(fast.generate(ids, config, attention_mask=mask).sequences, ragged)
    for row, prompt in zip(ragged, prompts, strict=True):
        assert fast.generate(prompt, config).sequences[0].tolist() == row[9 - len(prompt) :].tolist()
