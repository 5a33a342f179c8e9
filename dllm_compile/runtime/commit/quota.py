# SPDX-License-Identifier: Apache-2.0
"""Vanilla LLaDA: a fixed number of tokens in each step (arXiv 2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Ranking


@dataclass(frozen=True)
class QuotaRule:
    """Commit the u_i most confident candidates in step i of a block with n masks at its start.

    u_i = floor(n / S) + (1 if i < n mod S else 0), which sums to n over the S steps. Where S > n the quota becomes
    zero after n steps; the block is finished by then, so such steps are never run.

    Attributes:
        steps_per_block: S; None means one token a step (S = n).
    """

    steps_per_block: int | None = None

    def __call__(self, confidence: Tensor, valid: Tensor, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """See `CommitRule`."""
        ranking = Ranking.of(confidence, valid)
        return ranking.take(ranking.ranks < self.quota(masks_at_start, step_in_block)[:, None])

    def quota(self, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """(S,) int64: u_i."""
        if self.steps_per_block is None:
            return torch.ones_like(masks_at_start)
        whole = masks_at_start // self.steps_per_block
        return whole + (step_in_block < masks_at_start % self.steps_per_block)
