# SPDX-License-Identifier: Apache-2.0
"""DPad (arXiv 2508.14148): masks behind the block are dropped more often the farther they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import counter_rng
from ..layout import Layout
from ..state import CanvasState

# Index of the draw: Gumbel noise uses [0, vocab_size) and random remasking 2**32 - 1.
_STREAM = 2**32 - 2


@dataclass(frozen=True)
class GaussianDecay:
    """Keep a mask at distance t behind the block's end with a probability that falls like a Gaussian.

    P(keep t) = min(1, scale * phi(k_sigma * t / (window - 1))) for t < window, 0 beyond; phi is the standard normal
    density. Draws are independent, and a function of the sample's seed, the block and the position alone.

    Attributes:
        k_sigma: where the end of the window falls on the density.
        scale: multiplies the density.
        window: W.
        seed: 32 bits; sample i draws with seed + i.
    """

    k_sigma: float
    scale: float
    window: int
    seed: int

    def probability(self, distance: Tensor) -> Tensor:
        """P(keep t), fp32, for distances t >= 0 (int64, any shape)."""
        z = distance.to(torch.float32) * (self.k_sigma / max(self.window - 1, 1))
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return torch.where(distance < self.window, (self.scale * density).clamp(max=1.0), 0.0)

    def __call__(self, layout: Layout, state: CanvasState, distance: Tensor) -> Tensor:
        """See `SuffixRule`."""
        of_block = counter_rng.combine(layout.index + self.seed, state.block)
        seeds = counter_rng.combine(of_block[layout.sample_of_row], layout.positions)
        return counter_rng.uniform(seeds, _STREAM) < self.probability(distance)
