# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: right bits, right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from dllm_compile.kernels import counter_rng


def plain_mix(value: int) -> int:
    """The mixing function on Python's integers."""
    value &= 0xFFFFFFFF
    value = (value ^ (value >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return value ^ (value >> 16)


def test_mix_and_combine_equal_python_integers():
    values = [0, 1, 2, 126335, 2**31 - 1, 2**31, 2**32 - 1, 2**40 + 7, -1, -(2**63)]
    assert counter_rng.mix(torch.tensor(values)).tolist() == [plain_mix(v) for v in values]
    for seed in values:
        expected = [plain_mix((seed & 0xFFFFFFFF) ^ plain_mix(v + 0x9E3779B9)) for v in range(50)]
        assert counter_rng.combine(torch.tensor(seed), torch.arange(50)).tolist() == expected


def test_mix_is_a_bijection_on_a_sample():
    assert counter_rng.mix(torch.arange(1 << 16)).unique().numel() == 1 << 16


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_extreme_bits_stay_inside_the_open_interval(bits, monkeypatch):
    monkeypatch.setattr(counter_rng, "combine", lambda seed, index: torch.tensor([bits]))
    u = counter_rng.uniform(torch.tensor(0), 0)
    assert u.dtype == torch.float32
    assert 0.0 < u.item() < 1.0
    noise = counter_rng.gumbel(torch.tensor(0), 0).item()
    assert math.isfinite(noise)
    assert -2.9 < noise < 16.7


@pytest.mark.parametrize("seed", [0, 1, 123456789])
@pytest.mark.parametrize("along", ["index", "seed"])
def test_uniform_by_chi_square(seed, along):
    count, cells = 200_000, 256
    if along == "index":
        u = counter_rng.uniform(torch.tensor(seed), torch.arange(count))
    else:
        u = counter_rng.uniform(seed * count + torch.arange(count), 17)
    observed = torch.bincount((u * cells).long(), minlength=cells).double()
    chi_square = ((observed - count / cells) ** 2 / (count / cells)).sum().item()
    # 255 degrees of freedom: mean 255, deviation sqrt(510) = 22.6; both tails, since too even is wrong as well.
    assert abs(chi_square - 255) < 4.5 * 22.6


def test_neighbouring_seeds_and_indices_are_uncorrelated():
    u = counter_rng.uniform(torch.arange(400).unsqueeze(1), torch.arange(500)).double() - 0.5
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        correlation = (a * b).mean().item() * 12
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())


def test_gumbel_moments():
    noise = counter_rng.gumbel(torch.arange(300).unsqueeze(1), torch.arange(1000)).double()
    assert torch.isfinite(noise).all()
    deviation = math.pi / math.sqrt(6)
    assert abs(noise.mean().item() - 0.5772156649) < 4.5 * deviation / math.sqrt(noise.numel())
    assert noise.var().item() == pytest.approx(deviation**2, rel=0.02)
