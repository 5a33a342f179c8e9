# SPDX-License-Identifier: Apache-2.0
"""Decoding held-out problems with the bundled model, against the reference over its unmodified weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dllm_compile import DecodingConfig, OptimizedModel
from dllm_compile.models.small.problem import held_out
from tests.reference.llada_rows import LladaRows

from .tiny import cached


def prompts_of_problems(tokenizer, count: int, *, seed: int = 0) -> list[Tensor]:
    """Prompts of `count` arithmetic problems, ragged."""
    return [torch.tensor(tokenizer(one.prompt)["input_ids"]) for one in held_out("arithmetic", count, seed=seed)]


def assert_equals_reference(
    fast: OptimizedModel, model: nn.Module, prompts: list[Tensor], config: DecodingConfig, alone: int = 1
):
    """Token for token and forward for forward, the prompts together and the first `alone` of them by themselves.

    Returns:
        What the reference did, for each prompt, and the output of them together.
    """
    with torch.no_grad():
        expected = cached(LladaRows(model), prompts, config, fast.facts)
    output = fast.generate(prompts, config)
    longest = max(map(len, prompts))
    for i, (row, prompt, one) in enumerate(zip(output.sequences, prompts, expected, strict=True)):
        assert row[longest - len(prompt) :].tolist() == one.canvas, f"prompt {i}"
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)
    for i in range(alone):  # a seed is what a batch gives its sample i
        assert fast.generate(prompts[i], config, seed=i).sequences[0].tolist() == expected[i].canvas, f"{i} alone"
    return expected, output
