# SPDX-License-Identifier: Apache-2.0
"""The contract of a commit rule, and the ranking that every rule is built on.

A rule picks which proposed tokens are kept in this step. Whatever it computes:

1. it takes only valid candidates, and at least one in each row that has any (so decoding always ends);
2. what it takes in a row depends on that row alone;
3. it is made of tensor operations with static shapes, without a host read;
4. of equal confidences the lower position goes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CommitRule(Protocol):
    """Picks the tokens to keep."""

    def __call__(self, confidence: Tensor, valid: Tensor, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """Choose among the candidates of each sample's current block.

        Args:
            confidence: (S, w) fp32, candidates in ascending order of position.
            valid: (S, w) bool, candidates that may be taken (masked, in the block, before the sample's end).
            masks_at_start: (S,) int64, masks in the block when it was begun.
            step_in_block: (S,) int64, steps made in this block so far.

        Returns:
            take (S, w) bool.
        """
        ...


@dataclass(frozen=True)
class Ranking:
    """Candidates of each row from the most to the least confident.

    Attributes:
        order: (S, w) int64, column of the candidate at each rank.
        confidence: (S, w) fp32, confidence at each rank; -inf at ranks past the valid candidates.
        valid: (S, w) bool, as given, by column.
    """

    order: Tensor
    confidence: Tensor
    valid: Tensor

    @classmethod
    def of(cls, confidence: Tensor, valid: Tensor) -> Ranking:
        """Sort descending; invalid candidates come last, ties keep their order of position."""
        known = torch.where(valid, confidence, -torch.inf)
        ranked, order = torch.sort(known, dim=-1, descending=True, stable=True)
        return cls(order=order, confidence=ranked, valid=valid)

    @property
    def ranks(self) -> Tensor:
        """(w,) int64: 0 for the most confident."""
        return torch.arange(self.order.shape[-1], device=self.order.device)

    def take(self, accepted: Tensor) -> Tensor:
        """From `accepted` (S, w) by rank to `take` (S, w) by column. Rank 0 is always accepted."""
        accepted = accepted | (self.ranks == 0)
        return torch.zeros_like(self.valid).scatter(-1, self.order, accepted) & self.valid


def prefix(passes: Tensor) -> Tensor:
    """(S, w) bool: true up to the first rank that does not pass (a cumulative AND)."""
    return torch.cumsum(~passes, dim=-1) == 0
