# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM: as many ranks as their confidences allow together (arXiv 2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Ranking, prefix


@dataclass(frozen=True)
class FactorRule:
    """Commit ranks k = 1, 2, ... while c_(k) >= 1 - f / (k + 1); rank 1 always; stop at the first failure.

    Attributes:
        factor: f > 0.
        released: follow the released loop in one more point. It steps past the last rank whatever the reason it
            stopped there, so when the *only* failing rank is the very last, that one is committed as well.
    """

    factor: float
    released: bool = False

    def __call__(self, confidence: Tensor, valid: Tensor, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """See `CommitRule`."""
        ranking = Ranking.of(confidence, valid)
        # Bars in fp64, rounded once: c and its bar then agree where they are equal on paper.
        bars = (1 - self.factor / (ranking.ranks.double() + 2)).to(confidence.dtype)
        accepted = prefix((ranking.confidence >= bars) | (ranking.ranks == 0))
        if self.released:
            candidates = valid.sum(-1, keepdim=True)
            taken = torch.minimum(accepted.sum(-1, keepdim=True), candidates)
            accepted = accepted | (taken == candidates - 1)
        return ranking.take(accepted)
