# SPDX-License-Identifier: Apache-2.0
"""Corners in which an option's size, a single row or a global setting once decided more than it should."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile.errors import DllmCompileError
from tests.conftest import tiny_model


@pytest.fixture(scope="module")
def fast():
    return dllm_compile.optimize(tiny_model(), compile=False)


@pytest.mark.parametrize("cache", ["none", "lacache", "prefix", "dual", "dkv"])
@pytest.mark.parametrize("others", [[], [[3, 4, 5, 6, 7]]], ids=["alone", "with another"])
def test_a_sample_of_which_one_row_is_kept(fast, cache, others):
    """An all-mask prompt of one token, and a suffix policy that drops everything behind it."""
    mask = fast.facts.mask_token_id
    options = {"suffix": "dpad", "scale": 1e-6, "infill": True, "max_new_tokens": 4, "block_length": 4}
    alone = fast.generate([[mask]], cache=cache, **options)
    output = fast.generate([[mask], *others], cache=cache, **options)
    assert torch.equal(output.sequences[0, -5:], alone.sequences[0])
    if cache == "lacache":
        assert torch.equal(alone.sequences, fast.generate([[mask]], **options).sequences)
    assert not (output.sequences == mask).any()


@pytest.mark.parametrize("interval", [None, 2])
def test_wide_lacache_with_a_single_row(fast, interval):
    mask = fast.facts.mask_token_id
    options = {"suffix": "dpad", "scale": 1e-6, "infill": True, "max_new_tokens": 4, "block_length": 4}
    config = {"cache": "lacache", "lacache_layers": (0, 1), "lacache_interval": interval}
    both = fast.generate([[mask], [3, 4, 5]], **config, **options)
    alone = fast.generate([[mask]], **config, **options)
    assert torch.equal(both.sequences[0, -5:], alone.sequences[0])


@pytest.mark.parametrize("cache", ["none", "lacache", "dual", "flash"])
def test_looking_seldom_runs_no_idle_steps_for_one_sample(fast, cache):
    often, seldom = (
        fast.generate([[1, 2, 3]], max_new_tokens=8, block_length=8, cache=cache, check_every=n) for n in (1, 10**9)
    )
    assert torch.equal(often.sequences, seldom.sequences)
    assert seldom.stats.forwards == often.stats.forwards


def test_a_window_wider_than_the_canvas_costs_nothing(fast):
    wide, exact = (
        fast.generate([[1, 2, 3], [4]], max_new_tokens=8, cache="flash", window_length=n) for n in (2**31 - 1, 8)
    )
    assert torch.equal(wide.sequences, exact.sequences)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cache", ["none", "lacache", "dual", "flash"])
def test_the_default_dtype_of_the_process_does_not_matter(fast, cache, dtype):
    expected = fast.generate([[1, 2], [7, 8, 9]], max_new_tokens=8, cache=cache).sequences
    torch.set_default_dtype(dtype)
    try:
        actual = fast.generate([[1, 2], [7, 8, 9]], max_new_tokens=8, cache=cache).sequences
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(expected, actual)


@pytest.mark.parametrize("cache", ["none", "lacache", "dual", "flash", "dkv"])
def test_weights_that_are_not_finite_are_said(cache):
    model = tiny_model()
    fast = dllm_compile.optimize(model, compile=False)
    with torch.no_grad():
        model.model.transformer["ln_f"].weight.fill_(float("nan"))
    with pytest.raises(DllmCompileError, match="NaN"):
        fast.generate([[1, 2, 3]], max_new_tokens=8, cache=cache)


def test_a_mask_that_is_no_mask_is_refused(fast):
    ids = torch.tensor([[1, 2, 3, 4]])
    for mask in (torch.tensor([[0.0, 0.0, -1e9, -1e9]]), torch.full((1, 4), 0.5)):
        with pytest.raises(DllmCompileError, match="1 for tokens and 0 for padding"):
            fast(ids, mask)
    assert torch.equal(fast(ids, [[1, 1, 1, 1]]).logits, fast(ids).logits)
