# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: a number is a pure function of (seed, index), equal on every device.

Sampling noise must not depend on the batch layout, on the number of rows computed or on the device, so it
cannot come from a generator that is advanced. 32-bit avalanche mixing (xor-shift-multiply, the constants of
C. Wellons' "lowbias32") is enough for sampling and is two multiplies a mix in a Triton kernel.

The torch functions work in int64 and mask, because torch has no full set of uint32 operations; the Triton functions
work in uint32. Both give the same bits; the two logarithms of `gumbel` may differ in their last places.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton

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
    """Standard Gumbel noise, fp32: `-log(-log u)`, between -2.9 and 16.7.

    `z + T * gumbel` has the order of `exp(z) / (-log u)**T` (the form of the LLaDA lineage) without exponentiating
    raw logits.
    """
    return -torch.log(-torch.log(uniform(seed, index)))


if has_triton():
    import triton
    import triton.language as tl

    @triton.jit
    def mix_bits(value):
        """`mix` of a uint32 block."""
        value = value ^ (value >> 16)
        value = value * tl.full((), 0x7FEB352D, tl.uint32)
        value = value ^ (value >> 15)
        value = value * tl.full((), 0x846CA68B, tl.uint32)
        return value ^ (value >> 16)

    @triton.jit
    def combine_bits(seed, value):
        """`combine` of integer blocks that broadcast, their low 32 bits; uint32."""
        offset = value.to(tl.uint32) + tl.full((), 0x9E3779B9, tl.uint32)
        return mix_bits(seed.to(tl.uint32) ^ mix_bits(offset))

    @triton.jit
    def gumbel_noise(seed, value):
        """`gumbel` of integer blocks that broadcast; fp32."""
        bits = combine_bits(seed, value) >> 9
        uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
        return -tl.log(-tl.log(uniform))
