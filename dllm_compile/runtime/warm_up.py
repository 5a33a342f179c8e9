# SPDX-License-Identifier: Apache-2.0
"""Compile, tune and capture before the first prompt comes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._config_checks import integer_or_integers
from ..config import DecodingConfig
from ..errors import ConfigError, PromptError
from .engine import borrowed_session
from .facts import ModelFacts
from .layout import Sample
from .prompts import check_length, check_mask_token, check_prompts
from .row_programs import RowPrograms
from .session import SessionPool
from .slots import Slots


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        seconds: in all.
        graphs: steps that were captured.
        capture_seconds: of capturing alone.
        bytes: device memory that was reserved for caches, buffers and graphs; 0 on a CPU.
    """

    seconds: float
    graphs: int
    capture_seconds: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs captured in {self.capture_seconds:.1f} s, {self.seconds:.1f} s in all, "
            f"{self.bytes / 2**30:.2f} GiB reserved"
        )


@torch.no_grad()
def warm_up(
    programs: RowPrograms,
    facts: ModelFacts,
    prompt_lengths: Sequence[int],
    config: DecodingConfig,
    sessions: SessionPool | None,
    progress: bool = False,
) -> WarmUp:
    """Run every size of step that decoding prompts of these lengths may ask for, on samples that are done already.

    Args:
        programs, facts, config, sessions: as `decode` takes them.
        prompt_lengths: tokens of each prompt of a call, of which `config.slots` are decoded together.
        progress: show a bar over sizes.

    Raises:
        PromptError: `prompt_lengths` are no numbers of tokens, or such prompts could not be decoded.
        ConfigError: as `decode` would.
    """
    mask_id = check_mask_token(facts)
    lengths = _lengths(prompt_lengths)
    for i, length in enumerate(lengths):  # before a tensor is made of it
        check_length(i, length, facts, config)
    prompts = [torch.full((length,), int(mask_id == 0)) for length in lengths]
    check_prompts(prompts, facts, config)
    samples = [Sample.plan(i, prompt, config, mask_id) for i, prompt in enumerate(prompts)]
    slots = Slots.of(samples, config.slots)
    start, reserved = time.perf_counter(), _reserved(programs.device)
    with borrowed_session(programs, facts, samples, slots, config, sessions) as session:
        first = samples[: slots.free]
        session.prepare(session.start(first, [slots.base(sample) for sample in first], config))
        session.state.done.fill_(True)
        sizes = session.cache.sizes(session.layout)
        if session.captured is None:  # programs are compiled for all sizes at once
            sizes = list({refreshing: (refreshing, rows) for refreshing, rows in sizes[::-1]}.values())
        if progress:
            from tqdm.auto import tqdm

            sizes = tqdm(sizes, desc="warming up", unit="size", dynamic_ncols=True)
        for refreshing, rows in sizes:
            for _ in range(1 if session.captured is None else 2):
                session.rehearse(rows, refreshing=refreshing)
        captured = session.captured
        if captured is not None:
            captured.freeze()
            torch.cuda.synchronize(programs.device)
        return WarmUp(
            seconds=time.perf_counter() - start,
            graphs=0 if captured is None else len(captured),
            capture_seconds=0.0 if captured is None else captured.seconds,
            bytes=_reserved(programs.device) - reserved,
        )


def _lengths(prompt_lengths: object) -> tuple[int, ...]:
    """Tokens of each prompt.

    Raises:
        PromptError: they are no list of numbers from 0 on.
    """
    given = prompt_lengths.tolist() if isinstance(prompt_lengths, Tensor) else prompt_lengths
    try:
        found = integer_or_integers("prompt_lengths", given)
    except ConfigError:
        found = -1
    if isinstance(found, int) or min(found, default=0) < 0:
        raise PromptError(
            f"prompt_lengths must be a list with the number of tokens of each prompt, as in [768], not {given!r}"
        )
    return found


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
