# SPDX-License-Identifier: Apache-2.0
"""Scales of groups of 128, for the Triton kernels that quantize; imported only where Triton is."""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dllm_compile.kernels.fp8_format import GROUP, LARGEST, SMALLEST_SCALE

GROUP_SIZE = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def scale_groups(values):
    """Scales of fp32 groups, and the values as they are before the cast to FP8.

    Args:
        values: [G, 128] fp32.

    Returns:
        scaled [G, 128] fp32 within ±448, or NaN; scales [G] fp32.
    """
    # Magnitudes compare as integers as they do as numbers, and NaN is the largest of all: it cannot be overlooked.
    bits = values.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST_SCALE, propagate_nan=_ALL)
    scale = tl.where(largest == 0, 1.0, scale)
    # One division a group instead of one a value: the product with the reciprocal, corrected by its remainder, is the
    # rounded quotient. An infinite scale makes the remainder, and so the whole group, NaN.
    inverse = tl.div_rn(1.0, scale)
    quotient = values * inverse[:, None]
    remainder = tl.fma(-quotient, scale[:, None], values)
    quotient = tl.fma(remainder, inverse[:, None], quotient)
    return tl.clamp(quotient, -_LARGEST, _LARGEST, propagate_nan=_ALL), scale
