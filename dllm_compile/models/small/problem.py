# SPDX-License-Identifier: Apache-2.0
"""What a generated problem is, and the fixed split between training and held-out ones.

A problem has a template (its structure) and numbers (its free values). Both are hashed; training draws only templates
*and* numbers on one side, held-out problems only templates *and* numbers on the other, so that a held-out problem
shares neither with any training text, however much of it is generated.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeVar

Split = Literal["train", "held_out"]
T = TypeVar("T")

HELD_OUT_PERCENT = 12
_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class Problem:
    """One prompt with one right answer among many wordings.

    Attributes:
        prompt: what the model is given.
        answer: a complete answer, as in the training text.
        family: "arithmetic", "code" or "prose".
        template: the structure, as hashed for the split.
        numbers: the free values, as hashed for the split.
        check: what `grade` needs; the keys depend on the family.
    """

    prompt: str
    answer: str
    family: str
    template: str
    numbers: tuple[int, ...]
    check: dict[str, Any] = field(hash=False)


def is_held_out(family: str, part: str, value: object) -> bool:
    """Whether a template or a tuple of numbers (`part` says which) belongs to the held-out side."""
    digest = hashlib.blake2b(f"{family}/{part}/{value}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


class NoDrawError(RuntimeError):
    """Nothing on the asked-for side of the split was found."""


def draw(
    family: str,
    part: str,
    split: Split,
    make: Callable[[], T | None],
    key: Callable[[T], object],
    max_draws: int = _MAX_DRAWS,
) -> T:
    """Call `make` until its value (None = try again) lies on the side of `split`; `NoDrawError` if none does."""
    for _ in range(max_draws):
        value = make()
        if value is not None and is_held_out(family, part, key(value)) == (split == "held_out"):
            return value
    raise NoDrawError(f"no {family} {part} for the {split} side in {max_draws} draws")


def stream(family: str, split: Split, seed: int) -> Iterator[Problem]:
    """Endless problems of a family; the same seed gives the same ones on every machine."""
    from dllm_compile.models.small import families

    make = families.MAKERS[family]
    for number in count():
        yield make(random.Random(f"{family}/{split}/{seed}/{number}"), split)


def held_out(family: str, n: int, seed: int = 0) -> list[Problem]:
    """`n` held-out problems of a family."""
    problems = stream(family, "held_out", seed)
    return [next(problems) for _ in range(n)]


def training(family: str, n: int, seed: int = 0) -> list[Problem]:
    """`n` training problems of a family."""
    problems = stream(family, "train", seed)
    return [next(problems) for _ in range(n)]
