# SPDX-License-Identifier: Apache-2.0
"""Inputs of a forward over some rows of the canvas. Tensor operations only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout
from ..row_programs import StepInputs
from ..rows import PickedRows
from ..state import CanvasState
from .base import Request


@dataclass(frozen=True)
class RowPlan:
    """What `StepInputs` needs besides the request, for n rows, or 2n with guidance: the rows, then the same blind.

    Attributes:
        ids, positions, tiles, wanted, unconditional: as in `StepInputs`.
    """

    ids: Tensor
    positions: Tensor
    tiles: Tensor
    wanted: Tensor
    unconditional: Tensor | None

    def inputs(self, request: Request) -> StepInputs:
        """The forward."""
        return request.inputs(self.ids, self.positions, self.tiles, self.wanted, self.unconditional)


def row_plan(request: Request, layout: Layout, state: CanvasState, picked: PickedRows, tiles: Tensor) -> RowPlan:
    """Gather what stands in the picked rows.

    Args:
        request, layout, state: as in `CachePolicy.step`.
        picked: the rows of the forward.
        tiles: of both halves.
    """
    rows, wanted = picked.rows, picked.place[request.rows]
    ids, positions = state.tokens[rows], layout.positions[rows]
    if not layout.guided:
        return RowPlan(ids, positions, tiles, wanted, None)
    blind = torch.where(layout.given[rows], request.mask_token_id, ids)
    both = torch.cat((ids, blind)), torch.cat((positions, positions))
    return RowPlan(*both, tiles, wanted, wanted + rows.shape[0])
