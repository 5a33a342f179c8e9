# SPDX-License-Identifier: Apache-2.0
"""Forwards that the bundled model needs for a few fixed problems and the rows they compute, by rule and cache.

In fp32 on a CPU. A token is kept because a confidence is above a threshold, so a machine whose sums round otherwise
could count one forward more or less where a confidence lies within rounding of it; none of these problems has one.
"""

from __future__ import annotations

from typing import Any

import dllm_compile
from dllm_compile import OptimizedModel
from dllm_compile.models import load_small, load_small_tokenizer
from dllm_compile.models.small.families import grade
from dllm_compile.models.small.problem import held_out

from .expected import Figures

PROBLEMS: tuple[tuple[str, int], ...] = (("arithmetic", 3), ("code", 1))
DECODINGS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.9},
    "factor, dual": {"factor": 1.0, "cache": "dual"},
    "threshold, flash": {"threshold": 0.9, "cache": "flash", "track": 16, "lookahead": 16},
    "verify, flash": {"commit": "flash_verify", "cache": "flash", "track": 16, "lookahead": 16},
}
TOKENS = 64


def decoding_figures(fast: OptimizedModel | None = None) -> Figures:
    """Decode the problems with each configuration.

    Args:
        fast: the bundled model in fp32 on a CPU, not compiled; None makes it.
    """
    fast = dllm_compile.optimize(load_small(device="cpu"), compile=False) if fast is None else fast
    tokenizer = load_small_tokenizer()
    problems = [problem for family, count in PROBLEMS for problem in held_out(family, count)]
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    figures: Figures = {}
    for name, options in DECODINGS.items():
        output = fast.generate(prompts, max_new_tokens=TOKENS, **options)
        assert output.stats is not None, "generate fills it"
        assert output.answers is not None, "generate fills it"
        for i, forwards in enumerate(output.stats.forwards_per_row):
            figures[f"{name}/forwards/problem {i}"] = forwards
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in output.answers]
        figures[f"{name}/row forwards"] = output.stats.row_forwards
        figures[f"{name}/answer tokens"] = output.stats.answer_tokens
        figures[f"{name}/solved"] = sum(grade(problem, text) for problem, text in zip(problems, texts, strict=True))
    return figures
