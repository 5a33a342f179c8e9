# SPDX-License-Identifier: Apache-2.0
"""The three families of problems by name: how each is made and graded."""

from __future__ import annotations

import random
from collections.abc import Callable

from dllm_compile.models.small import problems_arithmetic, problems_code, problems_prose
from dllm_compile.models.small.problem import Problem, Split

MAKERS: dict[str, Callable[[random.Random, Split], Problem]] = {
    "arithmetic": problems_arithmetic.make,
    "code": problems_code.make,
    "prose": problems_prose.make,
}

_GRADERS: dict[str, Callable[[Problem, str], bool]] = {
    "arithmetic": problems_arithmetic.grade,
    "code": problems_code.grade,
    "prose": problems_prose.grade,
}


def grade(problem: Problem, text: str) -> bool:
    """Whether `text`, a decoded answer, solves `problem`."""
    return _GRADERS[problem.family](problem, text)
