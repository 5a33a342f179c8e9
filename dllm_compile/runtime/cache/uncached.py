# SPDX-License-Identifier: Apache-2.0
"""No cache: every step computes every row."""

from __future__ import annotations

from torch import Tensor

from ..layout import Layout
from ..row_programs import RowPrograms, StepInputs
from ..state import CanvasState


class Uncached:
    """The plain loop."""

    looks_every_step = False

    def __init__(self, programs: RowPrograms) -> None:
        self._programs = programs

    def begin(self, layout: Layout) -> None:
        """Nothing to prepare."""

    def step(self, inputs: StepInputs, layout: Layout, state: CanvasState) -> tuple[Tensor, Tensor]:
        """One forward over all rows."""
        return self._programs.step(inputs)
