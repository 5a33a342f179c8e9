# SPDX-License-Identifier: Apache-2.0
"""Where everything lies while a fixed set of samples is decoded: rows, tiles and blocks. Built on the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import DecodingConfig
from .stages import HOST

if TYPE_CHECKING:
    from .capacity import Capacity


@dataclass(frozen=True)
class Sample:
    """Host-side facts of one prompt and its answer; they do not depend on what else is decoded with it.

    Attributes:
        index: place of the prompt in the call.
        prompt: (P,) int64 on the CPU.
        length: rows N + padding, where N = P + G is the length of the canvas.
        blocks: canvas positions of each block in decoding order, each (n,) int64 ascending. Without blocks one that
            holds every mask.
        infill: whether the first block is the one of the masks inside the prompt.
        padding: rows behind the canvas, which are seen and belong to no block. Masks stand there, too, since nothing
            has been decoded; what the model is shown instead, the cache policy decides.
    """

    index: int
    prompt: Tensor
    length: int
    blocks: tuple[Tensor, ...]
    infill: bool
    padding: int = 0

    @classmethod
    def plan(cls, index: int, prompt: Tensor, config: DecodingConfig, mask_token_id: int) -> Sample:
        """Lay out the blocks of one sample: the prompt's masks (if any), then the answer from left to right."""
        start, canvas = len(prompt), len(prompt) + config.max_new_tokens
        holes = torch.nonzero(prompt == mask_token_id).flatten()
        if not config.has_blocks:
            masks, padding = torch.cat((holes, torch.arange(start, canvas))), config.padding_of(canvas)
            return cls(index, prompt, canvas + padding, (masks,), infill=len(holes) > 0, padding=padding)
        answer = torch.arange(start, canvas).split(config.block_length)
        infill = len(holes) > 0
        return cls(index, prompt, canvas, ((holes,) if infill else ()) + tuple(answer), infill)

    @property
    def canvas(self) -> int:
        """N, canvas length."""
        return self.length - self.padding

    @property
    def masks(self) -> int:
        """Masked positions at the beginning, those of the padding included."""
        return sum(len(block) for block in self.blocks) + self.padding

    def span(self, block: int) -> tuple[int, int]:
        """First and end canvas position of a block; an infill block may have gaps between them."""
        return int(self.blocks[block][0]), int(self.blocks[block][-1]) + 1


