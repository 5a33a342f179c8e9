# SPDX-License-Identifier: Apache-2.0
"""The check of norms itself: what fp32 does passes whatever the order of its sum, and small faults do not."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.kernels.rms_norm import rms_norm_reference

from .norm_checks import wrong_norms

EPS = 1e-5


def inputs(dtype, rows=64, width=1024):
    generator = torch.Generator().manual_seed(0)
    total = (3 * torch.randn(rows, width, generator=generator)).to(dtype)
    return total, (1 + torch.randn(width, generator=generator) / 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_passes(dtype):
    total, weight = inputs(dtype)
    assert not wrong_norms(total, rms_norm_reference(total, weight, EPS), weight, EPS).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_order_of_the_sum_passes_and_turns_some_roundings(dtype):
    """A factor that is off by 2^-20 moves numbers near a tie, of which the products may be two steps apart."""
    total, weight = inputs(dtype, 512)
    wide = total.float()
    factor = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * (1 + 2**-20)
    normed = weight * (wide * factor).to(dtype)
    expected = rms_norm_reference(total, weight, EPS)
    assert (normed != expected).any()
    assert not wrong_norms(total, normed, weight, EPS).any()
    step = torch.finfo(dtype).eps
    relative = (normed.double() - expected.double()).abs() / expected.double().abs()
    assert step / 2 < relative[normed != expected].max() <= 2 * step


def test_a_turned_rounding_may_be_nearly_two_steps():
    """Every mantissa times every weight: why one bound for all of them, however argued, says too little."""
    mantissas = (1 + torch.arange(129) / 128).bfloat16()
    products = mantissas[:, None] * mantissas
    apart = (products[1:] - products[:-1]).double() / products[:-1].double()
    assert 1.5 * 2**-7 * 1.01 < apart.max() < 2 * 2**-7


@pytest.mark.parametrize("fault", ["epsilon", "one column left out", "weight before rounding", "one step", "shifted"])
def test_faults_are_seen(fault):
    total, weight = inputs(torch.bfloat16)
    normed = rms_norm_reference(total, weight, EPS).clone()
    wide = total.float()
    if fault == "epsilon":
        normed = rms_norm_reference(total, weight, 1e-3)
    elif fault == "one column left out":
        mean = wide[:, 1:].square().sum(1, keepdim=True) / wide.shape[1]
        normed = weight * (wide * torch.rsqrt(mean + EPS)).bfloat16()
    elif fault == "weight before rounding":
        factor = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
        normed = (wide * factor * weight.float()).bfloat16()
    elif fault == "one step":
        normed[3, 5] = torch.nextafter(normed[3, 5], normed.new_tensor(1e9))
    else:
        normed[:, 1:] = normed[:, :-1].clone()
    assert wrong_norms(total, normed, weight, EPS).any()
