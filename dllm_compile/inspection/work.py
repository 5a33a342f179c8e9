# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations of one call of a program at a named size, and the time a card needs for them at least."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule

from ..cards import card_of
from ..costs import program_costs, total
from .examples import ExampleSize, example_inputs


@dataclass(frozen=True)
class Work:
    """One call.

    Attributes:
        size: of the call, in words.
        rows: rows it computes.
        bytes: every operand and result once (`costs.py`).
        flops: two for each multiply-add.
        fp8_flops: those of FP8 products.
        card: name of the card the floor is for; None where it is not known.
        floor_us: microseconds that card needs at least; None without a card, and for parameters that are not 16 bit.
    """

    size: str
    rows: int
    bytes: int
    flops: int
    fp8_flops: int
    card: str | None
    floor_us: float | None

    def __str__(self) -> str:
        """For the report."""
        text = f"{self.size}: {self.rows} rows, {scaled(self.bytes, 'B')}, {scaled(self.flops, 'FLOP')}"
        if self.fp8_flops:
            text += f" ({scaled(self.fp8_flops, 'FLOP')} of them FP8)"
        return text if self.floor_us is None else f"{text}, floor on {self.card} {self.floor_us:.0f} us"


# Graphs do not change once they are programs, and counting a deep one takes a second.
_COUNTED: WeakKeyDictionary[GraphModule, dict[ExampleSize, Work]] = WeakKeyDictionary()


def program_work(
    gm: GraphModule, size: ExampleSize, *, device: torch.device, dtype: torch.dtype, tile_rows: int | None
) -> Work | None:
    """Work of one call; None where no example of an input is known."""
    known = _COUNTED.setdefault(gm, {})
    if size not in known:
        try:
            inputs = example_inputs(gm, size, device=torch.device("cpu"), tile_rows=tile_rows, values=False)
        except KeyError:
            return None
        counted = total(program_costs(gm, inputs))
        card = card_of(device) if dtype in (torch.bfloat16, torch.float16) else None
        floor = None if card is None else card.floor(counted.bytes, counted.flops, counted.fp8_flops)
        known[size] = Work(
            size=str(size),
            rows=len(inputs["ids"]),
            bytes=counted.bytes,
            flops=counted.flops,
            fp8_flops=counted.fp8_flops,
            card=None if card is None else card.name,
            floor_us=None if floor is None else floor * 1e6,
        )
    return known[size]


def scaled(number: float, unit: str) -> str:
    """`12.3 GB`: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}"
