# SPDX-License-Identifier: Apache-2.0
"""What was rewritten: a table for people, a dictionary for machines, and the graphs as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from .passes import PassResult
from .passes.graph import operator_counts
from .precision import Fp8Report
from .runtime.programs import Program


@dataclass(frozen=True)
class ProgramReport:
    """One program: what it calls and how long it took to make."""

    name: str
    operators: dict[str, int]
    compiled: bool
    seconds: float
    passes: tuple[PassResult, ...]


@dataclass(frozen=True)
class Report:
    """What `optimize` did to a model.

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        for result in [*data["passes"], *(result for program in data["programs"] for result in program["passes"])]:
            result["level"] = result["level"].value
        return data

    def __str__(self) -> str:
        """A table a terminal can show."""
        what = f"{self.model}: {self.layers} layers, {self.dtype} on {self.device}"
        lines = [f"{what}; captured in {self.capture_seconds:.1f} s", "", *_pass_table(self.passes)]
        for program in self.programs:
            how = "compiled" if program.compiled else "not compiled"
            lines += ["", f"program {program.name} ({how}, {program.seconds:.1f} s): {_operators(program.operators)}"]
            lines += _pass_table(program.passes)
        lines += [
            "",
            f"largest difference of rewritten and original logits: {self.logits_error:.1e} of the largest logit",
        ]
        lines += [f"packed weights: {self.packed_bytes / 2**20:.1f} MiB, shared with the model's parameters (0 extra)"]
        lines += [] if self.fp8 is None else self.fp8.lines()
        refusals = [f"{result.name}: {refusal}" for result in self.passes for refusal in result.refusals]
        lines += [f"left as it was - {refusal}" for refusal in refusals]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def program_report(program: Program) -> ProgramReport:
    """The report of one program."""
    operators = dict(operator_counts(program.gm).most_common())
    return ProgramReport(program.name, operators, program.compiled, program.seconds, program.passes)


def _pass_table(results: Sequence[PassResult]) -> list[str]:
    header = ("pass", "level", "matches", "needed", "nodes", "certificate", "ms", "saves")
    return _table([header, *map(_row, results)])


def _row(result: PassResult) -> tuple[str, ...]:
    return (
        result.name,
        result.level.value,
        str(result.matches),
        "-" if result.required is None else str(result.required),
        f"{result.nodes_before} -> {result.nodes_after}",
        "-" if result.error is None else "bit-equal" if result.error == 0 else f"{result.error:.1e}",
        f"{result.milliseconds:.0f}",
        result.saves,
    )


def _operators(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in counts.items())


def _table(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def write_graphs(directory: str | Path, snapshots: Sequence[tuple[str, GraphModule]]) -> list[Path]:
    """Write each snapshot as a numbered Python file with dtypes, shapes and strides; returns the files."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, (label, gm) in enumerate(snapshots):
        path = folder / f"{number:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', label)}.py"
        code = gm.print_readable(print_output=False, include_stride=True)
        path.write_text(f"# {label}: {operator_counts(gm).total()} calls\n{code}\n", encoding="utf-8")
        written.append(path)
    return written
