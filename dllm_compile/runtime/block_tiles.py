# SPDX-License-Identifier: Apache-2.0
"""Tiles that end where a block begins and ends, so that each lies wholly inside or wholly outside of it."""

from __future__ import annotations

import torch
from torch import Tensor


def block_tile_table(start: Tensor, length: Tensor, block: Tensor, tile_rows: int | None, longest: int) -> Tensor:
    """Cut every sample into tiles before, inside and behind its block. Tensor operations only.

    Args:
        start: (S,) int64, first row of each sample.
        length: (S,) int64, rows of each sample.
        block: (S, 2) int64, first and end row of the block of each sample.
        tile_rows: most query rows of a tile; None leaves each of the three parts whole.
        longest: at least the largest length (on the host: it decides the table's size).

    Returns:
        (S * n, 6) int32 [q_begin, q_end, k_begin, k_end, c_begin, c_end); n = ceil(longest / tile_rows) + 2. Tiles a
        sample does not need have no rows.
    """
    step = longest if tile_rows is None else tile_rows
    per_sample = -(-longest // step) + 2
    end = start + length
    edges = torch.stack((start, block[:, 0], block[:, 1], end), dim=1)
    tiles_of_part = (edges[:, 1:] - edges[:, :-1] + step - 1).div(step, rounding_mode="floor")
    last_of_part = tiles_of_part.cumsum(1)
    tile = torch.arange(per_sample, device=start.device).expand(len(start), -1)
    part = (tile[..., None] >= last_of_part[:, None]).sum(-1)
    exists = part < 3
    part = part.clamp(max=2)
    within = tile - (last_of_part - tiles_of_part).gather(1, part)
    begin = edges.gather(1, part) + within * step
    finish = torch.minimum(begin + step, edges.gather(1, part + 1))
    begin, finish = (torch.where(exists, x, end[:, None]) for x in (begin, finish))
    rest = torch.stack((start, end, block[:, 0], block[:, 1]), dim=1)[:, None].expand(-1, per_sample, -1)
    return torch.cat((torch.stack((begin, finish), dim=-1), rest), dim=-1).flatten(0, 1).to(torch.int32)


def block_rows(plan: Tensor, block: Tensor) -> Tensor:
    """Rows of the current block of each sample.

    Args:
        plan: (S, n, w) int64, rows of each block, padded with -1.
        block: (S,) int64, current block.

    Returns:
        (S, w) int64; padding repeats the block's first row, so that what is computed does not depend on how wide the
        blocks of other samples are.
    """
    rows = plan.gather(1, block[:, None, None].expand(-1, 1, plan.shape[-1])).squeeze(1)
    return torch.where(rows >= 0, rows, rows[:, :1])


def block_edges(rows: Tensor) -> Tensor:
    """First and end row (S, 2) of blocks (S, w). Rows of an infill block may have gaps: the edges enclose them."""
    return torch.stack((rows.amin(1), rows.amax(1) + 1), dim=1)
