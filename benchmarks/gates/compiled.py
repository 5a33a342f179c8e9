# SPDX-License-Identifier: Apache-2.0
"""Figures of generated code: segments compiled, what they launch, and how often anything was compiled again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import dllm_compile
from dllm_compile import DecodingConfig, OptimizedModel
from dllm_compile.inspection.launches import program_launches
from dllm_compile.runtime.engine import decode

from ..models import random_llada
from .expected import Figures
from .graphs import FLASH, LAYERS

DECODINGS: dict[str, dict[str, Any]] = {
    "uncached": {},
    "dual": {"cache": "dual"},
    "flash, verify": {**FLASH, "commit": "flash_verify"},
}
"""By name; each makes one program, or two."""

# (prompt lengths, answer, block): one and several samples, sizes that are equal by chance, an answer of one token.
SIZES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((3, 5), 8, 4),
    ((1,), 1, 1),
    ((30,), 3, 2),
    ((4, 4, 4, 4), 4, 4),
)


def compiled_figures() -> Figures:
    """Compile the programs of a tiny model, run them with several sizes, and count."""
    fast = dllm_compile.optimize(random_llada("tiny", LAYERS[-1], "cpu"), compile=True)
    figures: Figures = {}
    for name, options in DECODINGS.items():
        figures |= code_figures(fast, name, options)
    return figures


def code_figures(fast: OptimizedModel, name: str, options: dict[str, Any]) -> Figures:
    """Figures of the programs that one way of decoding makes, and of the sizes it then meets."""
    known = {program.name for program in fast.programs.built}
    before = counters["stats"]["unique_graphs"]
    for lengths, answer, block in SIZES:
        config = DecodingConfig(max_new_tokens=answer, block_length=block, eos="none", **options)
        decode(fast.programs, fast.facts, _prompts(lengths), config)
    built = [program for program in fast.programs.built if program.name not in known]
    compiled = counters["stats"]["unique_graphs"] - before
    figures = {f"{name}/recompiles": compiled - sum(program.graphs for program in built)}
    for program in built:
        where = f"{name}/{program.name}"
        figures[f"{where}/segments"] = program.graphs
        launches = program_launches(program.sources, program.calls)
        if launches is None:
            raise RuntimeError(f"{where}: the generated code of {program.graphs} graphs is not at hand")
        figures[f"{where}/generated kernels"] = launches.generated
        figures[f"{where}/library calls"] = launches.library
        figures[f"{where}/operator calls"] = launches.operators
    return figures


def _prompts(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.arange(3, 3 + length) for length in lengths]
