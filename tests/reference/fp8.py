# SPDX-License-Identifier: Apache-2.0
"""FP8 linear layers from their definition: every finite E4M3 number in a table, the nearest one looked up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .llada_rows import LladaRows

LARGEST = 448.0


def _magnitudes() -> Tensor:
    """All magnitudes of E4M3 in the order of their codes: 4 exponent bits (bias 7), 3 mantissa bits, no infinity."""
    found = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    found += [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return torch.tensor(found[:-1], dtype=torch.float64)  # the last code means NaN


MAGNITUDES = _magnitudes()


def nearest(x: Tensor) -> Tensor:
    """The nearest E4M3 number, of two the one with the even code; what is larger than 448 becomes 448."""
    size = x.double().abs().clamp(max=LARGEST)
    above = torch.searchsorted(MAGNITUDES, size).clamp(1, len(MAGNITUDES) - 1)
    low, high = size - MAGNITUDES[above - 1], MAGNITUDES[above] - size
    code = torch.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return torch.copysign(MAGNITUDES[code].float(), x.float())


def rounded(x: Tensor) -> Tensor:
    """Values of one group after quantization: one scale, amax / 448 in fp32, 1 for a group of zeros."""
    amax = x.float().abs().max()
    scale = torch.ones(()) if amax == 0 else amax / LARGEST
    return nearest(x.float() / scale) * scale


def rounded_rows(x: Tensor, granularity: str) -> Tensor:
    """Activations [M, K] after quantization."""
    if granularity == "tensor":
        return rounded(x)
    width = 128 if granularity == "group" else x.shape[1]
    return torch.stack([torch.cat([rounded(group) for group in row.split(width)]) for row in x])


def rounded_weight(weight: Tensor, granularity: str) -> Tensor:
    """A weight [N, K] after quantization."""
    if granularity == "tensor":
        return rounded(weight)
    if granularity == "row":
        return torch.stack([rounded(row) for row in weight])
    return torch.cat([torch.cat([rounded(b) for b in band.split(128, 1)], 1) for band in weight.split(128)])


class Fp8Rows(LladaRows):
    """LLaDA's rows with FP8 linear layers in all layers but `skip`."""

    def __init__(
        self, model: Any, granularity: str = "group", skip: Iterable[int] = (0,), linears: str = "ffn"
    ) -> None:
        super().__init__(model)
        self.granularity = granularity
        parts = ("ff_proj", "up_proj", "ff_out")
        if linears == "all":
            parts = (*parts, "q_proj", "k_proj", "v_proj", "attn_out")
        names = [f"model.transformer.blocks.{layer}" for layer in range(self.layers) if layer not in set(skip)]
        self.rounded: dict[str, Tensor] = {}
        for name in names:
            for packed in (("ff_proj", "up_proj"), ("ff_out",), ("q_proj", "k_proj", "v_proj"), ("attn_out",)):
                paths = [f"{name}.{part}.weight" for part in packed if part in parts]
                if paths:
                    # Weights that are packed are one tensor: with a scale for the tensor they share it.
                    sources = [self.weights[path] for path in paths]
                    whole = rounded_weight(torch.cat(sources), granularity)
                    self.rounded |= zip(paths, whole.split([len(source) for source in sources]), strict=True)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LladaRows.linear`; products and sums of rounded values in fp32."""
        if name not in self.rounded:
            return super().linear(x, name)
        return (rounded_rows(x, self.granularity) @ self.rounded[name].T).to(x.dtype)
