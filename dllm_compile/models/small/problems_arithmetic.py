# SPDX-License-Identifier: Apache-2.0
"""Word problems of two to five dependent steps, with distracting facts, and worked answers ending in `#### n`.

Training text is deliberately ambiguous in form: each step has several wordings, some with the result before its
expression, and independent steps come in any order. Tokens are then often individually unsure but tied to each other,
which is where committing many at once costs accuracy.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from dllm_compile.models.small.problem import NoDrawError, Problem, Split, draw

FAMILY = "arithmetic"
NAMES = ("Mia", "Tom", "Ana", "Leo", "Zoe", "Sam", "Eva", "Max", "Lea", "Ben", "Ida", "Jon", "Amy", "Kai", "Una", "Raj")
ITEMS = (
    "pens", "apples", "stamps", "coins", "shells", "books", "cards", "beads",
    "tickets", "eggs", "nails", "bricks", "candles", "buttons", "marbles", "bottles",
)  # fmt: skip
MAX_TOTAL = 399
MAX_BOXES = 9
MAX_EACH = 12
# Fewest and most steps on each side: training has easier problems too, the held-out ones are all worth asking.
STEPS: dict[Split, tuple[int, int]] = {"train": (1, 5), "held_out": (2, 5)}

# Steps each operation takes: a product of its own comes before it is added or taken away.
_STEPS = {"add": 1, "sub": 1, "boxes": 2, "bags": 2, "times": 1, "share": 1}
_OPS = tuple(_STEPS)

_START = ("{name} has {a} {items}.", "{name} starts with {a} {items}.", "At first {name} owns {a} {items}.")
_TELL = {
    "add": ("{name} buys {a} more.", "{name} finds {a} more {items}.", "A friend gives {name} {a} {items}."),
    "sub": ("{name} sells {a} of them.", "{name} gives away {a} {items}.", "{name} loses {a}."),
    "boxes": ("{name} gets {a} boxes of {b} {items}.", "Then {a} boxes with {b} {items} each come for {name}."),
    "bags": ("{name} sends off {a} bags of {b} {items}.", "{name} fills {a} bags with {b} {items} each for others."),
    "times": ("Then {name} has {a} times as many.", "After a while {name} owns {a} times that number."),
    "share": ("{name} keeps one of {a} equal parts.", "{name} splits them in {a} equal parts and keeps one."),
}
_DISTRACT = (
    "{other} has {a} {items}.",
    "{other} wants {a} {things}.",
    "The shop also sells {a} {things}.",
    "{other} is {b} years old.",
    "It is {b} degrees outside.",
)
_ASK = {
    "one": ("How many {items} does {name} have now?", "How many {items} are left with {name}?"),
    "sum": ("How many {items} do {name} and {friend} have together?", "What do {name} and {friend} have in all?"),
    "diff": ("How many more {items} does {name} have than {friend}?", "By how much is {name} ahead of {friend}?"),
}
_WORDINGS = (
    "{x} = {z}.",
    "Then {x} = {z}.",
    "{name}: {x} = {z}.",
    "We get {z} from {x}.",
    "Now {z} {items} ({x}).",
)


@dataclass(frozen=True)
class _Step:
    """One computation: who it is for, `x op y = z`, and the steps it needs first."""

    owner: str
    expression: str
    result: int
    needs: tuple[int, ...]


def _template(rng: random.Random, split: Split) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Kind of question and the operations of one or two people; None if the steps are too few or too many."""
    kind = rng.choice(("one", "one", "sum", "diff"))
    second: tuple[str, ...] = ()
    if kind == "one":
        first = tuple(rng.choices(_OPS, k=rng.randint(1, 5)))
    else:
        first, second = tuple(rng.choices(_OPS, k=rng.randint(1, 2))), tuple(rng.choices(_OPS, k=rng.randint(0, 2)))
    steps = sum(_STEPS[op] for op in first + second) + (kind != "one")
    fewest, most = STEPS[split]
    return (kind, first, second) if fewest <= steps <= most else None


