# SPDX-License-Identifier: Apache-2.0
"""The contract of a cache policy: which part of a forward is computed anew in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layout import Layout, Sample
from ..row_programs import StepInputs
from ..stages import RunStage, run_plainly
from ..state import CanvasState
from .verify_rows import Drafts


@dataclass(frozen=True)
class Look:
    """What the host knows of each sample of a layout between two steps.

    Attributes:
        block: current block.
        due: whether the next step must compute all rows.
        kept: rows that are seen and computed at all (suffix policies drop some).
        masks: masked rows left.
        fresh: rows committed in the last step, where the policy tracks them.
    """

    block: tuple[int, ...]
    due: tuple[bool, ...]
    kept: tuple[int, ...]
    masks: tuple[int, ...]
    fresh: tuple[int, ...]

    @classmethod
    def at_the_beginning(cls, samples: Sequence[Sample]) -> Look:
        """Samples that have not begun."""
        zeros = (0,) * len(samples)
        return cls(
            block=zeros,
            due=(True,) * len(samples),
            kept=tuple(sample.length for sample in samples),
            masks=tuple(sample.masks for sample in samples),
            fresh=zeros,
        )

    def of(self, samples: Sequence[int]) -> Look:
        """Some of the samples."""
        return Look(**{name: tuple(values[i] for i in samples) for name, values in vars(self).items()})

    def __add__(self, other: Look) -> Look:
        """These samples, then the others."""
        return Look(**{name: values + getattr(other, name) for name, values in vars(self).items()})


@dataclass(frozen=True)
class Request:
    """What a step asks of its forward, whichever rows a policy computes for it.

    Attributes:
        rows: (W,) int64, canvas rows whose token is wanted. A row may be named more than once.
        refreshing: 0-dim bool: samples that are due take part with all their rows; otherwise they take no part.
        mask_token_id: id of a masked position.
        fill_id: id that stands behind the end of an answer.
        banned, seeds, temperature, guidance: as in `StepInputs`.
    """

    rows: Tensor
    refreshing: Tensor
    mask_token_id: int
    fill_id: int
    banned: Tensor
    seeds: Tensor | None
    temperature: Tensor | None
    guidance: Tensor | None

    def inputs(
        self, ids: Tensor, positions: Tensor, tiles: Tensor, wanted: Tensor, unconditional: Tensor | None
    ) -> StepInputs:
        """The forward over given rows; see `StepInputs`."""
        return StepInputs(
            ids=ids,
            positions=positions,
            tiles=tiles,
            wanted=wanted,
            banned=self.banned,
            seeds=self.seeds,
            temperature=self.temperature,
            unconditional=unconditional,
            guidance=self.guidance,
        )

    def over_all(self, layout: Layout, state: CanvasState) -> StepInputs:
        """The forward over every row of the canvas."""
        ids = state.tokens[: layout.rows]
        if not layout.guided:
            return self.inputs(ids, layout.forward_positions, layout.tiles, self.rows, None)
        ids = torch.cat([ids, torch.where(layout.given, self.mask_token_id, ids)])
        return self.inputs(ids, layout.forward_positions, layout.tiles, self.rows, self.rows + layout.rows)


@dataclass(frozen=True, kw_only=True)
class CacheRule:
    """What a policy decides on the device: tensor operations and plain numbers alone, so that it can be compiled."""

    tracks_commits: ClassVar[bool] = False
    """Whether `CanvasState.fresh` is kept up to date."""

    @property
    def most_columns(self) -> int | None:
        """Most columns that `columns` chooses; None where it chooses none."""
        return None

    def columns(self, masked: Tensor) -> Tensor | None:
        """Candidates among the columns (S, w) of the current block: (S, m) int64 ascending; None for all of them."""
        return None

    def fresh(self, drafted: Tensor, accepted: Tensor) -> Tensor:
        """(R,) bool, what `CanvasState.fresh` holds after a step of two forwards.

        Args:
            drafted: (R,) bool, tokens that the first forward committed.
            accepted: (R,) bool, tokens that the second one committed.
        """
        return drafted | accepted

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """(S,) bool: samples whose next step must compute all their rows.

        Args:
            moves: (S,) bool, samples that have entered a block.
            ended: (S,) bool, samples whose end became known, so that masks behind it were filled.
            state: after the step; `step_in_block` and `age` count it.
        """
        return torch.zeros_like(moves)


class CachePolicy(ABC):
    """How a step's forward is computed.

    `begin` and `look` run on the host between steps; `step` and `verify` are tensor operations with shapes that the
    last look decided. They and the `rule` may be captured.
    """

    rule: CacheRule = CacheRule()
    """What is decided on the device."""

    bucket: Callable[[int], int] = staticmethod(int)
    """From a number of rows to one at least as large for which there may be a captured step."""

    # Hooks that a policy may leave as they are.

    def begin(self, layout: Layout, kept: Sequence[int] = ()) -> None:  # noqa: B027
        """Start on a new layout: its first samples are `kept` of the last one, the others are new and due."""

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:  # noqa: B027
        """Prepare the steps up to the next look, the first of which is refreshing."""

    def shapes(self, *, refreshing: bool) -> int | None:
        """What tells the next step from others of the same layout: its rows, 0 where they are always the same.

        None where a step cannot be captured: it does things on the host that a replay would leave out.
        """
        return None

    def sizes(self, layout: Layout) -> list[tuple[bool, int]]:
        """Steps that decoding the samples of `layout` is likely to ask for: (refreshing, rows), the largest first."""
        return [(True, 0), (False, 0)]

    def resize(self, rows: int, *, refreshing: bool) -> None:  # noqa: B027
        """Make the next such step one of `rows` rows, instead of what the last look asked for."""

    def stepped(self, layout: Layout) -> None:  # noqa: B027
        """Do on the host what follows a step, which may have been a replay."""

    @abstractmethod
    def step(
        self,
        request: Request,
        layout: Layout,
        state: CanvasState,
        *,
        refreshing: bool = True,
        run: RunStage = run_plainly,
    ) -> tuple[Tensor, Tensor]:
        """One forward.

        Args:
            request: what is asked for.
            layout: where the rows lie.
            state: the canvas, read only.
            refreshing: as in the request, for sizes.
            run: runs the stages.

        Returns:
            (token (W,) int64, confidence (W,) fp32) of the wanted rows; anything for samples that take no part.
        """

    def verify(
        self, drafts: Drafts, layout: Layout, state: CanvasState, *, run: RunStage = run_plainly
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A second forward of the step that checks drafts and changes neither cache nor canvas.

        Args:
            drafts: what is checked.
            layout: where the rows lie.
            state: the canvas with the first forward's commits; its counters and `fresh` are those before the step.
            run: runs the stages.

        Returns:
            (seats * c,) each, for a candidate under its mask: the most probable token int64, its probability fp32 and
            the draft's. Anything where a candidate is not real.
        """
        raise NotImplementedError(f"{type(self).__name__} has no verify pass: the configuration refuses it")

    @property
    @abstractmethod
    def row_forwards(self) -> int:
        """Rows computed so far, padding apart; may read the device."""
