# SPDX-License-Identifier: Apache-2.0
"""The user's model in the place of the programs: the same decode loop over dense, eager forwards of one sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels import counter_rng
from ..refusals import logits_of
from ..runtime.row_programs import CacheInputs, LaCacheInputs, StepInputs, VerifyInputs
from ..runtime.shape import ModelShape


class EagerPrograms:
    """Implements what `RowPrograms` needs for decoding one sample without reuse of anything.

    Tables of tiles and caches are not read: a sample begins where the position is 0, and every row sees all of it.

    Args:
        model: the user's own module.
        mask_token_id: its mask id.
        shape: sizes for the caches that policies allocate and nothing here uses.
    """

    tile_rows: int | None = None

    def __init__(self, model: nn.Module, mask_token_id: int, shape: ModelShape | None = None) -> None:
        self.device = next(model.parameters()).device
        self._model = model
        self._mask_token_id = mask_token_id
        self._shape = shape or ModelShape(1, 1, 1, 1, 1, torch.float32)

    @property
    def shape(self) -> ModelShape:
        """See `RowPrograms.shape`."""
        return self._shape

    @torch.no_grad()
    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(R, V) of rows that are whole samples one after the other."""
        edges = torch.nonzero(positions == 0).flatten().tolist()
        parts = zip(edges, [*edges[1:], len(ids)], strict=True)
        return torch.cat([logits_of(self._model(ids[None, begin:end]))[0] for begin, end in parts])

    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """See `RowPrograms.step`."""
        z = self.logits(inputs.ids, inputs.positions)
        chosen = z[inputs.wanted]
        if inputs.unconditional is not None and inputs.guidance is not None:
            blind = z[inputs.unconditional]
            chosen = blind + (inputs.guidance + 1) * (chosen - blind)
        return propose(chosen, self._mask_token_id, inputs.banned, inputs.seeds, inputs.temperature)

    def cached_step(self, inputs: StepInputs, cache: CacheInputs) -> tuple[Tensor, Tensor]:
        """All rows are given: the same as `step`."""
        return self.step(inputs)

    def lacache_step(self, inputs: StepInputs, cache: LaCacheInputs) -> tuple[Tensor, Tensor]:
        """Never asked for."""
        raise AssertionError("the ground decodes without caches")

    def verify_step(self, inputs: StepInputs, verify: VerifyInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Never asked for."""
        raise AssertionError("the ground verifies nothing")


def propose(
    logits: Tensor, mask_token_id: int, banned: Tensor, seeds: Tensor | None = None, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens (W,) and their probabilities (W,) from logits (W, V), as `head_confidence` defines them."""
    z = logits.float()
    ids = torch.arange(z.shape[1], device=z.device)
    z = z.masked_fill((ids[:, None] == banned).any(1), -torch.inf)
    scores = z
    if seeds is not None and temperature is not None:
        scores = z + temperature * counter_rng.gumbel(seeds[:, None], ids)
    token = scores.index_fill(1, torch.tensor([mask_token_id], device=z.device), -torch.inf).argmax(1)
    return token, z.softmax(1).gather(1, token[:, None])[:, 0]
