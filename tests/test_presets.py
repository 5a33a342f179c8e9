# SPDX-License-Identifier: Apache-2.0
"""The named configurations: they are valid, and hold what the works' tables say where tests can tell."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.presets import PRESETS
from dllm_compile.runtime.suffix.dpad import GaussianDecay


@pytest.mark.parametrize("name", PRESETS)
def test_presets_decode(small_fast, small_tokenizer, name):
    """Each runs as it is, but for its length."""
    ids = small_tokenizer("Tom has 3 apples and buys 4 more. How many apples does Tom have?")["input_ids"]
    config = PRESETS[name].replace(max_new_tokens=64)
    steps = {"steps": 64} if config.steps is not None else {}
    output = small_fast.generate([ids], config.replace(**steps))
    assert output.stats.forwards <= 64
    assert not (output.sequences == small_fast.facts.mask_token_id).any()


@pytest.mark.parametrize(
    ("name", "kept"),
    [("dpad/gsm8k", 64), ("dpad/humaneval", 196), ("dpad/mbpp", 49), ("dpad-1.5/gsm8k", 68), ("dpad-1.5/mbpp", 136)],
)
def test_expected_suffix_of_dpad(name, kept):
    """The counts that the published parameters lead to when the suffix covers the window."""
    config = PRESETS[name]
    rule = GaussianDecay(config.k_sigma, config.scale, config.suffix_window, 0)
    assert round(float(rule.probability(torch.arange(config.suffix_window)).sum())) == kept


def test_flash_presets():
    """128 rows a step, 112 for MBPP."""
    rows = {
        name: one.window_length + one.lookahead + one.track for name, one in PRESETS.items() if one.cache == "flash"
    }
    assert set(rows.values()) == {128, 112}
    assert rows["flash/mbpp"] == 112
