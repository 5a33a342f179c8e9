# SPDX-License-Identifier: Apache-2.0
"""Sizes 0 and 1, for which a compiled program of dynamic sizes is never valid, are padded to 2 at the door.

Tensor operations only, so that a step reads nothing on the host. What is added changes no result and no cache: entries
of tables that do nothing, and a copy of the only row, which computes and writes once more what that row does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# A number for each row of the step, or for each of some of its rows.
_VECTORS = frozenset({"ids", "positions", "cache_rows", "wanted", "seeds", "unconditional", "block_rows", "given"})


def at_least_two(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a program by name, with every dynamic dimension of size 2 or more.

    Raises:
        ValueError: a buffer that is written in place has fewer than two rows. A padded copy would lose what is written.
    """
    rows = inputs["ids"].shape[0]
    return {name: _padded(name, value, rows) for name, value in inputs.items()}


def _padded(name: str, value: Tensor, rows: int) -> Tensor:
    if name == "tiles" and rows == 1:
        # The second row is a copy of the first and sees the same keys: what both write to a cache is the same.
        return torch.cat((value, torch.cat((value[:, :2] + 1, value[:, 2:]), dim=1)))
    if name == "window":
        return F.pad(value, (0, max(2 - value.shape[1], 0), 0, max(2 - value.shape[0], 0)), value=-1)
    if value.dim() == 0 or value.shape[0] > 1:
        return value
    missing = 2 - value.shape[0]
    if name in ("tiles", "block_tiles"):
        return F.pad(value, (0, 0, 0, missing), value=rows)  # [rows, rows): no query row
    if name == "spans":
        return F.pad(value, (0, 0, 0, missing))  # [0, 0): no key
    if name == "banned":
        return F.pad(value, (0, missing), value=-1)
    if name in _VECTORS:
        return value.repeat(2) if value.shape[0] else value.new_zeros(2)
    raise ValueError(f"{name} has {value.shape[0]} rows and is written in place: allocate two or more")
