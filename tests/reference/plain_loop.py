# SPDX-License-Identifier: Apache-2.0
"""The definition of decoding, written out: one prompt, a dense forward over the whole canvas, Python lists.

Nothing is imported from the package: the noise generator is written again with Python integers, the softmax is fp64,
the rules are loops. What the runtime computes is compared with this, token for token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""(1, N) int64 -> logits (1, N, V)."""

REMASKING_STREAM = 2**32 - 1


@dataclass(frozen=True)
class PlainOptions:
    """Everything that decides which tokens come out; field names as in `DecodingConfig`."""

    mask_id: int
    stop_ids: tuple[int, ...] = ()
    model_eos: tuple[int, ...] = ()
    fill_id: int = 0
    max_new_tokens: int = 16
    block_length: int = 8
    steps: int | None = None
    rule: str = "quota"
    parameter: float = 0.0
    released_last_rank: bool = False
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    eos: str = "block"
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    seed: int = 0


@dataclass
class PlainResult:
    """The final canvas, the forwards made (CFG counts 2) and the canvas after each step."""

    canvas: list[int]
    forwards: int = 0
    decoded: int = 0
    trace: list[list[int]] = field(default_factory=list)


# --- noise -------------------------------------------------------------------------------------------------------


def _mix(value: int) -> int:
    value &= 0xFFFFFFFF
    value ^= value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value ^= value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def _combine(seed: int, value: int) -> int:
    return _mix((seed & 0xFFFFFFFF) ^ _mix(value + 0x9E3779B9))


def _uniform(seed: int, index: int) -> float:
    return ((_combine(seed, index) >> 9) + 0.5) / 2**23


def _gumbel(seed: int, index: int) -> float:
    return -math.log(-math.log(_uniform(seed, index)))


# --- commit rules: confidences sorted descending -> how many are taken ----------------------------------------------


def count_quota(n: int, steps: int | None, step: int) -> int:
    """u_i of a block with n masks at its start."""
    steps = n if steps is None else steps
    return n // steps + (1 if step < n % steps else 0)


def count_threshold(ranked: Sequence[float], tau: float) -> int:
    return max(1, sum(1 for c in ranked if c >= tau))


def count_factor(ranked: Sequence[float], factor: float, *, released: bool = False) -> int:
    taken = 1
    while taken < len(ranked) and ranked[taken] >= 1 - factor / (taken + 2):
        taken += 1
    if released and taken == len(ranked) - 1:
        taken += 1
    return taken


def count_frechet(ranked: Sequence[float], margin: float) -> int:
    best = 1
    for k in range(1, len(ranked) + 1):
        lower = sum(ranked[:k]) - (k - 1)
        upper = 1 - ranked[k - 1]
        if lower - upper > margin:
            best = k
    return best


def _count(options: PlainOptions, ranked: Sequence[float], n: int, step: int) -> int:
    if options.rule == "threshold":
        return count_threshold(ranked, options.parameter)
    if options.rule == "factor":
        return count_factor(ranked, options.parameter, released=options.released_last_rank)
    if options.rule == "frechet":
        return count_frechet(ranked, options.parameter)
    blocks = math.ceil(options.max_new_tokens / options.block_length)
    steps = None if options.steps is None else options.steps // blocks
    return count_quota(n, steps, step)


# --- one proposal --------------------------------------------------------------------------------------------------


def _logits(forward: Forward, canvas: list[int], given: list[bool], options: PlainOptions) -> Tensor:
    """(N, V): guided where asked for; the unconditional half sees masks in place of the given prompt."""
    conditional = forward(torch.tensor([canvas]))[0]
    if options.cfg_scale == 0:
        return conditional
    blind = [options.mask_id if known else token for token, known in zip(canvas, given, strict=True)]
    unconditional = forward(torch.tensor([blind]))[0]
    return unconditional + (options.cfg_scale + 1) * (conditional - unconditional)


def _propose(z: list[float], position: int, seed: int, step: int, options: PlainOptions) -> tuple[int, float]:
    """Token and confidence of one position from its logits."""
    if options.logits_eos_inf:
        z = [-math.inf if token in options.model_eos else value for token, value in enumerate(z)]
    local = _combine(_combine(seed, position), step)
    scores = list(z)
    if options.temperature > 0:
        scores = [value + options.temperature * _gumbel(local, token) for token, value in enumerate(z)]
    scores[options.mask_id] = -math.inf
    token = max(range(len(scores)), key=lambda v: (scores[v], -v))
    top = max(z)
    confidence = math.exp(z[token] - top) / sum(math.exp(value - top) for value in z)
    if options.remasking == "random":
        confidence = _uniform(local, REMASKING_STREAM)
    if options.confidence_eos_eot_inf and token in options.stop_ids:
        confidence = 0.0
    return token, confidence


# --- the loop --------------------------------------------------------------------------------------------------------


def plain_decode(forward: Forward, prompt: Sequence[int], options: PlainOptions, index: int = 0) -> PlainResult:
    """Decode one prompt; `index` is its place in the call, which only seeds the noise."""
    start, total = len(prompt), len(prompt) + options.max_new_tokens
    canvas = list(prompt) + [options.mask_id] * options.max_new_tokens
    given = [position < start and canvas[position] != options.mask_id for position in range(total)]
    blocks = [list(range(s, min(s + options.block_length, total))) for s in range(start, total, options.block_length)]
    holes = [position for position in range(start) if canvas[position] == options.mask_id]
    if holes:
        blocks.insert(0, holes)
    result = PlainResult(canvas)
    seed, steps, end = options.seed + index, 0, None

    for block in blocks:
        result.decoded = block[-1] + 1 - start
        masks_at_start = sum(canvas[position] == options.mask_id for position in block)
        step_in_block = 0
        while any(canvas[position] == options.mask_id for position in block):
            logits = _logits(forward, canvas, given, options).double().tolist()
            result.forwards += 2 if options.cfg_scale > 0 else 1
            masked = [position for position in block if canvas[position] == options.mask_id]
            proposals = {p: _propose(logits[p], p, seed, steps, options) for p in masked}
            ranked = sorted(masked, key=lambda p: (-proposals[p][1], p))
            taken = ranked[: _count(options, [proposals[p][1] for p in ranked], masks_at_start, step_in_block)]
            for position in taken:
                canvas[position] = proposals[position][0]
            steps += 1
            step_in_block += 1
            if options.eos == "first" and end is None:
                stops = [p for p in taken if p >= start and canvas[p] in options.stop_ids]
                if stops:
                    end = min(stops) + 1
                    _fill(canvas, end, options)
            result.trace.append(list(canvas))
        if options.eos == "block" and any(p >= start and canvas[p] in options.stop_ids for p in block):
            end = block[-1] + 1
            _fill(canvas, end, options)
        if end is not None:
            break
    return result


def _fill(canvas: list[int], end: int, options: PlainOptions) -> None:
    """Masked positions behind the end become the fill id; what was committed stays."""
    for position in range(end, len(canvas)):
        if canvas[position] == options.mask_id:
            canvas[position] = options.fill_id
