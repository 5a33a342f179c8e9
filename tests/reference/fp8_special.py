# SPDX-License-Identifier: Apache-2.0
"""What FP8 operators make of zeros, NaN and infinities, number by number from the rule.

A group of zeros stays zeros; a group with a number that is not finite becomes NaN throughout; every sum with a NaN in
it is NaN. Nothing is imported from the package.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 448.0
_CODES = sorted(
    sign * size
    for sign in (1, -1)
    for size in (*(m / 512 for m in range(8)), *((1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)))
    if size <= LARGEST
)


def groups_of(rows: int, width: int, group: int) -> list[list[tuple[int, int]]]:
    """The places that share a scale: 128 columns of a row, a row (0), everything (-1)."""
    places = [[(i, j) for j in range(width)] for i in range(rows)]
    if group == 128:
        return [row[first : first + 128] for row in places for first in range(0, width, 128)]
    return places if group == 0 else [[place for row in places for place in row]]


def quantized(x: Tensor, group: int) -> Tensor:
    """Values (fp64) of rows [M, K] after quantization; ties may fall on either side."""
    result = torch.full(x.shape, math.nan, dtype=torch.float64)
    for places in groups_of(*x.shape, group):
        numbers = [float(x[place]) for place in places]
        if not all(map(math.isfinite, numbers)):
            continue
        scale = max(map(abs, numbers)) / LARGEST or 1.0
        for place, number in zip(places, numbers, strict=True):
            result[place] = min(_CODES, key=lambda code: abs(code - number / scale)) * scale
    return result


def normed(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows, times the weight; fp64."""
    result = torch.zeros(total.shape, dtype=torch.float64)
    for i, row in enumerate(total.double().tolist()):
        mean = sum(number * number for number in row) / len(row)
        factor = 1 / math.sqrt(mean + eps) if math.isfinite(mean) else 0.0 if mean == math.inf else math.nan
        for j, number in enumerate(row):
            result[i, j] = number * factor * float(weight[j])
    return result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; fp64."""
    result = torch.zeros(gate.shape, dtype=torch.float64)
    for place in ((i, j) for i in range(gate.shape[0]) for j in range(gate.shape[1])):
        g = float(gate[place])
        # At minus infinity the quotient is -inf / inf.
        silu = g / (1 + math.exp(-g)) if abs(g) < 700 else g if g > 0 else math.nan
        result[place] = silu * float(up[place])
    return result


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, term by term; fp64."""
    return torch.stack([(row * weight.double()).sum(1) for row in x.double()])
