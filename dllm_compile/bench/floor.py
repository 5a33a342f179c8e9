# SPDX-License-Identifier: Apache-2.0
"""The shortest time in which a known card could make the forwards of a call, from what each of them must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cards import Card
from ..config import DecodingConfig
from ..costs import CallCost, program_costs, total
from ..runtime.ambient import plain_mode
from ..runtime.engine import decode
from ..runtime.programs import ModelPrograms, Program
from ..runtime.prompts import split_prompts

if TYPE_CHECKING:
    from ..optimized import OptimizedModel


class _Counted(ModelPrograms):
    """Uncompiled programs that count the work of every call; equal sizes are counted once."""

    work: list[CallCost]
    known: dict[Hashable, CallCost]

    def _build(self, name: str, passes: tuple[Any, ...]) -> Program:
        program = super()._build(name, passes)

        def run(**inputs: Tensor) -> Any:
            key = (name, tuple((given, value.shape) for given, value in inputs.items()))
            if key not in self.known:
                self.known[key] = total(program_costs(program.gm, _light(inputs)))
            self.work.append(self.known[key])
            return program.run(**inputs)

        return dataclasses.replace(program, run=run)


def call_work(
    fast: OptimizedModel, prompts: Sequence[Sequence[int]], config: DecodingConfig
) -> tuple[CallCost, ...] | None:
    """Work of each forward of a call, which is made once more for it; None for a model without row programs."""
    if not isinstance(fast.programs, ModelPrograms):
        return None
    captured = fast._captured
    programs = _Counted(
        captured.gm,
        layers=captured.layers,
        mask_token_id=fast.facts.mask_token_id,
        device=fast.device,
        compiled=False,
        finish=fast._finish,
    )
    programs.work, programs.known = [], {}
    with plain_mode():
        decode(programs, fast.facts, split_prompts([list(prompt) for prompt in prompts]), config)
    return tuple(programs.work)


def floor_seconds(work: Sequence[CallCost], card: Card) -> float | None:
    """Sum over the forwards, each as long as moving or computing takes; None: FP8 on a card without it."""
    floors = [card.floor(one.bytes, one.flops, one.fp8_flops) for one in work]
    return None if any(one is None for one in floors) else sum(one for one in floors if one is not None)


def _light(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tables with their values on the CPU, of the others shape and dtype only."""
    return {
        name: value.cpu() if name.endswith("tiles") else torch.empty_like(value, device="meta")
        for name, value in inputs.items()
    }
