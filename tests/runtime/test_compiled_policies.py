# SPDX-License-Identifier: Apache-2.0
"""G11: compiled programs give the policies' tokens, one program for all sizes that a run goes through."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile._compat import can_compile
from tests.conftest import tiny_model

from .policies import POLICIES
from .tiny import prompts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def both() -> list[dllm_compile.OptimizedModel]:
    return [dllm_compile.optimize(tiny_model(seed=3, n_layers=3), compile=compiled) for compiled in (False, True)]


@pytest.mark.parametrize("policy", ["dual", "dkv every 3", "flash", "dpad", "prefix, dpad"])
def test_compiled_equals_eager(both, policy):
    """Tokens in fp32; batches of one and of four, rows and tiles of many sizes, no recompilation after the first."""
    eager, compiled = both
    assert not any(program.compiled for program in eager.programs.built)
    options = {"max_new_tokens": 20, "block_length": 8, "threshold": 0.2, **POLICIES[policy]}
    for i, lengths in enumerate(((5, 11, 2, 8), (7,), (1, 30))):
        prompts = prompts_of(*lengths, seed=i)
        expected = eager.generate(prompts, **options)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            output = compiled.generate(prompts, **options)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.stats.forwards_per_row == expected.stats.forwards_per_row
    assert all(program.compiled for program in compiled.programs.built)
