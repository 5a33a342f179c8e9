# SPDX-License-Identifier: Apache-2.0
"""The report as plain text, and the cells that every form of it shows."""

from __future__ import annotations

from collections.abc import Sequence

from .inspection.work import scaled
from .passes import PassResult
from .report import ProgramReport, Report

PASS_HEADER = ("pass", "level", "matches", "needed", "nodes", "certificate", "ms", "saves")


def pass_row(result: PassResult) -> tuple[str, ...]:
    """Cells of one pass."""
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


def title(report: Report) -> str:
    """First line of the report."""
    what = f"{report.model}: {report.layers} layers, {report.dtype} on {report.device}"
    return f"{what}; captured in {report.capture_seconds:.1f} s"


def program_title(program: ProgramReport) -> str:
    """First line of a program."""
    graphs = "" if program.graphs < 2 else f" to {program.graphs} graphs"
    how = f"compiled{graphs}" if program.compiled else "not compiled"
    return f"program {program.name} ({how}, {program.seconds:.1f} s)"


def program_facts(program: ProgramReport) -> list[tuple[str, str]]:
    """What is said of a program besides its passes."""
    facts = [("inputs", _inputs(program)), ("operators", operators(program.operators))]
    if program.launches is not None:
        facts.append(("launches", str(program.launches)))
    if program.work is not None:
        facts.append(("work", str(program.work)))
    return facts


def _inputs(program: ProgramReport) -> str:
    """Inputs by name; caches of a layer stand for those of all layers."""
    shown = []
    layers: dict[str, int] = {}
    for name, value in program.inputs.items():
        kind, _, number = name.rpartition("_")
        if number.isdigit():
            layers[kind] = layers.get(kind, 0) + 1
            if layers[kind] > 1:
                continue
            name = f"{kind}_*"
        shown.append((name, value))
    counts = {f"{kind}_*": f" x{count}" for kind, count in layers.items()}
    return ", ".join(f"{name} {value}{counts.get(name, '')}" for name, value in shown)


def operators(counts: dict[str, int]) -> str:
    """`aten.linear x8, …`."""
    return ", ".join(f"{name} x{count}" for name, count in counts.items())


def closing(report: Report) -> list[str]:
    """Lines behind the tables."""
    lines = [
        f"largest difference of rewritten and original logits: {report.logits_error:.1e} of the largest logit",
        f"packed weights: {report.packed_bytes / 2**20:.1f} MiB, shared with the model's parameters (0 extra)",
    ]
    lines += [] if report.fp8 is None else report.fp8.lines()
    lines += [
        f"cache {cache.caches}: {scaled(cache.bytes_per_row, 'B')} a row = {cache.formula}" for cache in report.caches
    ]
    lines += [
        f"kept between calls: buffers for {session.rows} rows, caches of {scaled(session.cache_bytes, 'B')}, "
        f"{session.captured_graphs} captured steps ({session.capture_seconds:.1f} s)"
        for session in report.sessions
    ]
    results = [("", result) for result in report.passes]
    results += [(f"{program.name}.", result) for program in report.programs for result in program.passes]
    for name, result in results:
        lines += [f"left as it was - {name}{result.name}: {refusal}" for refusal in result.refusals]
    return lines + [f"note: {note}" for note in report.notes]


def text(report: Report) -> str:
    """The whole report."""
    lines = [title(report), "", *table([PASS_HEADER, *map(pass_row, report.passes)])]
    for program in report.programs:
        lines += ["", f"{program_title(program)}:"]
        lines += [f"  {name}: {value}" for name, value in program_facts(program)]
        lines += table([PASS_HEADER, *map(pass_row, program.passes)])
    return "\n".join([*lines, "", *closing(report)])


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
