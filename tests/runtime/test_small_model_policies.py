# SPDX-License-Identifier: Apache-2.0
"""The bundled model on held-out problems (200 with `-m long`): caches against references, in fours and alone."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.config import DecodingConfig

from .bundled import assert_equals_reference, prompts_of_problems

POLICIES = {
    "prefix": {"cache": "prefix", "threshold": 0.9},
    "dual": {"cache": "dual", "factor": 1.0, "refresh_interval": 6},
    "vicinity": {"cache": "vicinity", "prefix_look": 8, "after_look": 8, "threshold": 0.9},
    "dkv": {"cache": "dkv", "threshold": 0.9, "cache_steps": 4},
    "flash": {"cache": "flash", "threshold": 0.9, "track": 32, "lookahead": 16},
    "dpad": {"cache": "dual", "suffix": "dpad", "suffix_window": 32, "threshold": 0.9},
    "lacache": {"cache": "lacache", "lacache_layers": (0, 1, 2, 3), "threshold": 0.9},
}
PROBLEMS = 200


@pytest.mark.parametrize(
    "count", [4, pytest.param(PROBLEMS, marks=[pytest.mark.long, pytest.mark.timeout(1800)])], ids="{} problems".format
)
@pytest.mark.parametrize("policy", POLICIES)
def test_problems(small_model, small_fast, small_tokenizer, policy, count):
    """Token for token in fp32."""
    prompts = prompts_of_problems(small_tokenizer, count)
    config = DecodingConfig(max_new_tokens=48, block_length=16, **POLICIES[policy])
    for first in range(0, count, 4):
        alone = 4 if count == PROBLEMS else 1
        assert_equals_reference(small_fast, small_model, prompts[first : first + 4], config, alone)


@pytest.mark.parametrize("block_length", [1, pytest.param(8, marks=pytest.mark.long), 32, 48])
@pytest.mark.parametrize("options", [{}, {"threshold": 0.9}], ids=["quota", "threshold"])
@pytest.mark.parametrize(
    "count", [4, pytest.param(PROBLEMS, marks=[pytest.mark.long, pytest.mark.timeout(1800)])], ids="{} problems".format
)
def test_lacache_on_layer_zero_is_the_uncached_loop(small_fast, small_tokenizer, options, block_length, count):
    """The first, middle and last block of an answer, ragged batches of four, and each alone: not a token differs."""
    prompts = prompts_of_problems(small_tokenizer, count, seed=1)
    plain = DecodingConfig(max_new_tokens=56, block_length=block_length, **options)
    cached_config = plain.replace(cache="lacache")
    for first in range(0, count, 4):
        batch = prompts[first : first + 4]
        expected, output = (small_fast.generate(batch, config) for config in (plain, cached_config))
        assert torch.equal(expected.sequences, output.sequences), f"problems {first} to {first + 3}"
        assert expected.stats.forwards_per_row == output.stats.forwards_per_row
        for i in range(4 if count == PROBLEMS else 1):
            alone = small_fast.generate(batch[i], cached_config).sequences[0]
            assert torch.equal(alone, expected.sequences[i, -len(alone) :]), f"problem {first + i} alone"
