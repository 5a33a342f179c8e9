# SPDX-License-Identifier: Apache-2.0
"""FP8 on the bundled model: what each granularity leaves of products and logits; weights that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

import dllm_compile
from dllm_compile.errors import DllmCompileError, UnsupportedModelError
from dllm_compile.models.small.problem import held_out
from tests.passes.fp8_pieces import wide_model
from tests.real import model_logits
from tests.reference.fp8 import Fp8Rows

pytest.importorskip("torchao")


GRANULARITIES = pytest.mark.parametrize("granularity", ["group", "row", "tensor"])


def quantized(granularity: str, **options) -> dllm_compile.OptimizedModel:
    model = dllm_compile.models.load_small()
    return dllm_compile.optimize(model, precision="fp8", fp8_granularity=granularity, compile=False, **options)


@GRANULARITIES
def test_what_is_left_of_products_and_logits(granularity):
    """Each product keeps 26 dB or more of random ids' activations, the logits more than 30."""
    report = quantized(granularity).report()
    assert report.fp8.weights == 2 * 7
    (result,) = (one for one in report.passes if one.name == "quantize_ffn_fp8")
    sqnr = [region.sqnr for region in result.regions]
    assert len(sqnr) == report.fp8.weights
    assert 26 < min(sqnr) == report.fp8.worst_sqnr < 31
    assert math.isclose(sum(sqnr) / len(sqnr), report.fp8.mean_sqnr)
    assert report.fp8.logits_sqnr > 30


@GRANULARITIES
@pytest.mark.parametrize("last", [1, pytest.param(4, marks=pytest.mark.long)])
def test_logits_of_a_problem_are_those_of_the_definition(small_model, small_tokenizer, last, granularity):
    """To rounding with one layer. With more, a code on the other side of a tie turns others, and they spread."""
    skip = tuple(layer for layer in range(8) if not 1 <= layer <= last)
    fast, reference = quantized(granularity, fp8_skip_layers=skip), Fp8Rows(small_model, granularity, skip)
    ids = torch.tensor(small_tokenizer(held_out("arithmetic", 1)[0].prompt)["input_ids"])[None]
    exact, expected, actual = model_logits(small_model, ids), reference.forward(ids), fast(ids).logits
    cost = ((expected - exact).norm() / exact.norm()).item()
    assert 5e-4 < cost < 0.01
    assert (actual - expected).norm() / expected.norm() < (cost / 500 if last == 1 else cost / 10)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_weights_that_are_not_finite_are_said(value):
    """By `optimize`, and where they come by an update, by the loop: NaN is never cut off to the largest code."""
    model = wide_model()
    fast = dllm_compile.optimize(wide_model(), precision="fp8", compile=False)
    for one in (model, fast.model):
        with torch.no_grad():
            one.model.transformer["blocks"][1].ff_out.weight[3, 5] = value
    with pytest.raises(UnsupportedModelError, match="not finite: check the weights"):
        dllm_compile.optimize(model, precision="fp8", compile=False)
    fast.refresh_weights()
    with pytest.raises(DllmCompileError, match="no finite number"):
        fast.generate([[3, 4]], max_new_tokens=4, block_length=4)
