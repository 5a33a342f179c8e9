# SPDX-License-Identifier: Apache-2.0
"""The bundled model on 200 problems: every policy gives its reference's tokens, in batches of four and alone."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.models.small.problem import held_out
from tests.reference.llada_rows import LladaRows

from .tiny import cached

POLICIES = {
    "prefix": {"cache": "prefix", "threshold": 0.9},
    "dual": {"cache": "dual", "factor": 1.0, "refresh_interval": 6},
    "vicinity": {"cache": "vicinity", "prefix_look": 8, "after_look": 8, "threshold": 0.9},
    "dkv": {"cache": "dkv", "threshold": 0.9, "cache_steps": 4},
    "flash": {"cache": "flash", "threshold": 0.9, "track": 32, "lookahead": 16},
    "dpad": {"cache": "dual", "suffix": "dpad", "suffix_window": 32, "threshold": 0.9},
    "lacache": {"cache": "lacache", "lacache_layers": (0, 1, 2, 3), "threshold": 0.9},
}
PROBLEMS, ALONE = 200, 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
def test_two_hundred_problems(small_model, small_fast, small_tokenizer, policy):
    """Token for token in fp32."""
    problems = held_out("arithmetic", PROBLEMS)
    prompts = [torch.tensor(small_tokenizer(problem.prompt)["input_ids"]) for problem in problems]
    config = DecodingConfig(max_new_tokens=48, block_length=16, **POLICIES[policy])
    model = LladaRows(small_model)
    for first in range(0, PROBLEMS, 4):
        batch = prompts[first : first + 4]
        with torch.no_grad():
            expected = cached(model, batch, config, small_fast.facts)
        output = small_fast.generate(batch, config)
        longest = max(map(len, batch))
        for i, (prompt, one) in enumerate(zip(batch, expected, strict=True)):
            assert output.sequences[i, longest - len(prompt) :].tolist() == one.canvas, f"problem {first + i}"
        assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)
        if first < ALONE:
            assert small_fast.generate(batch[0], config).sequences[0].tolist() == expected[0].canvas
