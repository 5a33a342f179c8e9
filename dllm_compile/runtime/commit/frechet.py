# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM++: as many ranks as Fréchet's bounds on their joint probability allow (arXiv 2606.02955)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.running_sum import running_sum
from .base import Ranking, prefix


@dataclass(frozen=True)
class FrechetRule:
    """Commit the largest k with L_k - U_k > `margin`; rank 1 always.

    L_k = sum_{j<=k} c_(j) - (k - 1) bounds the probability that all k tokens are right from below,
    U_k = 1 - c_(k) bounds any competing event from above. The score never increases with k.
    """

    margin: float

    def __call__(self, confidence: Tensor, valid: Tensor, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """See `CommitRule`."""
        ranking = Ranking.of(confidence, valid)
        return ranking.take(prefix(frechet_score(ranking.confidence) > self.margin))


def frechet_score(confidence: Tensor) -> Tensor:
    """(S, w) fp32: L_k - U_k for confidences sorted descending.

    Written with the shortfalls 1 - c, of which L_k = 1 - sum_{j<=k} (1 - c_(j)): they are small where the score is
    near the margin, so their sum in fp32 loses nothing there, while a sum of confidences near k would.
    """
    shortfall = 1 - confidence
    return 1 - running_sum(shortfall) - shortfall
