# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM: every token that is confident enough (arXiv 2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Ranking


@dataclass(frozen=True)
class ThresholdRule:
    """Commit every candidate with confidence >= `threshold`, and always the most confident one."""

    threshold: float

    def __call__(self, confidence: Tensor, valid: Tensor, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """See `CommitRule`."""
        ranking = Ranking.of(confidence, valid)
        return ranking.take(ranking.confidence >= self.threshold)
