# SPDX-License-Identifier: Apache-2.0
"""What a pass is, what it reports, and how a list of passes is run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from torch.fx import GraphModule, Node

from ..errors import PassError
from .graph import check_metadata, describe, inventory, remove_dead_code


class Level(Enum):
    """What a pass may change about the result (see `docs/exactness.md`)."""

    EXACT = "exact"
    """Same tokens as the plain loop in fp32; lower precisions differ by summation order only."""
    NUMERIC = "numeric"
    """Other rounding: the error is measured and bounded."""
    POLICY = "policy"
    """Another algorithm: measured by accuracy."""


@dataclass(frozen=True)
class Refusal:
    """A region that looked like a match and was left as it was."""

    where: str
    reason: str

    def __str__(self) -> str:
        """`module: reason`."""
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class RegionError:
    """How far a part of a rewritten region is from the original on the same input.

    Attributes:
        where: its weight.
        error: norm of the difference over the norm of the original's output.
        sqnr: the same in decibels, -20 log10(error).
    """

    where: str
    error: float
    sqnr: float


class Reason(str):
    """Why a matcher refuses a region; returned in the place of the match."""


@dataclass
class Outcome:
    """What a pass found, filled in while it runs."""

    matches: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    error: float | None = None
    """Largest deviation seen by a numeric certificate (0.0: bit-equal); None where the pass needs none."""
    regions: list[RegionError] = field(default_factory=list)
    """What a numeric pass measured, one entry for each part of a rewritten region."""

    def refuse(self, node: Node, reason: str) -> None:
        """Record that the region at `node` is left alone."""
        self.refusals.append(Refusal(describe(node), reason))

    def accept(self, error: float | None = None) -> None:
        """Record a rewritten region and, where one was made, its certificate's error."""
        self.matches += 1
        if error is not None:
            self.error = max(self.error or 0.0, error)


@dataclass(frozen=True)
class GraphPass:
    """One rewrite of a graph.

    Args:
        name: `<verb>_<object>`, the name of its file.
        level: what it may change about the result.
        apply: rewrites the graph in place and returns what it found.
        required: matches a supported model must have, as a function of its layer count; None where it is optional.
        saves: one line for the report: what the rewrite saves.
    """

    name: str
    level: Level
    apply: Callable[[GraphModule], Outcome]
    required: Callable[[int], int] | None = None
    saves: str = ""


@dataclass(frozen=True)
class PassResult:
    """The frozen record of one pass over one graph."""

    name: str
    level: Level
    matches: int
    required: int | None
    refusals: tuple[Refusal, ...]
    error: float | None
    milliseconds: float
    nodes_before: int
    nodes_after: int
    saves: str = ""
    regions: tuple[RegionError, ...] = ()


Observer = Callable[[str, GraphModule], None]


def run_passes(
    gm: GraphModule, passes: Iterable[GraphPass], *, layers: int, strict: bool = True, observe: Observer | None = None
) -> tuple[PassResult, ...]:
    """Run `passes` over `gm` in order, in place.

    After each pass the graph is linted and the recorded shapes, dtypes and strides are compared with what the nodes
    would produce, so that a pass that lies about what it inserted fails here and not inside a compiler.

    Args:
        gm: captured or canonical graph.
        passes: in the order in which they run.
        layers: N, for the required counts.
        strict: raise when a required pass matches fewer regions than its formula asks for.
        observe: called with a pass's name and the graph after it (dumps).

    Raises:
        PassError: strict, and a required pass fell short; names modules, reasons and the operators present.
    """
    results = []
    for graph_pass in passes:
        before = len(gm.graph.nodes)
        start = time.perf_counter()
        outcome = graph_pass.apply(gm)
        remove_dead_code(gm)
        gm.graph.lint()
        check_metadata(gm, graph_pass.name)
        gm.recompile()
        required = None if graph_pass.required is None else graph_pass.required(layers)
        results.append(
            PassResult(
                name=graph_pass.name,
                level=graph_pass.level,
                matches=outcome.matches,
                required=required,
                refusals=tuple(outcome.refusals),
                error=outcome.error,
                milliseconds=(time.perf_counter() - start) * 1e3,
                nodes_before=before,
                nodes_after=len(gm.graph.nodes),
                saves=graph_pass.saves,
                regions=tuple(outcome.regions),
            )
        )
        if observe is not None:
            observe(graph_pass.name, gm)
        if strict and required is not None and outcome.matches < required:
            raise PassError(_shortfall(gm, results[-1]))
    return tuple(results)


def _shortfall(gm: GraphModule, result: PassResult) -> str:
    tallied = Counter(str(refusal) for refusal in result.refusals)
    reasons = [f"  {reason}" + (f"  (x{count})" if count > 1 else "") for reason, count in tallied.items()]
    if not reasons:
        reasons = ["  no region of this kind was found"]
    return "\n".join(
        (
            f"{result.name} rewrote {result.matches} of {result.required} regions. Left as they were:",
            *reasons,
            f"Operators in the graph: {inventory(gm)}",
            "Pass CompileConfig(strict=False) to keep these regions unchanged and go on.",
        )
    )
