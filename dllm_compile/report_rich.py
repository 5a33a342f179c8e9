# SPDX-License-Identifier: Apache-2.0
"""The report for a terminal, by rich. What it says is what `report_text.py` says."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .passes import PassResult
from .report import Report
from .report_text import PASS_HEADER, closing, pass_row, program_facts, program_title, title

_LEVELS = {"exact": "green", "numeric": "yellow", "policy": "magenta"}
_NUMBERS = frozenset({"matches", "needed", "nodes", "ms"})


def renderable(report: Report) -> RenderableType:
    """Tables of the passes and programs, and the closing lines."""
    parts: list[RenderableType] = [Text(title(report), style="bold"), _passes(report.passes)]
    for program in report.programs:
        parts.append(Text(f"\n{program_title(program)}", style="bold"))
        facts = Table.grid(padding=(0, 2))
        for name, value in program_facts(program):
            facts.add_row(Text(name, style="dim"), Text(value))
        parts += [facts, _passes(program.passes)]
    parts.append(Text())
    for line in closing(report):
        refused = line.startswith(("left as it was", "note:"))
        parts.append(Text(line, style="yellow" if refused else ""))
    return Group(*parts)


def _passes(results: Sequence[PassResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in PASS_HEADER:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name != "saves")
    for result in results:
        short = result.required is not None and result.matches < result.required
        cells = [Text(cell) for cell in pass_row(result)]
        cells[1].stylize(_LEVELS[result.level.value])
        if short:
            cells[2].stylize("bold red")
        table.add_row(*cells)
    return table
