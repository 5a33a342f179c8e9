# SPDX-License-Identifier: Apache-2.0
"""Small Python functions described in words, graded by running them on tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dllm_compile.models.small.problem import Problem, Split, draw
from dllm_compile.models.small.sandbox import run_tests

FAMILY = "code"

# name -> (words, Python condition on {v}, meaning)
_FILTERS: dict[str, tuple[str, str, Callable[[int, int], bool]]] = {
    "all": ("numbers", "", lambda v, c: True),
    "even": ("even numbers", "{v} % 2 == 0", lambda v, c: v % 2 == 0),
    "odd": ("odd numbers", "{v} % 2 == 1", lambda v, c: v % 2 == 1),
    "above": ("numbers above {c}", "{v} > {c}", lambda v, c: v > c),
    "below": ("numbers below {c}", "{v} < {c}", lambda v, c: v < c),
    "multiple": ("multiples of {c}", "{v} % {c} == 0", lambda v, c: v % c == 0),
    "not_multiple": ("numbers not divisible by {c}", "{v} % {c} != 0", lambda v, c: v % c != 0),
}
_MAPS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "same": ("the {filter}", "{v}", lambda v, d: v),
    "square": ("the squares of the {filter}", "{v} * {v}", lambda v, d: v * v),
    "plus": ("the {filter} plus {d}", "{v} + {d}", lambda v, d: v + d),
    "minus": ("the {filter} minus {d}", "{v} - {d}", lambda v, d: v - d),
    "times": ("the {filter} times {d}", "{v} * {d}", lambda v, d: v * d),
    "rest": ("the {filter} modulo {d}", "{v} % {d}", lambda v, d: v % d),
}
_FOLDS: dict[str, tuple[str, Callable[[list[int]], Any]]] = {
    "sum": ("the sum of {map}", sum),
    "count": ("how many values are left of {map}", len),
    "list": ("a list of {map}", lambda values: values),
    "max": ("the largest of {map}, or 0", lambda values: max(values, default=0)),
    "min": ("the smallest of {map}, or 0", lambda values: min(values, default=0)),
    "sorted": ("{map} in order", sorted),
}
_ASK = (
    "Write a Python function {f}({a}) that returns {what} in the list {a}.",
    "Define {f}({a}): given a list {a}, return {what}.",
    "Python: {f}({a}) returns {what} in {a}.",
)
_FUNCTIONS = ("solve", "compute", "f", "run", "answer", "process")
_LISTS = ("xs", "values", "items", "data", "nums")
_VARIABLES = ("x", "v", "n", "item")


def _template(rng: random.Random) -> tuple[str, str, str]:
    return rng.choice(tuple(_FOLDS)), rng.choice(tuple(_MAPS)), rng.choice(tuple(_FILTERS))


def _comprehension(fold: str, expression: str, condition: str, v: str, a: str) -> str:
    inner = f"{expression} for {v} in {a}" + (f" if {condition}" if condition else "")
    body = {
        "sum": f"sum({inner})",
        "count": f"len([{inner}])",
        "list": f"[{inner}]",
        "max": f"max([{inner}], default=0)",
        "min": f"min([{inner}], default=0)",
        "sorted": f"sorted({inner})",
    }[fold]
    return f"    return {body}"


def _loop(fold: str, expression: str, condition: str, v: str, a: str, out: str) -> str:
    start, update = {"sum": ("0", f"{out} += {expression}"), "count": ("0", f"{out} += 1")}.get(
        fold, ("[]", f"{out}.append({expression})")
    )
    lines = [f"    {out} = {start}", f"    for {v} in {a}:"]
    if condition:
        lines += [f"        if {condition}:", f"            {update}"]
    else:
        lines.append(f"        {update}")
    last = {"max": f"max({out}, default=0)", "min": f"min({out}, default=0)", "sorted": f"sorted({out})"}
    return "\n".join([*lines, f"    return {last.get(fold, out)}"])


def make(rng: random.Random, split: Split) -> Problem:
    """One function to write, with four tests."""
    fold, mapping, filtering = template = draw(FAMILY, "template", split, lambda: _template(rng), str)
    c, d = draw(FAMILY, "numbers", split, lambda: (rng.randint(2, 30), rng.randint(2, 30)), str)
    f, a, v = rng.choice(_FUNCTIONS), rng.choice(_LISTS), rng.choice(_VARIABLES)
    words, condition, keep = _FILTERS[filtering]
    map_words, expression, change = _MAPS[mapping]
    fold_words, collect = _FOLDS[fold]
    what = fold_words.format(map=map_words.format(filter=words.format(c=c), d=d))
    condition, expression = condition.format(v=v, c=c), expression.format(v=v, d=d)
    if rng.random() < 0.5:
        body = _comprehension(fold, expression, condition, v, a)
    else:
        body = _loop(fold, expression, condition, v, a, rng.choice(("result", "out", "total")))

    # Half of the values are near multiples of c, so that every condition is met by some and missed by others.
    def value() -> int:
        return rng.choice((rng.randint(0, 60), c * rng.randint(0, 3), c + rng.randint(-1, 1)))

    lists = [[value() for _ in range(rng.randint(4, 9))] for _ in range(3)]
    lists.append([])
    tests = [(values, collect([change(x, d) for x in values if keep(x, c)])) for values in lists]
    return Problem(
        prompt=rng.choice(_ASK).format(f=f, a=a, what=what),
        answer=f"def {f}({a}):\n{body}",
        family=FAMILY,
        template=str(template),
        numbers=(c, d),
        check={"function": f, "tests": tests},
    )


def grade(problem: Problem, text: str) -> bool:
    """Whether the function in `text` passes every test (run in a process of its own; see `sandbox`)."""
    return run_tests(text, problem.check["function"], problem.check["tests"])
