# SPDX-License-Identifier: Apache-2.0
"""From a flag on each row of the canvas to the rows of one forward and their tiles. Tensor operations only.

How many rows are flagged is known on the device alone. The host gives a bound, which decides the shapes: what is left
over is padding, which sees no key and whose results nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.upper_bound import upper_bound


@dataclass(frozen=True)
class PickedRows:
    """The rows of one forward, those of a sample next to each other and in order of position.

    Attributes:
        rows: (n,) int64, canvas row of each row of the forward; padding names row 0.
        real: (n,) bool, false for padding, which comes last.
        place: (R,) int64, row of the forward of each canvas row; 0 for rows that are not in it.
        counts: (S,) int64, rows of each sample.
        starts: (S,) int64, first row of each sample in the forward.
    """

    rows: Tensor
    real: Tensor
    place: Tensor
    counts: Tensor
    starts: Tensor


def pick_rows(chosen: Tensor, start: Tensor, length: Tensor, size: int) -> PickedRows:
    """Bring the chosen rows of the canvas together.

    Args:
        chosen: (R,) bool.
        start: (S,) int64, first row of each sample.
        length: (S,) int64, rows of each sample.
        size: n, at least as many as are chosen.
    """
    running = counted(chosen)
    place = torch.arange(size, device=chosen.device)
    real = place < running[-1]
    starts = running[start]
    return PickedRows(
        rows=torch.where(real, upper_bound(running[1:], place), 0),
        real=real,
        place=torch.where(chosen, running[:-1], 0),
        counts=running[start + length] - starts,
        starts=starts,
    )


def counted(flags: Tensor) -> Tensor:
    """(R + 1,) int64: how many flags (R,) are set in front of each row, and in all."""
    return F.pad(flags, (1, 0)).cumsum(0)


def tiles_of(picked: PickedRows, key_begin: Tensor, key_end: Tensor, tile_rows: int | None) -> Tensor:
    """(t, 4) int32 [q_begin, q_end, k_begin, k_end): the rows of a sample see the sample's keys, padding sees none.

    Args:
        picked: the rows of the forward; only those of the first S samples may be among them.
        key_begin: (S,) int64, first key row of each sample.
        key_end: (S,) int64.
        tile_rows: most query rows of a tile; None gives one tile a sample.

    Returns:
        t = n // tile_rows + S + 1 tiles, whatever the counts; those that are not needed have no rows.
    """
    size, samples = len(picked.rows), len(key_begin)
    counts, total = picked.counts[:samples], picked.counts.sum()[None]
    step = max(size, 1) if tile_rows is None else tile_rows
    begin = torch.cat((picked.starts[:samples], total))
    count = torch.cat((counts, size - total))
    keys = torch.stack((torch.cat((key_begin, key_begin.new_zeros(1))), torch.cat((key_end, key_end.new_zeros(1)))), 1)
    of_part = (count + step - 1).div(step, rounding_mode="floor")
    last = of_part.cumsum(0)
    tile = torch.arange(size // step + samples + 1, device=begin.device)
    part = (tile[:, None] >= last).sum(-1)
    exists = (part <= samples)[:, None]
    part = part.clamp(max=samples)
    first = begin[part] + (tile - (last - of_part)[part]) * step
    end = torch.minimum(first + step, (begin + count)[part])
    rows = torch.stack((first, end), 1)
    return torch.cat((torch.where(exists, rows, size), torch.where(exists, keys[part], 0)), 1).to(torch.int32)


def rank_in_sample(flags: Tensor, start: Tensor, sample_of_row: Tensor) -> Tensor:
    """(R,) int64: how many rows of the same sample in front of each row have the flag.

    Args:
        flags: (R,) bool.
        start: (S,) int64, first row of each sample.
        sample_of_row: (R,) int64.
    """
    running = counted(flags)
    return running[:-1] - running[start][sample_of_row]
