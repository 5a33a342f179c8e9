# SPDX-License-Identifier: Apache-2.0
"""Run the same prompts through this package, the plain loop and a compiled plain loop, in turns, and count alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._compat import can_compile
from .._config_checks import integer
from ..cards import card_of
from ..config import DecodingConfig
from ..runtime.output import DecodingStats, GenerationOutput
from ..runtime.prompts import check_mask_token, check_prompts, split_prompts
from .environment import device_name, environment
from .floor import call_work, floor_seconds
from .plain import decode_plainly, plain_config

if TYPE_CHECKING:
    from ..optimized import OptimizedModel

OURS = "dllm_compile"


@dataclass(frozen=True)
class Contender:
    """One way of decoding the prompts, measured.

    Attributes:
        name: what ran.
        stats: of the round with the median time.
        seconds: wall time of each round's call.
        first_seconds: of the first call, with whatever is compiled, captured and tuned in it; not in the figures.
        peak_bytes: most device memory in use during the rounds, weights included; None on a CPU.
    """

    name: str
    stats: DecodingStats
    seconds: tuple[float, ...]
    first_seconds: float
    peak_bytes: int | None

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        return (max(self.seconds) - min(self.seconds)) / self.stats.seconds

    def figures(self) -> dict[str, float]:
        """Every rate by name; prompt tokens are counted in none."""
        stats = self.stats
        return {
            "answer_tokens_per_second": stats.tokens_per_second,
            "answer_tokens_per_second_per_row": stats.tokens_per_second_per_row,
            "canvas_tokens_per_second": stats.canvas_tokens / stats.seconds,
            "canvas_tokens_per_second_per_row": stats.canvas_tokens / stats.seconds / stats.batch,
            "answer_tokens_per_forward": stats.tokens_per_forward,
            "canvas_tokens_per_forward": stats.canvas_tokens / sum(stats.forwards_per_row),
            "ms_per_forward": stats.ms_per_forward,
        }


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        environment: card (or processor), date, versions, commit, and what was measured on it.
        batch: prompts of a call.
        prompt_lengths: tokens of each.
        max_new_tokens: G.
        rule, cache: in force.
        optimize_seconds: capturing and rewriting, once; NaN where the caller did not say.
        contenders: this package first.
        ratios: by contender, how many times as long as this package it takes, for a call and for a forward: medians of
            the ratios of rounds.
        floor_seconds: what the forwards of a call take at least on this card; None where the card is not known.
        floor_share: that over the time measured.
        notes: what to keep in mind when reading the figures.
    """

    environment: dict[str, Any]
    batch: int
    prompt_lengths: tuple[int, ...]
    max_new_tokens: int
    rule: str
    cache: str
    optimize_seconds: float
    contenders: tuple[Contender, ...]
    ratios: dict[str, dict[str, float]]
    floor_seconds: float | None
    floor_share: float | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        for one, contender in zip(data["contenders"], self.contenders, strict=True):
            one["stats"] = contender.stats.as_dict()
            one["figures"] = contender.figures()
            one["spread"] = contender.spread
        return data

    def __str__(self) -> str:
        from .table import table

        return table(self)


def bench(
    fast: OptimizedModel,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    *,
    rounds: int = 3,
    baselines: bool = True,
    optimize_seconds: float = float("nan"),
    notes: Sequence[str] = (),
) -> Bench:
    """Measure a call of `generate`, and the same prompts in the plain loop on the user's own model.

    Args:
        fast: what `optimize` returned.
        prompts: token ids.
        config: how to decode.
        rounds: each runs every contender once, one after the other.
        baselines: whether the plain loops run.
        optimize_seconds: what `optimize` took, for the record.
        notes: what else is to be kept in mind.

    Raises:
        ConfigError: an option that the plain loop does not have, or `rounds` below 1.
        PromptError: as `generate`.
    """
    integer("rounds", rounds, 1)
    same_rule = plain_config(config) if baselines else config
    given = [list(map(int, prompt)) for prompt in prompts]
    check_prompts(split_prompts(given), fast.facts, config)
    check_mask_token(fast.facts)
    calls: dict[str, Callable[[], GenerationOutput]] = {OURS: lambda: fast.generate(given, config)}
    told = list(notes)
    if baselines:
        more, about = _baselines(fast, given, config, same_rule)
        calls |= more
        told += about
    contenders, ratios = _measured(calls, rounds, fast.device)
    fast.free_buffers()
    floor, note = _floor(fast, given, config)
    if note is not None:
        told.append(note)
    return Bench(
        environment=_environment(fast),
        batch=len(given),
        prompt_lengths=tuple(map(len, given)),
        max_new_tokens=config.max_new_tokens,
        rule=config.rule,
        cache=config.cache,
        optimize_seconds=optimize_seconds,
        contenders=contenders,
        ratios=ratios,
        floor_seconds=floor,
        floor_share=None if floor is None else floor / contenders[0].stats.seconds,
        notes=tuple(told),
    )


