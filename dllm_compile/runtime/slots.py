# SPDX-License-Identifier: Apache-2.0
"""Cache rows of samples: each has its own range as long as it is decoded, and another sample takes it afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Sample


class Slots:
    """Ranges of cache rows.

    Attributes:
        rows: cache rows of all slots.
    """

    def __init__(self, bases: Sequence[int], rows: int) -> None:
        self.rows = rows
        self._free = list(reversed(bases))
        self._taken: dict[int, int] = {}

    @classmethod
    def of(cls, samples: Sequence[Sample], slots: int | None) -> Slots:
        """Slots for samples of which at most `slots` are decoded at the same time (None: all).

        With fewer slots than samples each slot has room for the longest one; otherwise each has its own sample's size.
        """
        lengths = [sample.length for sample in samples]
        if slots is None or slots >= len(samples):
            return cls([sum(lengths[:i]) for i in range(len(lengths))], sum(lengths))
        return cls([i * max(lengths) for i in range(slots)], slots * max(lengths))

    @property
    def free(self) -> int:
        """Slots without a sample."""
        return len(self._free)

    def base(self, sample: Sample) -> int:
        """First cache row of a sample, which takes a free slot at the first call."""
        if sample.index not in self._taken:
            self._taken[sample.index] = self._free.pop()
        return self._taken[sample.index]

    def release(self, sample: Sample) -> None:
        """The sample is finished."""
        self._free.append(self._taken.pop(sample.index))
