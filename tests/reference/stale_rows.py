# SPDX-License-Identifier: Apache-2.0
"""A forward over some rows of one canvas, with keys and values of the other rows as they were last computed.

Python lists of single rows, dense attention, one canvas at a time. Nothing is imported from the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RowModel(Protocol):
    """A transformer whose attention is left to the caller."""

    layers: int

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(R,) ids at canvas positions -> (R, C). `attend` is called once a layer with rotated q, k and v."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) -> (R, V)."""
        ...


class StaleCanvas:
    """Keys and values of one canvas, by layer and position; None until a position was computed."""

    def __init__(self, model: RowModel, length: int) -> None:
        self.model = model
        self.keys: list[list[Tensor | None]] = [[None] * length for _ in range(model.layers)]
        self.values: list[list[Tensor | None]] = [[None] * length for _ in range(model.layers)]
        self.queries: list[dict[int, Tensor]] = []
        self.seen: list[int] = []
        self.kept: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in range(model.layers)]

    def forward(self, canvas: Sequence[int], rows: Sequence[int], seen: Sequence[int]) -> dict[int, Tensor]:
        """Compute `rows`, which are written before they are read, over the positions `seen`; logits by position."""
        layer = 0
        self.queries, self.seen = [], list(seen)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal layer
            for i, position in enumerate(rows):
                self.keys[layer][position], self.values[layer][position] = k[i], v[i]
            key = torch.stack([self.keys[layer][position] for position in seen])
            value = torch.stack([self.values[layer][position] for position in seen])
            self.queries.append({position: q[i] for i, position in enumerate(rows)})
            layer += 1
            return dense_attention(q, key, value)

        ids = torch.tensor([canvas[position] for position in rows])
        logits = self.model.logits(self.model.hidden(ids, torch.tensor(list(rows)), attend))
        return {position: logits[i] for i, position in enumerate(rows)}

    def forward_reusing(
        self, canvas: Sequence[int], seen: Sequence[int], block: Sequence[int], layers: Sequence[int], *, fill: bool
    ) -> dict[int, Tensor]:
        """LaCache, section 9.3: all rows; in `layers`, q, k and v outside the block are those of the last filling."""
        layer = 0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal layer
            parts = [list(part) for part in (q, k, v)]
            if layer in layers and fill:
                self.kept[layer] = {position: (q[i], k[i], v[i]) for i, position in enumerate(seen)}
            elif layer in layers:
                for i, position in enumerate(seen):
                    if position not in block:
                        for part, old in zip(parts, self.kept[layer][position], strict=True):
                            part[i] = old
            layer += 1
            return dense_attention(*(torch.stack(part) for part in parts))

        ids = torch.tensor([canvas[position] for position in seen])
        logits = self.model.logits(self.model.hidden(ids, torch.tensor(list(seen)), attend))
        return {position: logits[i] for i, position in enumerate(seen)}

    def scores(self, window: Sequence[int], layers: Sequence[int]) -> dict[int, float]:
        """Sum over layers, window rows and heads of q . k for each seen position, in the last forward."""
        total = torch.zeros(len(self.seen), dtype=torch.float64)
        for layer in layers:
            query = torch.stack([self.queries[layer][row] for row in window]).double()
            key = torch.stack([self.keys[layer][position] for position in self.seen]).double()
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            total += torch.einsum("rhd,khd->rhk", query, key).sum((0, 1))
        return dict(zip(self.seen, total.tolist(), strict=True))


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(R, H, hd) queries on all the given keys (K, H_kv, hd)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
