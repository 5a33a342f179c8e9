# SPDX-License-Identifier: Apache-2.0
"""`index.html` of a dump: tables, one block before and after, links. One file; it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ..passes import PassResult
from ..report import ProgramReport, model_report
from ..report_text import PASS_HEADER, closing, pass_row, program_facts, program_title, title
from .blocks import block_drawing, block_path
from .svg import svg

if TYPE_CHECKING:
    from ..optimized import OptimizedModel
    from .dump import Dump, DumpedGraph

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1.5rem; max-width: 1800px; color: #223; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ccd; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: left; padding: .15rem .7rem .15rem 0; vertical-align: top; }
th { border-bottom: 1px solid #99a; } tr:nth-child(even) td { background: #f6f7fa; }
td.exact { color: #176b1c; } td.numeric { color: #96600a; } td.policy { color: #8a1d83; } td.short { color: #b00; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem; align-items: start; }
figure { margin: .5rem 0; overflow: auto; border: 1px solid #dde; padding: .5rem; }
figure svg { display: block; margin: 0 auto; max-width: 100%; height: auto; } figcaption { font-weight: 600; }
.legend span { padding: .1rem .5rem; margin-right: .4rem; border: 1px solid #667; border-radius: 4px; }
.note { color: #96600a; } dt { font-weight: 600; } dd { margin: 0 0 .3rem 0; }
"""
_LEGEND = (
    ("matrix product", "#cfe3ff"),
    ("attention", "#ffd9c7"),
    ("dllm operator", "#d6f2d3"),
    ("pointwise, reduction", "#fff3c4"),
    ("view", "#f2f2f2"),
)


def write_page(fast: OptimizedModel, dump: Dump) -> Path:
    """Write the page of a dump; returns its path."""
    report = model_report(fast)
    stages = [stage for stage in dump.stages if not stage.program]
    layer = min(1, report.layers - 1)
    body = [
        f"<h1>{escape(title(report))}</h1>",
        *(f"<p{_class(line)}>{escape(line)}</p>" for line in closing(report)),
        *(f'<p class="note">{escape(note)}</p>' for note in dump.notes),
        "<h2>Passes over the canonical graph</h2>",
        _passes(report.passes),
        f"<h2>Block {layer}, before and after</h2>",
        _legend(),
        _pair(stages[0], stages[-1], layer),
    ]
    for program, graph in zip(report.programs, dump.programs, strict=True):
        body += _program(program, graph, stages[-1], layer)
    body += ["<h2>Files</h2>", _files(dump)]
    path = dump.folder / "index.html"
    path.write_text(
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f'<link rel="icon" href="data:,"><title>{escape(report.model)}: what was generated</title>\n'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n",
        encoding="utf-8",
    )
    return path


def _class(line: str) -> str:
    return ' class="note"' if line.startswith(("left as it was", "note:")) else ""


def _legend() -> str:
    parts = (f'<span style="background: {color}">{name}</span>' for name, color in _LEGEND)
    return f'<p class="legend">{"".join(parts)} point at a box for its sizes and module</p>'


def _program(program: ProgramReport, graph: DumpedGraph, canonical: DumpedGraph, layer: int) -> Iterable[str]:
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd><code>{escape(value)}</code></dd>" for name, value in program_facts(program)
    )
    # What LaCache changes is in its first layer.
    layer = 0 if program.name.startswith("lacache") else layer
    yield f"<h2>{escape(program_title(program))}</h2>"
    yield f"<dl>{facts}</dl>"
    yield _passes(program.passes)
    summary = f"<summary>block {layer}, canonical and in this program</summary>"
    yield f"<details>{summary}{_pair(canonical, graph, layer)}</details>"


def _passes(results: Sequence[PassResult]) -> str:
    rows = []
    for result in results:
        short = result.required is not None and result.matches < result.required
        classes = {1: result.level.value, 2: "short" if short else ""}
        cells = (
            f'<td class="{classes.get(number, "")}">{escape(cell)}</td>' for number, cell in enumerate(pass_row(result))
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
        span = f'colspan="{len(PASS_HEADER) - 1}" class="short"'
        rows += [f"<tr><td></td><td {span}>left as it was - {escape(str(one))}</td></tr>" for one in result.refusals]
    header = "".join(f"<th>{name}</th>" for name in PASS_HEADER)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _pair(before: DumpedGraph, after: DumpedGraph, layer: int) -> str:
    return f'<div class="pair">{_figure(before, layer)}{_figure(after, layer)}</div>'


def _when(graph: DumpedGraph) -> str:
    if graph.label == "captured" or graph.label.startswith("program "):
        return graph.label
    return f"after {graph.label}"


def _figure(graph: DumpedGraph, layer: int) -> str:
    path = block_path(graph.gm, layer)
    if path is None:
        caption = f"<figcaption>{escape(graph.label)}</figcaption>"
        return f"<figure>{caption}<p>modules are not numbered: no picture</p></figure>"
    drawing = block_drawing(graph.gm, path)
    calls = sum(box.kind not in ("input", "output") for box in drawing.boxes.values())
    caption = f"{_when(graph)}: {path}, {calls} calls"
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg(drawing, caption)}</figure>"


def _files(dump: Dump) -> str:
    rows = [(graph.label, _link(dump, graph.path), f"{graph.calls} calls") for graph in (*dump.stages, *dump.programs)]
    for name, paths in dump.sources.items():
        rows += [(f"program {name}", _link(dump, path), "generated by Inductor") for path in paths]
    rows += [("depyf", _link(dump, path), "decompiled") for path in dump.decompiled]
    body = "".join(f"<tr><td>{escape(label)}</td><td>{link}</td><td>{what}</td></tr>" for label, link, what in rows)
    return f"<table><thead><tr><th>graph</th><th>file</th><th></th></tr></thead><tbody>{body}</tbody></table>"


def _link(dump: Dump, path: Path) -> str:
    name = path.relative_to(dump.folder).as_posix()
    return f'<a href="{quote(name)}">{escape(name)}</a>'
