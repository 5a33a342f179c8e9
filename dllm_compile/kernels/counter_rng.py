# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: a number is a pure function of (seed, index), equal on every device.

Sampling noise must not depend on the batch layout, on the number of rows computed or on the device, so it
cannot come from a generator that is advanced. 32-bit avalanche mixing (xor-shift-multiply, the constants of
C. Wellons' "lowbias32") is enough for sampling and is three multiplies in a Triton kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def mix(value: Tensor) -> Tensor:
    """Avalanche mix of the low 32 bits. int64 in, int64 in [0, 2**32) out (products wrap, as in uint32)."""
    value = value & _MASK
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _MASK
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def combine(seed: Tensor, value: Tensor | int) -> Tensor:
    """Derive a new seed from `seed` and `value` (broadcast). int64 in [0, 2**32)."""
    index = torch.as_tensor(value, dtype=torch.int64, device=seed.device)
    return mix((seed & _MASK) ^ mix(index + _GOLDEN))


def uniform(seed: Tensor, index: Tensor | int) -> Tensor:
    """Uniform fp32 in (0, 1), both ends excluded: 23 bits of `combine(seed, index)`, centred.

    23 and not 24, so that the largest value plus one half is still exact in fp32 and never rounds to 1.
    """
    bits = combine(seed, index) >> 9
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def gumbel(seed: Tensor, index: Tensor | int) -> Tensor:
    """Standard Gumbel noise, fp32: `-log(-log u)`. `z + T * gumbel` has the order of `exp(z) / (-log u)**T`
    (the form of the LLaDA lineage) without exponentiating raw logits."""
    return -torch.log(-torch.log(uniform(seed, index)))
