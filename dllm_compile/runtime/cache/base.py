# SPDX-License-Identifier: Apache-2.0
"""The contract of a cache policy: which part of a forward is computed anew in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout, Sample
from ..row_programs import StepInputs
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


class CachePolicy(ABC):
    """How a step's forward is computed.

    `begin` and `look` run on the host between steps; `columns`, `step` and `due` are tensor operations with shapes
    that the last look decided.
    """

    tracks_commits = False
    """Whether `CanvasState.fresh` is kept up to date."""

    bucket: Callable[[int], int] = staticmethod(int)
    """From a number of rows to one at least as large for which there may be a captured step."""

    # Hooks that a policy may leave as they are.

    def begin(self, layout: Layout, kept: Sequence[int] = ()) -> None:  # noqa: B027
        """Start on a new layout: its first samples are `kept` of the last one, the others are new and due."""

    def look(self, layout: Layout, state: CanvasState, look: Look) -> None:  # noqa: B027
        """Prepare the steps up to the next look, the first of which is refreshing."""

    def shapes(self, *, refreshing: bool) -> Hashable:
        """What tells the next step from others of the same layout: its sizes, and every choice made on the host.

        None where a step cannot be captured: it does things on the host that a replay would leave out.
        """
        return None

    def sizes(self, layout: Layout) -> list[tuple[bool, int]]:
        """Steps that decoding the samples of `layout` is likely to ask for: (refreshing, rows), the largest first."""
        return [(True, 0), (False, 0)]

    def resize(self, rows: int) -> None:  # noqa: B027
        """Make the next step one of `rows` rows, instead of what the last look asked for."""

    def stepped(self, layout: Layout) -> None:  # noqa: B027
        """Do on the host what follows a step, which may have been a replay."""

    def columns(self, masked: Tensor) -> Tensor | None:
        """Candidates among the columns (S, w) of the current block: (S, m) int64 ascending; None for all of them."""
        return None

    @abstractmethod
    def step(
        self, inputs: StepInputs, layout: Layout, state: CanvasState, *, refreshing: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One forward.

        Args:
            inputs: the forward over every row of the canvas; a policy computes the part that it needs.
            layout: where the rows lie.
            state: the canvas, read only.
            refreshing: samples that are due take part with all their rows; otherwise they take no part.

        Returns:
            (token (W,) int64, confidence (W,) fp32) of the wanted rows; anything for samples that take no part.
        """

    def verify(self, drafts: Drafts, layout: Layout, state: CanvasState) -> tuple[Tensor, Tensor, Tensor]:
        """A second forward of the step that checks drafts and changes neither cache nor canvas.

        Args:
            drafts: what is checked.
            layout: where the rows lie.
            state: the canvas with the first forward's commits; its counters and `fresh` are those before the step.

        Returns:
            (S, c) each, for a candidate under its mask: the most probable token int64, its probability fp32 and the
            draft's. Anything where a candidate is not real.
        """
        raise NotImplementedError(f"{type(self).__name__} has no verify pass: the configuration refuses it")

    def due(self, moves: Tensor, ended: Tensor, state: CanvasState) -> Tensor:
        """(S,) bool: samples whose next step must compute all their rows.

        Args:
            moves: (S,) bool, samples that have entered a block.
            ended: (S,) bool, samples whose end became known, so that masks behind it were filled.
            state: after the step; `step_in_block` and `age` count it.
        """
        return torch.zeros_like(moves)

    @property
    @abstractmethod
    def row_forwards(self) -> int:
        """Rows computed so far, padding apart; may read the device."""
