# SPDX-License-Identifier: Apache-2.0
"""Real programs against the plain loop: the same prompts through `generate` and through the definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from dllm_compile import DecodingConfig, GenerationOutput
from dllm_compile.optimized import OptimizedModel
from tests.reference.plain_loop import PlainResult, plain_decode
from tests.runtime.tiny import options_of

RULES: dict[str, dict[str, Any]] = {
    "quota": {},
    "threshold": {"threshold": 0.5},
    "factor": {"factor": 1.0},
    "frechet": {"frechet_margin": 0.25},
}


def prompts_of(*lengths: int, vocab: int = 120, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def plain(fast: OptimizedModel, prompts: list[Tensor], config: DecodingConfig) -> list[PlainResult]:
    """Each prompt alone, through the user's own model and the plain loop."""
    options = dataclasses.replace(options_of(config, fast.facts), mask_id=fast.facts.mask_token_id)

    def forward(ids: Tensor) -> Tensor:
        with torch.no_grad():
            out = fast.model(ids)
        return out if isinstance(out, Tensor) else out.logits

    return [plain_decode(forward, prompt.tolist(), options, i) for i, prompt in enumerate(prompts)]


def assert_plain(fast: OptimizedModel, prompts: list[Tensor], config: DecodingConfig) -> GenerationOutput:
    """Tokens and forwards are those of the plain loop."""
    output = fast.generate(prompts, config)
    expected = plain(fast, prompts, config)
    width = max(map(len, prompts))
    rows = [row[width - len(p) :].tolist() for row, p in zip(output.sequences, prompts, strict=True)]
    assert rows == [one.canvas for one in expected]
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)
    return output


def model_logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits
