# SPDX-License-Identifier: Apache-2.0
"""The rows of each sample by score. Tensor operations only."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import Layout


def order_by_score(layout: Layout, band: Tensor, scores: Tensor) -> Tensor:
    """(R,) int64: the canvas rows by sample, then by band and then by score, ascending.

    Of equal scores the later row comes last, and NaN is above any number.

    Args:
        layout: where the rows lie.
        band: (R,) int64, 0 to 3.
        scores: (K,) fp32 by cache row.
    """
    of_row = layout.sample_of_row
    score = scores[layout.base[of_row] + layout.positions]
    # One sort for all three: 32 bits that are ordered as integers like the numbers they stand for.
    bits = torch.where(score == 0, 0, score.view(torch.int32))  # -0.0 is no less than 0.0
    ordered = torch.where(score.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & (2**31 - 1)))
    return torch.sort((of_row * 4 + band) * 2**32 + ordered, stable=True).indices


def rank_from_end(layout: Layout, order: Tensor) -> Tensor:
    """(R,) int64: rank of each row in its sample, 1 for the last one in `order` (R,), which keeps samples together."""
    # Samples have as many rows in it as they have: the end of a sample's part is the end of its rows.
    ends = (layout.start + layout.lengths)[layout.sample_of_row]
    rank = torch.empty_like(order)
    rank[order] = ends - torch.arange(layout.rows, device=order.device)
    return rank
