# SPDX-License-Identifier: Apache-2.0
"""Sliding window: the nearest masks behind the block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..layout import Layout
from ..state import CanvasState


@dataclass(frozen=True)
class NearestMasks:
    """Keep the positions at distances 0 to `window` - 1 behind the block's end."""

    window: int

    def __call__(self, layout: Layout, state: CanvasState, distance: Tensor) -> Tensor:
        """See `SuffixRule`."""
        return distance < self.window
