# SPDX-License-Identifier: Apache-2.0
"""The fallback where a row program cannot be made: each sample through the rectangular graph, alone.

With `strict=False` an attention that was refused stays as the model wrote it, bound to the shape [B, T]. Decoding then
runs sample by sample: right, without padding, and slow; the report says so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import ConfigError, PassError
from ..passes.graph import attribute, find, output_node, share
from .programs import Program
from .row_programs import CacheInputs, LaCacheInputs, StepInputs, VerifyInputs
from .shape import ModelShape


class RectangularPrograms:
    """Implements `RowPrograms` for a graph of `ids [B, T] -> logits [B, T, V]` that keeps the batch's shape.

    Raises:
        PassError: the head is not in canonical form, so that nothing can be decoded.
    """

    tile_rows: int | None = None

    def __init__(self, gm: GraphModule, *, mask_token_id: int | None, device: torch.device) -> None:
        self.device = device
        self.built: tuple[Program, ...] = ()
        self._mask_token_id = mask_token_id
        self._hidden = share(gm)
        heads = find(self._hidden, torch.ops.dllm.head.default)
        if len(heads) != 1:
            raise PassError("the head was refused, and without it nothing can be decoded (see normalize_head)")
        x, weight, self._scale = heads[0].args
        self._weight = attribute(self._hidden, weight)  # type: ignore[arg-type]
        output_node(self._hidden).args = (x,)
        self._hidden.recompile()

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """See `RowPrograms.step`.

        Raises:
            ConfigError: rows of a sample were dropped, which this graph cannot do.
        """
        for begin, end in _spans(inputs.tiles):
            if not torch.equal(inputs.positions[begin:end].cpu(), torch.arange(end - begin)):
                raise ConfigError(
                    "an attention of this model was left as it was, so no rows can be dropped: set suffix='all'"
                )
        hidden = self._rows(inputs.ids, inputs.tiles)
        x = hidden[inputs.wanted]
        if inputs.unconditional is not None:
            x = torch.ops.dllm.guide(x, hidden[inputs.unconditional], inputs.guidance)
        return torch.ops.dllm.head_confidence(
            x, self._weight, self._scale, self._mask_token_id, inputs.banned, inputs.seeds, inputs.temperature
        )

    @property
    def shape(self) -> ModelShape:
        """Not known: caches need row programs."""
        raise ConfigError("an attention of this model was left as it was, so no cache can be used: set cache='none'")

    def lacache_step(self, inputs: StepInputs, cache: LaCacheInputs) -> tuple[Tensor, Tensor]:
        """Not reached: `shape` refuses first."""
        raise ConfigError("an attention of this model was left as it was, so no cache can be used: set cache='none'")

    def cached_step(self, inputs: StepInputs, cache: CacheInputs) -> tuple[Tensor, Tensor]:
        """Not reached: `shape` refuses first."""
        raise ConfigError("an attention of this model was left as it was, so no cache can be used: set cache='none'")

    def verify_step(self, inputs: StepInputs, verify: VerifyInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Not reached: `shape` refuses first."""
        raise ConfigError("an attention of this model was left as it was, so no cache can be used: set cache='none'")

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, tiles: Tensor) -> Tensor:
        """Logits (R, V) of every row; positions are those of the samples by construction."""
        return torch.ops.dllm.head(self._rows(ids, tiles), self._weight, self._scale)

    def _rows(self, ids: Tensor, tiles: Tensor) -> Tensor:
        return torch.cat([self._hidden(ids[None, begin:end])[0] for begin, end in _spans(tiles)])


def _spans(tiles: Tensor) -> list[list[int]]:
    """First and end row of each sample."""
    return [tile[:2] for tile in tiles.tolist() if tile[0] < tile[1]]
