# SPDX-License-Identifier: Apache-2.0
"""Whether a 16-bit norm is one of the values that correct fp32 arithmetic may give; no tolerance on the result."""

from __future__ import annotations

import torch
from torch import Tensor

NEAR_A_TIE = 2.0**-18
"""Relative error of the fp32 value before it is rounded: its sum of squares, the root and one product."""


def wrong_norms(total: Tensor, normed: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(M, C) bool: numbers that no rounding explains.

    The value before the weight is rounded to 16 bits: uniquely, unless it lies within `NEAR_A_TIE` of half way between
    two numbers, where both will do. Its product with the weight is exact in fp32 and rounded once, so that every
    rounding of the value gives one result.

    Args:
        total: (M, C) in 16 bit, what is normed.
        normed: (M, C), total's dtype, the result in question.
        weight: (C,), total's dtype.
        eps: added to the mean square.
    """
    wide = total.double()
    value = wide / (wide.square().mean(1, keepdim=True) + eps).sqrt()
    found = torch.zeros_like(normed, dtype=torch.bool)
    for side in (-1, 0, 1):
        rounded = (value * (1 + side * NEAR_A_TIE)).to(total.dtype)
        found |= (rounded.float() * weight.float()).to(total.dtype) == normed
    return ~found