def _chain(rng: random.Random, ops: tuple[str, ...]) -> tuple[int, list[tuple[int, ...]]] | None:
    """A start and the operands of `ops` such that every total is in 1 ... MAX_TOTAL, or None."""
    start = total = rng.randint(5, 99)
    operands: list[tuple[int, ...]] = []
    for op in ops:
        if op == "add":
            values: tuple[int, ...] = (rng.randint(3, 99),)
            total += values[0]
        elif op == "sub":
            if total < 8:
                return None
            values = (rng.randint(3, min(99, total - 2)),)
            total -= values[0]
        elif op == "boxes":
            values = (rng.randint(2, MAX_BOXES), rng.randint(3, MAX_EACH))
            total += values[0] * values[1]
        elif op == "bags":
            if total < 12:
                return None
            each = rng.randint(3, min(MAX_EACH, (total - 2) // 2))
            values = (rng.randint(2, min(MAX_BOXES, (total - 2) // each)), each)
            total -= values[0] * values[1]
        elif op == "times":
            values = (rng.randint(2, 4),)
            total *= values[0]
        else:
            parts = [part for part in range(2, 6) if total % part == 0]
            if not parts:
                return None
            values = (rng.choice(parts),)
            total //= values[0]
        if not 0 < total <= MAX_TOTAL:
            return None
        operands.append(values)
    return start, operands


def _steps(owner: str, start: int, ops: tuple[str, ...], operands: list[tuple[int, ...]], base: int) -> list[_Step]:
    """The computations of one person, numbered from `base`."""
    steps: list[_Step] = []
    total, last = start, ()  # type: int, tuple[int, ...]
    for op, values in zip(ops, operands, strict=True):
        amount = values[0]
        needs = last
        if op in ("boxes", "bags"):
            amount = values[0] * values[1]
            steps.append(_Step(owner, f"{values[0]} * {values[1]}", amount, ()))
            needs = (*last, base + len(steps) - 1)
        sign = {"add": "+", "boxes": "+", "sub": "-", "bags": "-", "times": "*", "share": "/"}[op]
        result = {"+": total + amount, "-": total - amount, "*": total * amount, "/": total // amount}[sign]
        steps.append(_Step(owner, f"{total} {sign} {amount}", result, needs))
        total, last = result, (base + len(steps) - 1,)
    return steps


def _order(rng: random.Random, steps: list[_Step]) -> list[_Step]:
    """A random order in which every step comes after those it needs; mostly the story's own order."""
    done: set[int] = set()
    ordered: list[_Step] = []
    while len(ordered) < len(steps):
        ready = [i for i, step in enumerate(steps) if i not in done and done.issuperset(step.needs)]
        pick = ready[0] if rng.random() < 0.6 else rng.choice(ready)
        done.add(pick)
        ordered.append(steps[pick])
    return ordered


def _numbers(
    rng: random.Random, kind: str, first: tuple[str, ...], second: tuple[str, ...]
) -> tuple[tuple[int, list[tuple[int, ...]]], tuple[int, list[tuple[int, ...]]] | None] | None:
    """Operands for both people, or None when they do not fit the question."""
    mine = _chain(rng, first)
    theirs = _chain(rng, second) if kind != "one" else None
    if mine is None or (kind != "one" and theirs is None):
        return None
    return mine, theirs


def _pair(
    rng: random.Random, split: Split, kind: str, first: tuple[str, ...], second: tuple[str, ...]
) -> tuple[tuple[int, list[tuple[int, ...]]], tuple[int, list[tuple[int, ...]]] | None] | None:
    """Operands on the right side of the split, or None where a template hardly ever has any (many products, say)."""
    try:
        return draw(FAMILY, "numbers", split, lambda: _numbers(rng, kind, first, second), _flat, max_draws=100)
    except NoDrawError:
        return None


def _flat(pair: tuple[tuple[int, list[tuple[int, ...]]], tuple[int, list[tuple[int, ...]]] | None]) -> tuple[int, ...]:
    return tuple(
        value
        for part in pair
        if part is not None
        for value in (part[0], *(operand for operands in part[1] for operand in operands))
    )


def make(rng: random.Random, split: Split) -> Problem:
    """One word problem on the given side of the split."""
    while True:
        kind, first, second = draw(FAMILY, "template", split, lambda: _template(rng, split), str)
        pair = _pair(rng, split, kind, first, second)
        if pair is None:
            continue
        names = rng.sample(NAMES, 4)
        items, things = rng.sample(ITEMS, 2)
        steps = _steps(names[0], pair[0][0], first, pair[0][1], 0)
        mine = steps[-1].result
        if pair[1] is not None:
            before = len(steps)
            steps += _steps(names[1], pair[1][0], second, pair[1][1], before)
            theirs = steps[-1].result if second else pair[1][0]
            needs = (before - 1, *((len(steps) - 1,) if second else ()))
            if kind == "diff" and mine <= theirs:
                continue
            sign, result = ("+", mine + theirs) if kind == "sum" else ("-", mine - theirs)
            steps.append(_Step("All" if kind == "sum" else "More", f"{mine} {sign} {theirs}", result, needs))
        if steps[-1].result <= MAX_TOTAL:
            break
    sentences = _tell(rng, names[0], items, pair[0][0], first, pair[0][1])
    if pair[1] is not None:
        sentences += _tell(rng, names[1], items, pair[1][0], second, pair[1][1])
    for _ in range(rng.choice((0, 1, 1))):
        fact = rng.choice(_DISTRACT).format(
            other=rng.choice(names[2:]), a=rng.randint(3, 99), b=rng.randint(8, 40), items=items, things=things
        )
        sentences.insert(rng.randint(0, len(sentences)), fact)
    sentences.append(rng.choice(_ASK[kind]).format(name=names[0], friend=names[1], items=items))
    worked = [
        rng.choice(_WORDINGS).format(x=step.expression, z=step.result, name=step.owner, items=items)
        for step in _order(rng, steps)
    ]
    value = steps[-1].result
    return Problem(
        prompt=" ".join(sentences),
        answer=" ".join(worked) + f"\n#### {value}",
        family=FAMILY,
        template=str((kind, first, second)),
        numbers=_flat(pair),
        check={"value": value, "steps": len(steps)},
    )


def _tell(
    rng: random.Random, name: str, items: str, start: int, ops: tuple[str, ...], operands: list[tuple[int, ...]]
) -> list[str]:
    """The sentences about one person."""
    sentences = [rng.choice(_START).format(name=name, a=start, items=items)]
    for op, values in zip(ops, operands, strict=True):
        sentences.append(rng.choice(_TELL[op]).format(name=name, items=items, a=values[0], b=values[-1]))
    return sentences


def grade(problem: Problem, text: str) -> bool:
    """Whether the number after the first `####` is the right one."""
    found = re.search(r"####\s*(-?\d+)", text)
    return found is not None and int(found.group(1)) == problem.check["value"]
