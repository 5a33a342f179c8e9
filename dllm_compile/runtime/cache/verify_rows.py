# SPDX-License-Identifier: Apache-2.0
"""Rows of a verify pass (Flash-Verify): context, drafts and their masks of each sample. Tensor operations only.

Every sample has the same number of rows, [T context | S drafts | S masks] with padding behind a short context; S and T
are known on the device alone. A sample that has nothing to verify has padding only; a place for left over rows, which
never has a sample, has no rows at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout
from ..rows import counted


@dataclass(frozen=True)
class Drafts:
    """What a step's first forward leaves to check.

    Attributes:
        rows: (S, c) int64, canvas rows of the candidates in the order in which they are accepted.
        tokens: (S, c) int64, what was proposed there.
        real: (S, c) bool; those that are come first.
        committed: (R,) bool, tokens of the first forward.
        banned: as in `StepInputs`.
    """

    rows: Tensor
    tokens: Tensor
    real: Tensor
    committed: Tensor
    banned: Tensor


@dataclass(frozen=True)
class VerifyRows:
    """The rows of one pass, n = `Layout.seats` * size.

    Attributes:
        rows: (n,) int64, canvas row of each; padding names row 0.
        ids: (n,) int64, what stands there: a token, a draft, the mask.
        views: (n, 3) int32, see `kernels.verify_attention`; negative depth is padding.
        masks: (seats, c) int64, row of the pass with the mask of each candidate; any row of the sample for none.
        tiles: (seats, 4) int32.
    """

    rows: Tensor
    ids: Tensor
    views: Tensor
    masks: Tensor
    tiles: Tensor

    @property
    def real(self) -> Tensor:
        """(n,) bool, false for padding."""
        return self.views[:, 0] >= 0


def verify_rows(
    drafts: Drafts,
    order: Tensor,
    tokens: Tensor,
    layout: Layout,
    *,
    size: int,
    context: int | None,
    mask_token_id: int,
) -> VerifyRows:
    """Lay out a verify pass.

    Args:
        drafts: what is checked.
        order: (R,) int64, the canvas rows of each sample where the sample's rows lie: masks, then decoded rows, the one
            that is context first of all last.
        tokens: (R,) int64, the canvas with the first forward's commits.
        layout: where the rows lie.
        size: rows of each sample; at least commits of a step + 2 * candidates left, for any step.
        context: most context rows besides committed ones; None for as many as there is room.
        mask_token_id: id of a masked position.
    """
    seats, columns, device = layout.seats, drafts.rows.shape[1], tokens.device
    start, end = layout.start[:seats], (layout.start + layout.lengths)[:seats]
    candidate_rows, candidate_tokens = drafts.rows[:seats], drafts.tokens[:seats]
    count = drafts.real[:seats].sum(-1)
    room = size - 2 * count
    decoded = counted(tokens != mask_token_id)
    room_for_context = torch.minimum(room, decoded[end] - decoded[start])
    if context is not None:
        committed = counted(drafts.committed)
        most = (committed[end] - committed[start]).clamp(min=context)
        room_for_context = torch.minimum(room_for_context, most)
    room_for_context = torch.where(count > 0, room_for_context, 0)

    place = torch.arange(size, device=device)
    in_context = place < room_for_context[:, None]
    context_row = order[(end[:, None] - 1 - place).clamp(min=0)]
    draft = place - room[:, None]
    mask = draft - count[:, None]
    is_draft, is_mask = (draft >= 0) & (mask < 0), (mask >= 0) & (mask < count[:, None])
    column = torch.where(is_mask, mask, draft).clamp(0, columns - 1)

    def chosen(of_context: Tensor | int, of_draft: Tensor | int, of_mask: Tensor | int, padding: int) -> Tensor:
        of_rest = torch.where(is_draft, of_draft, torch.where(is_mask, of_mask, padding))
        return torch.where(in_context, of_context, of_rest).flatten()

    depth = chosen(0, draft + 1, mask, -1)
    seen_from = chosen(0, draft + 1, 0, 0)
    seen_until = chosen(columns + 1, columns + 1, mask + 1, 0)
    of_candidate = candidate_rows.gather(1, column)
    first = torch.arange(seats, device=device) * size
    masks = (first + room + count)[:, None] + torch.arange(columns, device=device)
    k_begin = layout.base[:seats]
    k_end = torch.where(count > 0, k_begin + layout.lengths[:seats], k_begin)
    return VerifyRows(
        rows=chosen(context_row, of_candidate, of_candidate, 0),
        ids=chosen(tokens[context_row], candidate_tokens.gather(1, column), mask_token_id, 0),
        views=torch.stack((depth, seen_from, seen_until), 1).to(torch.int32),
        masks=torch.where(drafts.real[:seats], masks, first[:, None]),
        tiles=torch.stack((first, first + size, k_begin, k_end), 1).to(torch.int32),
    )
