# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM: every token that is confident enough (arXiv 2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ThresholdRule:
    """Commit every candidate with confidence >= `threshold`, and always the most confident one."""

    threshold: float

    def __call__(self, confidence: Tensor, valid: Tensor, masks_at_start: Tensor, step_in_block: Tensor) -> Tensor:
        """See `CommitRule`."""
        # Of equal maxima `argmax` names the first. Where nothing is valid, what it names is not valid either.
        best = torch.where(valid, confidence, -torch.inf).argmax(-1, keepdim=True)
        first = torch.arange(valid.shape[-1], device=valid.device) == best
        return valid & ((confidence >= self.threshold) | first)