@dataclass(frozen=True)
class Layout:
    """A set of S samples on one flat axis of R rows, as tensors on the device.

    With guidance the forward runs over 2R rows: the conditional rows, then the same again with prompts masked.

    With a capacity the tensors have one size whatever samples there are: behind the samples come places without one,
    the last of which has the rows that are left over (never none). They exist nowhere else: their tokens are no masks,
    they are done from the beginning, and nothing sees them.

    Attributes:
        samples: the samples, in the order of their rows.
        offsets: first row of each sample.
        spare: whether the last place has rows that are left over, and never a sample.
        exists: (S,) bool, whether there is a sample; S counts the places without one.
        guided: whether there is an unconditional half.
        positions: (R,) int64, canvas position.
        sample_of_row: (R,) int64.
        given: (R,) bool, prompt tokens that were given (not masks).
        start: (S,) int64, first row of each sample.
        lengths: (S,) int64, rows of each sample.
        index: (S,) int64, place of each sample in the call.
        prompt_length: (S,) int64.
        n_blocks: (S,) int64.
        plan: (S, n, w) int64, rows of each block, padded with -1.
        spans: (S, n, 2) int64, first and end canvas position of each block, padded with 0.
        base: (S,) int64, first cache row of each sample; it stays the same while the sample is decoded.
        tiles: (n, 4) int32, as the forward takes them.
    """

    samples: tuple[Sample, ...] = field(metadata=HOST)
    offsets: tuple[int, ...] = field(metadata=HOST)
    guided: bool
    spare: bool
    exists: Tensor
    positions: Tensor
    sample_of_row: Tensor
    given: Tensor
    start: Tensor
    lengths: Tensor
    index: Tensor
    prompt_length: Tensor
    n_blocks: Tensor
    plan: Tensor
    spans: Tensor
    base: Tensor
    tiles: Tensor
    forward_positions: Tensor = field(repr=False)

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        *,
        mask_token_id: int,
        tile_rows: int | None,
        guided: bool,
        device: torch.device,
        bases: Sequence[int] | None = None,
        capacity: Capacity | None = None,
    ) -> Layout:
        """Lay out `samples` in the given order.

        Args:
            samples: at least one.
            mask_token_id: id of a masked position.
            tile_rows: most query rows of a tile; None gives one tile a sample.
            guided: with an unconditional half.
            device: where the tensors lie.
            bases: first cache row of each sample, by default its own first row.
            capacity: sizes of the tensors; None: those that the samples need.
        """
        taken = [sample.length for sample in samples]
        places = len(samples) if capacity is None else capacity.samples + 1
        rows = sum(taken) if capacity is None else capacity.rows
        unused = [0] * (places - len(samples))
        if unused:
            unused[-1] = rows - sum(taken)
        lengths = torch.tensor(taken + unused)
        start = lengths.cumsum(0) - lengths
        offsets = tuple(start[: len(samples)].tolist())
        sample_of_row = torch.repeat_interleave(torch.arange(places), lengths)
        positions = torch.arange(rows) - start[sample_of_row]
        positions[sum(taken) :] = 0  # there may be more rows left over than the model has positions
        tiles = tile_table(lengths, tile_rows, seeing=len(samples), size=None if capacity is None else places)
        if guided:
            tiles = torch.cat([tiles, tiles + rows])
        given = torch.zeros(rows, dtype=torch.bool)
        for sample, offset in zip(samples, offsets, strict=True):
            given[offset : offset + len(sample.prompt)] = sample.prompt != mask_token_id
        return cls(
            samples=tuple(samples),
            offsets=offsets,
            guided=guided,
            spare=capacity is not None,
            exists=(torch.arange(places) < len(samples)).to(device),
            positions=positions.to(device),
            sample_of_row=sample_of_row.to(device),
            given=given.to(device),
            start=start.to(device),
            lengths=lengths.to(device),
            index=_filled([sample.index for sample in samples], places).to(device),
            prompt_length=_filled([len(sample.prompt) for sample in samples], places).to(device),
            n_blocks=_filled([len(sample.blocks) for sample in samples], places).to(device),
            plan=block_plan(samples, offsets, capacity).to(device),
            spans=block_spans(samples, capacity).to(device),
            base=_filled(offsets if bases is None else bases, places).to(device),
            tiles=tiles.to(device),
            forward_positions=(torch.cat([positions, positions]) if guided else positions).to(device),
        )

    def span_of(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """First and end canvas position (S,) of block (S,) of each sample."""
        span = self.spans.gather(1, block[:, None, None].expand(-1, 1, 2)).squeeze(1)
        return span[:, 0], span[:, 1]

    @property
    def rows(self) -> int:
        """R, left over ones included."""
        return self.positions.shape[0]

    @property
    def places(self) -> int:
        """S: samples, and places without one."""
        return self.start.shape[0]

    @property
    def seats(self) -> int:
        """Places that a sample may take: with a capacity all but the last one, which has the rows left over."""
        return self.places - 1 if self.spare else self.places

    @property
    def kind(self) -> Hashable:
        """What tells layouts apart in compiled stages besides their tensors: whether there is one seat alone."""
        return self.seats == 1

    @property
    def forward_rows(self) -> int:
        """Rows of one forward: R, or 2R with guidance."""
        return 2 * self.rows if self.guided else self.rows

    def initial_tokens(self, mask_token_id: int) -> Tensor:
        """(R,) int64 on the device: each prompt followed by masks; rows of no sample hold another id."""
        tokens = torch.full((self.rows,), int(mask_token_id == 0), dtype=torch.int64)
        for sample, offset in zip(self.samples, self.offsets, strict=True):
            tokens[offset : offset + len(sample.prompt)] = sample.prompt
            tokens[offset + len(sample.prompt) : offset + sample.length] = mask_token_id
        return tokens.to(self.positions.device)


def _filled(values: Sequence[int], places: int) -> Tensor:
    return torch.tensor([*values, *([0] * (places - len(values)))])


def tile_table(lengths: Tensor, tile_rows: int | None, *, seeing: int | None = None, size: int | None = None) -> Tensor:
    """(n, 4) int32 [q_begin, q_end, k_begin, k_end): every row of a sample sees the whole sample.

    Args:
        lengths: (S,) int64, rows of each sample.
        tile_rows: most query rows of a tile; None gives one tile a sample.
        seeing: samples behind this many see nothing; None: all see their own keys.
        size: most samples that a table of this total length may have; it is then filled up to the tiles these could
            need with tiles that have no rows. None leaves it as short as it is.
    """
    ends = lengths.cumsum(0)
    starts = ends - lengths
    step = int(lengths.max()) if tile_rows is None else tile_rows
    per_sample = -(-lengths // step)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), per_sample)
    tile = torch.arange(len(sample)) - (per_sample.cumsum(0) - per_sample)[sample]
    begin = starts[sample] + tile * step
    end = torch.minimum(begin + step, ends[sample])
    k_begin, k_end = starts[sample], ends[sample]
    if seeing is not None:
        k_end = torch.where(sample < seeing, k_end, k_begin)
    tiles = torch.stack([begin, end, k_begin, k_end], dim=1).to(torch.int32)
    if size is None:
        return tiles
    rows = int(lengths.sum())
    most = size if tile_rows is None else rows // step + size
    return torch.cat((tiles, tiles.new_full((most - len(tiles), 4), rows)))


def block_plan(samples: Sequence[Sample], offsets: Sequence[int], capacity: Capacity | None = None) -> Tensor:
    """(S, n, w) int64: flat rows of each sample's blocks, padded with -1."""
    most = max(len(sample.blocks) for sample in samples)
    width = max(len(block) for sample in samples for block in sample.blocks)
    size = (len(samples), most, width)
    if capacity is not None:
        size = (capacity.samples + 1, capacity.blocks, capacity.width)
    plan = torch.full(size, -1)
    for i, (sample, offset) in enumerate(zip(samples, offsets, strict=True)):
        for k, block in enumerate(sample.blocks):
            plan[i, k, : len(block)] = block + offset
    return plan


def block_spans(samples: Sequence[Sample], capacity: Capacity | None = None) -> Tensor:
    """(S, n, 2) int64: first and end canvas position of each block, padded with 0."""
    size = (len(samples), max(len(sample.blocks) for sample in samples))
    if capacity is not None:
        size = (capacity.samples + 1, capacity.blocks)
    spans = torch.zeros((*size, 2), dtype=torch.int64)
    for i, sample in enumerate(samples):
        for k in range(len(sample.blocks)):
            spans[i, k] = torch.tensor(sample.span(k))
    return spans
