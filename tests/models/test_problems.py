# SPDX-License-Identifier: Apache-2.0
"""Generated problems: determinism, the split, the graders and the sandbox."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dllm_compile.models.small import sandbox
from dllm_compile.models.small.families import MAKERS, grade
from dllm_compile.models.small.problem import held_out, is_held_out, training

FAMILIES = sorted(MAKERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_problems(family: str) -> None:
    assert held_out(family, 20, seed=4) == held_out(family, 20, seed=4)
    assert held_out(family, 30, seed=4)[:20] == held_out(family, 20, seed=4)
    assert held_out(family, 20, seed=4) != held_out(family, 20, seed=5)
    assert training(family, 20) != held_out(family, 20)


def test_the_first_problem_is_what_it_was() -> None:
    # The split and the streams are part of every published figure: a change here makes old figures meaningless.
    first = held_out("prose", 1)[0]
    assert first.prompt == "Write a few lines: Leo, 58 lamps, the library."


@pytest.mark.parametrize("family", FAMILIES)
def test_split_is_disjoint_by_template_and_by_numbers(family: str) -> None:
    train, rest = training(family, 1500), held_out(family, 200)
    assert not {p.template for p in train} & {p.template for p in rest}
    assert not {p.numbers for p in train} & {p.numbers for p in rest}
    for problem in train:
        assert not is_held_out(family, "template", problem.template)
    for problem in rest:
        assert is_held_out(family, "template", problem.template)
        # The numbers are hashed in the form they are drawn in: a tuple, or the tuple of operands.
        assert is_held_out(family, "numbers", problem.numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_right_answers_pass_and_others_fail(family: str) -> None:
    problems = held_out(family, 12) + training(family, 12)
    for problem, other in zip(problems, [*problems[1:], problems[0]], strict=True):
        assert problem.family == family
        assert grade(problem, problem.answer)
        assert not grade(problem, "")
        assert not grade(problem, problem.prompt)
        if family != "code" and problem.check != other.check:
            assert not grade(problem, other.answer)


def test_worked_steps_are_right_and_complete() -> None:
    for problem in held_out("arithmetic", 200) + training("arithmetic", 200):
        expressions = re.findall(r"(\d+) ([-+*/]) (\d+)", problem.answer)
        assert len(expressions) == problem.check["steps"]
        for left, sign, right in expressions:
            x, y = int(left), int(right)
            value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[sign]
            assert value > 0
            assert sign != "/" or x % y == 0
            assert re.search(rf"\b{value}\b", problem.answer)
        assert problem.answer.endswith(f"\n#### {problem.check['value']}")


def test_arithmetic_takes_the_first_marked_number() -> None:
    problem = held_out("arithmetic", 1)[0]
    value = problem.check["value"]
    assert grade(problem, f"so\n####{value} and #### {value + 1}")
    assert not grade(problem, f"#### {value + 1} #### {value}")
    assert not grade(problem, f"the answer is {value}")
    assert not grade(problem, f"#### {value}0")


def test_wrong_code_fails() -> None:
    problem = replace(held_out("code", 1)[0], check={"function": "f", "tests": [([1, 2, 3], 6), ([], 0)]})
    assert grade(problem, "def f(a):\n    return sum(a)")
    assert not grade(problem, "def f(a):\n    return sum(a) + 1")
    assert not grade(problem, "def g(a):\n    return sum(a)")
    assert not grade(problem, "def f(a):\n    return sum(a")
    assert not grade(problem, "def f(a):\n    return unknown")


@pytest.mark.parametrize(
    "body",
    [
        "import os",
        "return open('x')",
        "return a.__class__",
        "return __import__('os')",
        "return (lambda: 1)()",
        "return a.sort()",
        "return 9 ** 9 ** 9",
        "return eval('1')",
        "while 1: pass",
    ],
)
def test_what_could_do_harm_is_refused_or_has_no_name(body: str) -> None:
    assert not sandbox.run_tests(f"def f(a):\n    {body}\n    return 1", "f", [([1], 1)])


def test_an_endless_function_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 1.0)
    code = "def f(a):\n    for x in a:\n        a.append(x)\n    return 1"
    assert not sandbox.run_tests(code, "f", [([1], 1)])
