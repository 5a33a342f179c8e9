# SPDX-License-Identifier: Apache-2.0
"""Sizes that stay the same while prompts come and go, so that a captured step can be replayed for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import DecodingConfig
from .layout import Sample

# Canvas rows are rounded up to a multiple of this. What is added is memory of the cache alone.
_ROWS = 256


@dataclass(frozen=True)
class Capacity:
    """Room for the samples that are decoded at the same time.

    Attributes:
        samples: most samples at a time.
        rows: canvas rows. There are more of them than the samples take: the rest belongs to no sample.
        blocks: most blocks of a sample.
        width: most rows of a block.
    """

    samples: int
    rows: int
    blocks: int
    width: int

    @classmethod
    def of(cls, samples: Sequence[Sample], at_a_time: int, rows: int, config: DecodingConfig) -> Capacity:
        """Room for `samples`, of which `at_a_time` with `rows` canvas rows in all are decoded together."""
        width = max(len(block) for sample in samples for block in sample.blocks)
        usual = min(config.block_length, config.max_new_tokens) if config.has_blocks else config.max_new_tokens
        return cls(
            samples=at_a_time,
            rows=-(-(rows + 1) // _ROWS) * _ROWS,
            blocks=max(len(sample.blocks) for sample in samples),
            # Masks inside prompts make blocks of any size: few sizes are captured if these are rounded.
            width=width if width <= usual else 1 << (width - 1).bit_length(),
        )


def bucket(rows: int) -> int:
    """`rows` rounded up to a size for which a step is captured: at most 15 rows or a quarter more."""
    step = 16 if rows <= 128 else 32 if rows <= 512 else 64 if rows <= 1024 else 128 if rows <= 2048 else 256
    return -(-rows // step) * step
