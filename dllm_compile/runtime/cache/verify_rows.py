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
    from_end: Tensor,
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
        from_end: (R,) int64, rank of each decoded row of the canvas in its sample, 1 for the one that is context first
            of all; masks rank behind every decoded row.
        tokens: (R,) int64, the canvas with the first forward's commits.
        layout: where the rows lie.
        size: rows of each sample; at least commits of a step + 2 * candidates left, for any step.
        context: most context rows besides committed ones; None for as many as there is room.
        mask_token_id: id of a masked position.
    """
    of_row, seats, columns = layout.sample_of_row, layout.seats, drafts.rows.shape[1]
    device, decoded = tokens.device, tokens != mask_token_id
    count = drafts.real.sum(-1)
    room = size - 2 * count
    if context is not None:
        committed = torch.zeros_like(count).scatter_add_(0, of_row, drafts.committed.long())
        room_for_context = torch.minimum(room, committed.clamp(min=context))
    else:
        room_for_context = room
    room_for_context = torch.where(count > 0, room_for_context, 0)

    spare = seats * size  # what has no row goes there and is cut off
    first = torch.arange(layout.places, device=device) * size
    rank = torch.arange(columns, device=device)
    in_context = decoded & (from_end <= room_for_context[of_row])
    context_place = torch.where(in_context, first[of_row] + from_end - 1, spare)
    draft_place = torch.where(drafts.real, (first + room)[:, None] + rank, spare)
    mask_place = torch.where(drafts.real, (first + room + count)[:, None] + rank, spare)
    draft_place, mask_place, real = draft_place[:seats], mask_place[:seats], drafts.real[:seats]
    # One place for every row of the canvas, then for every draft and every mask.
    places = torch.cat((context_place, draft_place.flatten(), mask_place.flatten()))
    candidate_rows, draft_tokens = drafts.rows[:seats].flatten(), drafts.tokens[:seats].flatten()
    masks = torch.full_like(draft_tokens, mask_token_id)
    canvas_rows = torch.arange(len(tokens), device=device)
    ranks = rank.repeat(seats)
    zeros, top = torch.zeros_like(canvas_rows), torch.full_like(canvas_rows, columns + 1)
    depth = torch.cat((zeros, ranks + 1, ranks))
    seen_from = torch.cat((zeros, ranks + 1, torch.zeros_like(ranks)))
    seen_until = torch.cat((top, torch.full_like(ranks, columns + 1), ranks + 1))

    def spread(values: Tensor, padding: int) -> Tensor:
        return torch.full((spare + 1,), padding, dtype=torch.int64, device=device).scatter_(0, places, values)[:spare]

    views = torch.stack((spread(depth, -1), spread(seen_from, 0), spread(seen_until, 0)), 1).to(torch.int32)
    k_begin = layout.base
    k_end = torch.where(count > 0, k_begin + layout.lengths, k_begin)
    return VerifyRows(
        rows=spread(torch.cat((canvas_rows, candidate_rows, candidate_rows)), 0),
        ids=spread(torch.cat((tokens, draft_tokens, masks)), 0),
        views=views,
        masks=torch.where(real, mask_place, first[:seats, None]),
        tiles=torch.stack((first, first + size, k_begin, k_end), 1)[:seats].to(torch.int32),
    )
