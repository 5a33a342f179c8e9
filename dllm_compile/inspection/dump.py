# SPDX-License-Identifier: Apache-2.0
"""Writes everything that was generated for a model into a folder: graphs as modules, examples, weights, a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import MissingPackageError
from ..passes.graph import operator_counts
from ..runtime.ambient import plain_mode
from ..runtime.programs import ModelPrograms, Program
from .decompiled import decompile as decompile_program
from .decompiled import has_depyf
from .dump_folder import DumpFolder, dump_folder
from .dumped import WEIGHTS_FILE, tensors_of
from .examples import ExampleSize, example_inputs
from .python_code import module_name, python_module

if TYPE_CHECKING:
    from ..optimized import OptimizedModel

SIZE = ExampleSize(prompt=5, answer=4, block=4, samples=2)
"""Of the recorded inputs: small, since a row has a cache row in every layer."""

PAGE = "index.html"

MOST_WEIGHTS = 64 * 2**20
"""Bytes of weights up to which they are written as well."""


@dataclass(frozen=True)
class DumpedGraph:
    """A graph in the folder.

    Attributes:
        label: `captured`, a pass, `<program>.<pass>`, or `program <name>`.
        program: the program it belongs to; '' for the canonical graph.
        gm: the graph.
        path: its module.
    """

    label: str
    program: str
    gm: GraphModule
    path: Path

    @property
    def calls(self) -> int:
        """Calls in it."""
        return operator_counts(self.gm).total()


@dataclass(frozen=True)
class Dump:
    """What was written besides the page.

    Attributes:
        folder: where.
        stages: the graph as captured and after each pass, in order.
        programs: each program as it is run.
        sources: what Inductor generated, by program.
        decompiled: what depyf wrote.
        notes: what is missing, and why.
    """

    folder: Path
    stages: tuple[DumpedGraph, ...]
    programs: tuple[DumpedGraph, ...]
    sources: dict[str, tuple[Path, ...]]
    decompiled: tuple[Path, ...]
    notes: tuple[str, ...]


def dump_graphs(fast: OptimizedModel, directory: str | Path, *, decompile: bool | None = None) -> list[Path]:
    """See `OptimizedModel.dump_graphs`."""
    from .page import write_page

    if decompile and not has_depyf():
        raise MissingPackageError("decompile=True needs depyf, which is not installed: pip install -e '.[debug]'")
    if isinstance(fast.programs, ModelPrograms):
        fast.programs.forward_program()
    with_depyf = has_depyf() if decompile is None else decompile
    weights = tensors_of(fast)
    size = sum(tensor.nbytes for tensor in weights.values())
    names = [PAGE, *_module_names(fast), *_source_names(fast), *([WEIGHTS_FILE] if size <= MOST_WEIGHTS else [])]
    folders = [_depyf_name(program) for program in fast.programs.built if program.compiled and with_depyf]
    with dump_folder(directory, names, folders) as folder:
        notes: list[str] = []
        page = folder.path(PAGE)
        stages, programs = _write_graphs(fast, folder, notes)
        sources = {program.name: tuple(_write_sources(program, folder)) for program in fast.programs.built}
        decompiled = _decompile(fast, folder, notes) if with_depyf else ()
        if size <= MOST_WEIGHTS:
            _write_weights(weights, folder.path(WEIGHTS_FILE))
        else:
            notes.append(
                f"weights ({size / 2**20:.0f} MiB) are not written: load(fast) takes them from an optimized model"
            )
        write_page(fast, Dump(folder.root, stages, programs, sources, decompiled, tuple(notes)))
    first = [page, *(graph.path for graph in (*stages, *programs))]
    return [*first, *(path for path in folder.written if path not in first)]


def _module_names(fast: OptimizedModel) -> Iterator[str]:
    """Of the modules of every stage and program, and of what is recorded beside them."""
    yield f"{_example_name('')}.safetensors"
    for number, (label, _) in enumerate(fast._snapshots):
        yield _stage_name(number, label)
    for program in fast.programs.built:
        yield f"{_example_name(program.name)}.py"
        yield f"{_example_name(program.name)}.safetensors"


def _source_names(fast: OptimizedModel) -> Iterator[str]:
    for program in fast.programs.built:
        yield from (_source_name(program, number) for number in range(len(program.sources)))


def _stage_name(number: int, label: str) -> str:
    return f"graph_{number:02d}_{module_name(label)}.py"


def _source_name(program: Program, number: int) -> str:
    return f"inductor_{module_name(program.name)}_{number}.py"


def _depyf_name(program: Program) -> str:
    return f"depyf/{module_name(program.name)}"


def _write_graphs(
    fast: OptimizedModel, folder: DumpFolder, notes: list[str]
) -> tuple[tuple[DumpedGraph, ...], tuple[DumpedGraph, ...]]:
    """Modules of every stage and of every program, and what they are run on."""
    examples: dict[str, bool] = {}
    programs = {program.name: program for program in fast.programs.built}
    canonical = fast._captured.gm
    for name, gm in (("", canonical), *((name, program.gm) for name, program in programs.items())):
        examples[name] = _record(fast, gm, folder.path(f"{_example_name(name)}.safetensors"), notes, name or "graph")
    stages = []
    for number, (label, gm) in enumerate(fast._snapshots):
        owner = label.partition(".")[0] if "." in label else ""
        path = folder.path(_stage_name(number, label))
        example = _example_name(owner) if examples.get(owner) else None
        path.write_text(python_module(gm, label, example), encoding="utf-8")
        stages.append(DumpedGraph(label, owner, gm, path))
    finished = []
    for name, program in programs.items():
        path = folder.path(f"{_example_name(name)}.py")
        example = _example_name(name) if examples[name] else None
        path.write_text(python_module(program.gm, f"program {name}", example), encoding="utf-8")
        finished.append(DumpedGraph(f"program {name}", name, program.gm, path))
    return tuple(stages), tuple(finished)


def _example_name(program: str) -> str:
    return f"program_{module_name(program)}" if program else "graph"


def _record(fast: OptimizedModel, gm: GraphModule, path: Path, notes: list[str], name: str) -> bool:
    """Make inputs, run the graph on copies of them and write both; whether that was possible."""
    from safetensors.torch import save_file

    try:
        inputs = example_inputs(
            gm,
            SIZE.within(fast.facts.max_sequence_length),
            device=fast.device,
            tile_rows=fast.programs.tile_rows,
        )
    except KeyError as error:
        notes.append(f"{name} has no recorded inputs: {error.args[0]}")
        return False
    with plain_mode(), torch.no_grad():
        outputs = gm(**{given: value.clone() for given, value in inputs.items()})
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    tensors = {f"input.{given}": value for given, value in inputs.items()}
    tensors |= {f"output.{index}": value for index, value in enumerate(outputs)}
    save_file({given: value.detach().cpu().contiguous() for given, value in tensors.items()}, path)
    return True


def _write_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Weights by name."""
    from safetensors.torch import save_file

    # Copies: parameters share storage with packed weights, which the format does not express.
    save_file({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def _write_sources(program: Program, folder: DumpFolder) -> Iterator[Path]:
    """What Inductor generated for a program."""
    for number, source in enumerate(program.sources):
        path = folder.path(_source_name(program, number))
        times = program.calls[number] if len(program.calls) == len(program.sources) else "?"
        path.write_text(f"# program {program.name}, graph {number}, called {times} times\n{source}", encoding="utf-8")
        yield path


def _decompile(fast: OptimizedModel, folder: DumpFolder, notes: list[str]) -> tuple[Path, ...]:
    """Let depyf write what it finds out about each compiled program; the modules that it wrote."""
    found: list[Path] = []
    for program in fast.programs.built:
        if not program.compiled:
            continue
        name = _depyf_name(program)
        reason = decompile_program(program, folder.subfolder(name), fast.device)
        if reason is not None:
            notes.append(reason)
        found += [path for path in folder.found(name) if path.suffix == ".py" and path.parent.name == Path(name).name]
    return tuple(found)
