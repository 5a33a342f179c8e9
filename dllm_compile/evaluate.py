# SPDX-License-Identifier: Apache-2.0
"""Accuracy of decoding configurations on the bundled model's held-out problems, measured through `generate`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import DecodingConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from .optimized import OptimizedModel

FAMILIES = ("arithmetic", "code", "prose")
"""Families of held-out problems."""


@dataclass(frozen=True)
class Evaluation:
    """What one decoding configuration reached.

    Attributes:
        family: which problems.
        problems: how many.
        correct: how many were solved.
        answer_tokens: tokens of all answers, the stop id and what follows excluded.
        forwards: forwards in which a problem was active, summed over the problems.
        forwards_squared: sum of their squares, for the standard error.
        batch_forwards: forwards that were run; each is shared by the problems of a batch.
        row_forwards: rows computed, summed over the forwards: the work.
        seconds: wall time of the decode loops; how many problems share a forward decides it.
        batch_size: problems decoded together (changes `seconds` only).
        config: the configuration.
        solved: which problems were solved, for comparisons of the same problems under other configurations.
    """

    family: str
    problems: int
    correct: int
    answer_tokens: int
    forwards: int
    forwards_squared: int
    batch_forwards: int
    row_forwards: int
    seconds: float
    batch_size: int
    config: DecodingConfig
    solved: tuple[bool, ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of problems solved."""
        return self.correct / self.problems

    @property
    def accuracy_error(self) -> float:
        """Standard error of `accuracy` (binomial)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.problems)

    @property
    def forwards_per_problem(self) -> float:
        """Mean forwards a problem."""
        return self.forwards / self.problems

    @property
    def forwards_error(self) -> float:
        """Standard error of `forwards_per_problem`."""
        variance = self.forwards_squared / self.problems - self.forwards_per_problem**2
        return math.sqrt(max(variance, 0.0) / self.problems)

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens / forwards, over all problems."""
        return self.answer_tokens / self.forwards

    def to_dict(self) -> dict[str, Any]:
        """Every figure, and the fields of the configuration that differ from the defaults; ready for JSON."""
        config = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if getattr(self.config, field.name) != field.default
        }
        return {
            "family": self.family,
            "problems": self.problems,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "accuracy_error": self.accuracy_error,
            "answer_tokens": self.answer_tokens,
            "forwards": self.forwards,
            "forwards_per_problem": self.forwards_per_problem,
            "forwards_error": self.forwards_error,
            "tokens_per_forward": self.tokens_per_forward,
            "batch_forwards": self.batch_forwards,
            "row_forwards": self.row_forwards,
            "seconds": self.seconds,
            "batch_size": self.batch_size,
            "rule": self.config.rule,
            "config": config,
        }

    def __str__(self) -> str:
        return (
            f"{self.family}: {self.correct} of {self.problems} solved, "
            f"{100 * self.accuracy:.1f} ± {100 * self.accuracy_error:.1f} %\n"
            f"{self.forwards_per_problem:.1f} ± {self.forwards_error:.1f} forwards a problem, "
            f"{self.tokens_per_forward:.2f} answer tokens a forward\n"
            f"{self.seconds:.1f} s in batches of {self.batch_size} ({self.config.rule} rule)"
        )


def evaluate(
    fast: OptimizedModel,
    tokenizer: Any,
    config: DecodingConfig,
    *,
    family: str = "arithmetic",
    problems: int = 500,
    batch_size: int = 50,
    seed: int = 0,
    progress: bool = False,
) -> Evaluation:
    """Decode held-out problems and grade the answers.

    Args:
        fast: an optimized model that was trained on these families (the bundled one).
        tokenizer: its tokenizer.
        config: how to decode.
        family: "arithmetic", "code" or "prose". Answers of "code" are run, in a limited process.
        problems: how many; always the first ones of a fixed list.
        batch_size: problems decoded together; does not change any figure but the time.
        seed: another list of held-out problems.
        progress: show a bar over the problems.

    Raises:
        ConfigError: an unknown family, or a number below one.
    """
    from .models.small.families import MAKERS, grade
    from .models.small.problem import held_out

    if family not in MAKERS:
        raise ConfigError(f"no problem family {family!r}: choose one of {', '.join(sorted(MAKERS))}")
    if problems < 1 or batch_size < 1:
        raise ConfigError(f"problems and batch_size must be at least 1, not {problems} and {batch_size}")
    chosen = held_out(family, problems, seed)
    texts: list[str] = []
    forwards: list[int] = []
    answer_tokens, batch_forwards, row_forwards, seconds = 0, 0, 0, 0.0
    for batch in _batches(chosen, batch_size, progress):
        # Sample i of a call uses seed + i: without the offset every batch would draw the same noise.
        here = config.replace(seed=config.seed + len(texts))
        output = fast.generate([tokenizer(problem.prompt)["input_ids"] for problem in batch], here)
        answers, stats = output.answers, output.stats
        assert answers is not None and stats is not None, "generate fills both"
        texts += [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        forwards += stats.forwards_per_row
        answer_tokens += stats.answer_tokens
        batch_forwards += stats.forwards
        row_forwards += stats.row_forwards
        seconds += stats.seconds
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        solved = tuple(pool.map(grade, chosen, texts))
    return Evaluation(
        family=family,
        problems=problems,
        correct=sum(solved),
        answer_tokens=answer_tokens,
        forwards=sum(forwards),
        forwards_squared=sum(count * count for count in forwards),
        batch_forwards=batch_forwards,
        row_forwards=row_forwards,
        seconds=seconds,
        batch_size=batch_size,
        config=config,
        solved=solved,
    )


def _batches(items: Sequence[Any], size: int, progress: bool) -> Iterator[Sequence[Any]]:
    """`items` in runs of `size`, with a bar over the items when `progress` is set."""
    bar = None
    if progress:
        from tqdm.auto import tqdm

        bar = tqdm(total=len(items), unit="problem", dynamic_ncols=True)
    for at in range(0, len(items), size):
        yield items[at : at + size]
        if bar is not None:
            bar.update(len(items[at : at + size]))
    if bar is not None:
        bar.close()