def _baselines(
    fast: OptimizedModel,
    prompts: list[list[int]],
    config: DecodingConfig,
    same_rule: DecodingConfig,
) -> tuple[dict[str, Callable[[], GenerationOutput]], list[str]]:
    """The plain loops by name, and what is to be said about them."""

    def looped(forward: Callable[[Tensor], Any], how: DecodingConfig) -> Callable[[], GenerationOutput]:
        def logits(ids: Tensor) -> Tensor:
            out = forward(ids)
            return out if isinstance(out, Tensor) else out.logits

        return lambda: decode_plainly(logits, prompts, how, fast.facts, fast.device)

    one = DecodingConfig(
        max_new_tokens=config.max_new_tokens,
        block_length=config.block_length,
        eos=config.eos_rule,
        eos_token_id=config.eos_token_id,
    )
    calls = {"plain loop, one token a step": looped(fast.model, one)}
    if same_rule.rule != "quota" or same_rule.steps is not None:
        calls["plain loop, same rule"] = looped(fast.model, same_rule)
    notes = []
    if config.rule == "flash_verify":
        notes.append("the plain loop commits what passes the threshold; it has no verify pass")
    if config.cache != "none" or config.suffix != "all":
        notes.append("the plain loop computes every row in every step, so it may commit other tokens than a cache does")
    if len({len(prompt) for prompt in prompts}) > 1:
        notes.append("the plain loop has no padding: it decodes prompts of different lengths one after the other")
    if fast.compile_config.compile is False:
        notes.append("torch.compile alone was not measured, since compile=False")
    elif can_compile(fast.device):
        calls["plain loop, same rule, torch.compile"] = looped(torch.compile(fast.model), same_rule)
    else:
        notes.append("torch.compile alone was not measured: there is no compiler for this device")
    return calls, notes


def _measured(
    calls: dict[str, Callable[[], GenerationOutput]], rounds: int, device: torch.device
) -> tuple[tuple[Contender, ...], dict[str, dict[str, float]]]:
    first: dict[str, float] = {}
    for name, call in calls.items():
        started = time.perf_counter()
        call()
        first[name] = time.perf_counter() - started
        call()  # a size is captured when it comes back
    stats: dict[str, list[DecodingStats]] = {name: [] for name in calls}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            output = call()
            assert output.stats is not None, "generate fills it"
            stats[name].append(output.stats)
            if device.type == "cuda":
                peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(device))
    contenders = tuple(
        Contender(
            name=name,
            stats=sorted(found, key=lambda one: one.seconds)[len(found) // 2],
            seconds=tuple(one.seconds for one in found),
            first_seconds=first[name],
            peak_bytes=peaks.get(name),
        )
        for name, found in stats.items()
    )
    ratios = {
        name: {
            "call": statistics.median(a.seconds / b.seconds for a, b in zip(found, stats[OURS], strict=True)),
            "forward": statistics.median(
                a.ms_per_forward / b.ms_per_forward for a, b in zip(found, stats[OURS], strict=True)
            ),
        }
        for name, found in stats.items()
        if name != OURS
    }
    return contenders, ratios


def _floor(fast: OptimizedModel, prompts: list[list[int]], config: DecodingConfig) -> tuple[float | None, str | None]:
    """Seconds, or why there are none."""
    card = card_of(fast.device)
    if card is None:
        return None, f"no floor: rates of {device_name(fast.device)} are not in dllm_compile/cards.py"
    if next(fast.model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        return None, "no floor: it is known for 16-bit parameters only"
    work = call_work(fast, prompts, config)
    return (None, "no floor: this model has no row programs") if work is None else (floor_seconds(work, card), None)


def _environment(fast: OptimizedModel) -> dict[str, Any]:
    parameter = next(fast.model.parameters())
    return {
        **environment(fast.device),
        "model": type(fast.model).__name__,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "precision": fast.compile_config.precision,
        "compiled": all(program.compiled for program in fast.programs.built),
    }
