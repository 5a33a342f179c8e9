# SPDX-License-Identifier: Apache-2.0
"""Cache policies, one a file: which part of a forward is computed anew in a step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...config import DecodingConfig
from ..layout import Layout
from ..row_programs import RowPrograms, StepInputs
from ..state import CanvasState
from .lacache import LaCache
from .uncached import Uncached

__all__ = ["CachePolicy", "cache_policy"]


class CachePolicy(Protocol):
    """How a step's forward is computed.

    Attributes:
        looks_every_step: the policy reads a flag on the host in each step, to choose between two programs.
    """

    looks_every_step: bool

    def begin(self, layout: Layout) -> None:
        """Start on a new layout: nothing computed before is valid any more."""
        ...

    def step(self, inputs: StepInputs, layout: Layout, state: CanvasState) -> tuple[Tensor, Tensor]:
        """One forward: (token (W,) int64, confidence (W,) fp32) of the wanted rows."""
        ...


def cache_policy(config: DecodingConfig, programs: RowPrograms) -> CachePolicy:
    """The policy a decoding configuration names."""
    if config.cache == "lacache":
        return LaCache(programs, config)
    return Uncached(programs)
