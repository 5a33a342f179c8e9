# SPDX-License-Identifier: Apache-2.0
"""What was rewritten: the facts for a dictionary, a plain table and, in a terminal, a coloured one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.fx import GraphModule

from .inspection.examples import ExampleSize
from .inspection.launches import Launches, program_launches
from .inspection.python_code import value_text
from .inspection.work import Work, program_work
from .passes import PassResult
from .passes.graph import lookup, operator_counts, placeholders
from .passes.packing import plans
from .precision import Fp8Report
from .runtime.programs import ModelPrograms, Program
from .runtime.session import Session
from .runtime.shape import ModelShape

if TYPE_CHECKING:
    from .optimized import OptimizedModel

DEFAULT_SIZE = ExampleSize()
"""The size at which the work of a call is stated: one prompt of 256 tokens, 128 new ones in blocks of 32."""


@dataclass(frozen=True)
class ProgramReport:
    """One program: what it calls and how long it took to make.

    Attributes:
        name: `forward`, `step`, `cached_step`, ….
        operators: calls by operator, most frequent first.
        compiled: whether it is compiled.
        seconds: building and compiling.
        passes: that made it of the canonical graph.
        inputs: by name, with dtype and sizes; a symbol is a size that may vary.
        graphs: compiled graphs it consists of.
        launches: what a run starts, from the generated code; None where nothing was compiled.
        work: of one call at a named size; None where a program has inputs of which no example is known.
    """

    name: str
    operators: dict[str, int]
    compiled: bool
    seconds: float
    passes: tuple[PassResult, ...]
    inputs: dict[str, str]
    graphs: int
    launches: Launches | None
    work: Work | None


@dataclass(frozen=True)
class CacheBytes:
    """Memory of a cache.

    Attributes:
        caches: values of `DecodingConfig.cache`.
        formula: in words and numbers.
        bytes_per_row: for each row of each canvas that is decoded at the same time; twice with guidance.
    """

    caches: str
    formula: str
    bytes_per_row: int


@dataclass(frozen=True)
class SessionReport:
    """Buffers that are kept for the next call.

    Attributes:
        rows: rows of all canvases that fit.
        cache_bytes: of the caches among the buffers.
        captured_graphs: steps captured as CUDA graphs.
        capture_seconds: spent on that.
    """

    rows: int
    cache_bytes: int
    captured_graphs: int
    capture_seconds: float


@dataclass(frozen=True)
class Report:
    """What `optimize` did to a model. `print` it, `show()` it, or take `to_dict()`.

    Attributes:
        model: class name of the user's model.
        layers: N.
        dtype, device: of the parameters.
        passes: normalising and fusing passes over the canonical graph, in order.
        programs: programs built so far.
        logits_error: largest difference between the rewritten and the original model's logits on two ragged random
            samples, relative to the largest logit; before FP8.
        packed_bytes: bytes of packed weights; they share storage with the user's parameters.
        fp8: what FP8 does to the model, None where nothing is quantized.
        notes: everything that is not as fast or as complete as it could be here.
        capture_seconds: export and decomposition.
        caches: memory of each kind of cache; empty where there are no row programs.
        sessions: buffers kept between calls.
    """

    model: str
    layers: int
    dtype: str
    device: str
    passes: tuple[PassResult, ...]
    programs: tuple[ProgramReport, ...]
    logits_error: float
    packed_bytes: int
    notes: tuple[str, ...]
    capture_seconds: float
    fp8: Fp8Report | None = None
    caches: tuple[CacheBytes, ...] = ()
    sessions: tuple[SessionReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        for result in [*data["passes"], *(result for program in data["programs"] for result in program["passes"])]:
            result["level"] = result["level"].value
        return data

    def __str__(self) -> str:
        """A table of plain text."""
        from .report_text import text

        return text(self)

    def __rich__(self) -> Any:
        """What rich prints."""
        from .report_rich import renderable

        return renderable(self)

    def show(self, file: TextIO | None = None) -> None:
        """Print to `file` (None: standard output), by rich where that is a terminal and rich is installed."""
        file = sys.stdout if file is None else file
        if file.isatty():
            try:
                from rich.console import Console
            except ImportError:
                pass
            else:
                Console(file=file).print(self)
                return
        file.write(f"{self}\n")


def program_report(
    program: Program, size: ExampleSize, *, device: torch.device, dtype: torch.dtype, tile_rows: int | None
) -> ProgramReport:
    """The report of one program, with its work at a size."""
    return ProgramReport(
        name=program.name,
        operators=dict(operator_counts(program.gm).most_common()),
        compiled=program.compiled,
        seconds=program.seconds,
        passes=program.passes,
        inputs=input_texts(program.gm),
        graphs=program.graphs,
        launches=program_launches(program.sources, program.calls),
        work=program_work(program.gm, size, device=device, dtype=dtype, tile_rows=tile_rows),
    )


def input_texts(gm: GraphModule) -> dict[str, str]:
    """Inputs of a graph as `i64[s0]`."""
    return {str(node.target): value_text(node.meta["val"], strides=False) for node in placeholders(gm)}


def cache_bytes(shape: ModelShape) -> tuple[CacheBytes, ...]:
    """What the caches of a model take for each row."""
    itemsize = shape.dtype.itemsize
    keys = f"2 x {shape.layers} layers x {shape.kv_heads} key heads x {shape.head_dim} x {itemsize} bytes"
    return (
        CacheBytes(
            "prefix, dual, vicinity, dkv, flash",
            keys,
            2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize,
        ),
        CacheBytes(
            "lacache (layer 0)",
            "one embedding row; q, k, v in the model's dtype and m, l, O in fp32",
            shape.lacache_bytes_per_row(1),
        ),
    )


def session_reports(sessions: Sequence[Session]) -> tuple[SessionReport, ...]:
    """Reports of sessions that are kept."""
    return tuple(
        SessionReport(
            rows=session.layout.rows,
            cache_bytes=int(getattr(session.cache, "cache_bytes", 0)),
            captured_graphs=0 if session.captured is None else len(session.captured),
            capture_seconds=0.0 if session.captured is None else session.captured.seconds,
        )
        for session in sessions
    )


def model_report(fast: OptimizedModel, size: ExampleSize = DEFAULT_SIZE) -> Report:
    """The report of an optimized model so far."""
    parameter = next(fast.model.parameters())
    packed = [lookup(fast._captured.gm, packing.path) for packing in plans(fast._captured.gm)]
    programs = fast.programs
    size = size.within(fast.facts.max_sequence_length)
    return Report(
        model=type(fast.model).__name__,
        layers=fast._captured.layers,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        passes=fast._results,
        programs=tuple(
            program_report(program, size, device=parameter.device, dtype=parameter.dtype, tile_rows=programs.tile_rows)
            for program in programs.built
        ),
        logits_error=fast._logits_error,
        packed_bytes=sum(tensor.numel() * tensor.element_size() for tensor in packed),
        notes=tuple(fast._notes),
        capture_seconds=fast._capture_seconds,
        fp8=fast._fp8,
        caches=cache_bytes(programs.shape) if isinstance(programs, ModelPrograms) else (),
        sessions=() if fast._sessions is None else session_reports(fast._sessions.idle()),
    )
