# SPDX-License-Identifier: Apache-2.0
"""Figures of graphs: regions each pass rewrites, calls of each program, FLOPs and bytes of a step, bytes of caches.

Nothing is compiled. Programs are made by decoding two short prompts with each kind of cache and head.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig, OptimizedModel
from dllm_compile.costs import program_costs, total
from dllm_compile.passes import GraphPass, PassResult, finishing_passes
from dllm_compile.passes.graph import operator_counts
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.programs import ModelPrograms, Program
from dllm_compile.runtime.row_programs import StepInputs

from ..models import random_llada
from .expected import Figures

LAYERS = (2, 4)
PROMPTS: tuple[Tensor, ...] = (torch.arange(5, 8), torch.arange(8, 13))
FLASH: dict[str, Any] = {"cache": "flash", "window_length": 4, "lookahead": 2, "track": 2}
# Each makes one program or two.
DECODINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"cfg_scale": 0.5},
    {"cache": "lacache"},
    {"cache": "dual"},
    {**FLASH, "commit": "flash_verify"},
)
UNCOMPILED = CompileConfig(compile=False)
SHORT = DecodingConfig(max_new_tokens=8, block_length=4, eos="none")

Call = Mapping[str, Tensor]

# Inputs that are made anew for a step: everything else is kept between steps.
_OF_A_STEP = frozenset(
    {*(field.name for field in fields(StepInputs)), "cache_rows", "block_rows", "block_tiles"}
    | {"window", "spans", "views", "given", "own_rows"}
)


def graph_figures() -> Figures:
    """The graphs of tiny models, as they are on a CPU and as a card's passes leave them."""
    figures: Figures = {}
    for layers in LAYERS:
        fast, of_model = model_figures(layers)
        figures |= of_model
    figures |= program_figures(
        f"{layers} layers, passes of a card", fast, programs_of(fast, card_passes()), DECODINGS[4:]
    )
    return figures


def model_figures(
    layers: int, decodings: Iterable[dict[str, Any]] = DECODINGS, config: CompileConfig = UNCOMPILED
) -> tuple[OptimizedModel, Figures]:
    """Rewrite a tiny model; it, and the figures of its graph and programs."""
    fast = dllm_compile.optimize(random_llada("tiny", layers, "cpu"), config)
    assert isinstance(fast.programs, ModelPrograms)
    where = f"{layers} layers"
    figures = _passes(f"{where}/canonical", fast.report().passes)
    return fast, figures | program_figures(where, fast, fast.programs, decodings)


def has_fp8_package() -> bool:
    """Whether weights can be quantized here."""
    return importlib.util.find_spec("torchao") is not None


def fp8_figures() -> Figures:
    """Graphs whose feed-forward layers, but the first, are quantized."""
    return model_figures(LAYERS[-1], DECODINGS[4:], CompileConfig(compile=False, precision="fp8"))[1]


def program_figures(
    where: str, fast: OptimizedModel, programs: ModelPrograms, decodings: Iterable[dict[str, Any]] = DECODINGS
) -> Figures:
    """Figures of every program that `decodings` make."""
    with recorded() as calls:
        for options in decodings:
            decode(programs, fast.facts, PROMPTS, SHORT.replace(**options))
    programs.forward_program()
    figures: Figures = {}
    for program in programs.built:
        name = f"{where}/{program.name}"
        figures |= _passes(name, program.passes)
        figures |= {f"{name}/calls/{op}": count for op, count in operator_counts(program.gm).items()}
        if program.name not in calls:
            continue
        # Of the sizes that occurred, the step in the middle of an answer.
        inputs = min(calls[program.name], key=lambda call: call["ids"].shape[0])
        cost = total(program_costs(program.gm, inputs))
        state = sum(value.nbytes for key, value in inputs.items() if key not in _OF_A_STEP)
        figures |= {f"{name}/flops": cost.flops, f"{name}/bytes": cost.bytes, f"{name}/state bytes": state}
    return figures


def _passes(where: str, results: Iterable[PassResult]) -> Figures:
    return {f"{where}/matches/{result.name}": result.matches for result in results}


def card_passes() -> tuple[GraphPass, ...]:
    """Passes that end every program on a card in 16 bit: a projection and the norm behind it are one call."""
    return finishing_passes(torch.device("cuda"), torch.bfloat16, fp8=False)


def programs_of(fast: OptimizedModel, finish: Sequence[GraphPass] = ()) -> ModelPrograms:
    """Programs of a rewritten model, not compiled and made anew, that end in `finish`."""
    graph = fast._captured
    return ModelPrograms(
        graph.gm,
        layers=graph.layers,
        mask_token_id=fast.facts.mask_token_id,
        device=fast.device,
        compiled=False,
        finish=finish,
    )


@contextmanager
def recorded() -> Iterator[dict[str, list[Call]]]:
    """Inputs of every call of a program, by its name."""
    calls: dict[str, list[Call]] = defaultdict(list)
    original = Program.__call__

    def call(self: Program, **inputs: Tensor) -> Any:
        calls[self.name].append(inputs)
        return original(self, **inputs)

    with mock.patch.object(Program, "__call__", call):
        yield calls
