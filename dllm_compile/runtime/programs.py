# SPDX-License-Identifier: Apache-2.0
"""Row programs of one model: built from the canonical graph when first needed, compiled once for all sizes."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from .._compat import distinct_sizes
from ..passes import INLINE_REFERENCES, WHOLE_SAMPLE, PassResult, flatten_rows_pass, run_passes, step_passes
from ..passes.graph import placeholders, share
from .row_programs import StepInputs

# Query rows of a tile on CUDA: the height of the attention kernel's tile.
CUDA_TILE_ROWS = 64

# Sizes with which a program is compiled: different, odd and above one, so that no dimension is taken for a constant
# or for another one.
_WARM_UP = {"ids": 37, "tiles": 5, "wanted": 11, "banned": 3}


@dataclass(frozen=True)
class Program:
    """One kind of call.

    Attributes:
        name: `forward`, `step`, `step_sampled`, `step_guided`, ….
        gm: its graph.
        run: what is called: the compiled graph, or the graph itself.
        passes: how it was made from the canonical graph.
        compiled: whether `run` is compiled.
        seconds: building and compiling.
    """

    name: str
    gm: GraphModule
    run: Callable[..., Any]
    passes: tuple[PassResult, ...]
    compiled: bool
    seconds: float

    def __call__(self, **inputs: Tensor) -> Any:
        """Run with inputs by name; sizes 0 and 1 are padded to 2, the smallest size a compiled program is made for."""
        wanted = inputs.get("wanted")
        out = self.run(**{name: _at_least_two(name, value, inputs) for name, value in inputs.items()})
        if wanted is not None and wanted.shape[0] == 1:
            return tuple(value[:1] for value in out)
        return out[:1] if isinstance(out, Tensor) and inputs["ids"].shape[0] == 1 else out


class ModelPrograms:
    """Implements `RowPrograms` for a canonical graph.

    Args:
        canonical: normalised, fused graph whose weights are in place.
        layers: N.
        mask_token_id: the model's mask id (None: only `forward` can be built).
        device: where the parameters lie.
        compiled: whether programs are compiled.
        inline: whether `inline_references` runs before compiling.
        observe: called with (program, pass, graph) after each pass.
    """

    def __init__(
        self,
        canonical: GraphModule,
        *,
        layers: int,
        mask_token_id: int | None,
        device: torch.device,
        compiled: bool,
        inline: bool = True,
        observe: Callable[[str, str, GraphModule], None] | None = None,
    ) -> None:
        self.device = device
        self.tile_rows = CUDA_TILE_ROWS if device.type == "cuda" else None
        self._canonical = canonical
        self._layers = layers
        self._mask_token_id = mask_token_id
        self._compiled = compiled
        self._inline = inline
        self._observe = observe
        self._lock = threading.RLock()
        self._programs: dict[str, Program] = {}

    @property
    def built(self) -> tuple[Program, ...]:
        """Programs built so far."""
        return tuple(self._programs.values())

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """See `RowPrograms.step`."""
        program = self.step_program(sampled=inputs.seeds is not None, guided=inputs.unconditional is not None)
        given = {name: value for name, value in vars(inputs).items() if value is not None}
        return program(**given)

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, tiles: Tensor) -> Tensor:
        """Logits (R, V) of every row."""
        return self.forward_program()(ids=ids, positions=positions, tiles=tiles)

    def forward_program(self) -> Program:
        """The program with all rows' logits."""
        return self._get("forward", (flatten_rows_pass(self.tile_rows or WHOLE_SAMPLE),))

    def step_program(self, *, sampled: bool = False, guided: bool = False) -> Program:
        """The program of a decoding step."""
        name = "step" + "_sampled" * sampled + "_guided" * guided
        assert self._mask_token_id is not None, "callers check that the model states its mask id"
        passes = step_passes(self.tile_rows or WHOLE_SAMPLE, self._mask_token_id, sampled=sampled, guided=guided)
        return self._get(name, passes)

    def _get(self, name: str, passes: tuple[Any, ...]) -> Program:
        with self._lock:
            if name not in self._programs:
                self._programs[name] = self._build(name, passes)
            return self._programs[name]

    def _build(self, name: str, passes: tuple[Any, ...]) -> Program:
        start = time.perf_counter()
        gm = share(self._canonical)
        if self._compiled and self._inline:
            passes = (*passes, INLINE_REFERENCES)
        observe = None if self._observe is None else lambda pass_name, graph: self._observe(name, pass_name, graph)  # type: ignore[misc]
        with torch.no_grad():
            results = run_passes(gm, passes, layers=self._layers, observe=observe)
            run = _compile(gm, self.device) if self._compiled else gm
        return Program(name, gm, run, results, self._compiled, time.perf_counter() - start)


def _compile(gm: GraphModule, device: torch.device) -> Callable[..., Any]:
    """Compile once for all sizes, on inputs made here, so that the user's first shapes decide nothing."""
    run = torch.compile(gm, fullgraph=True)
    inputs = _example_inputs(gm, device)
    for name, value in inputs.items():
        if value.dim() and (name in _WARM_UP or value.shape[0] != 1):
            torch._dynamo.mark_dynamic(value, 0)
    with warnings.catch_warnings(), distinct_sizes():
        warnings.simplefilter("ignore")
        run(**inputs)
    return run


def _example_inputs(gm: GraphModule, device: torch.device) -> dict[str, Tensor]:
    rows, wanted = _WARM_UP["ids"], _WARM_UP["wanted"]
    sizes = {"ids": rows, "positions": rows, "wanted": wanted, "unconditional": wanted, "seeds": wanted}
    inputs: dict[str, Tensor] = {}
    for node in placeholders(gm):
        name, value = str(node.target), node.meta["val"]
        if name == "tiles":
            edges = torch.linspace(0, rows, _WARM_UP["tiles"] + 1).int()
            inputs[name] = torch.stack((edges[:-1], edges[1:], edges[:-1], edges[1:]), dim=1).to(device)
        elif value.dim() == 0:
            inputs[name] = torch.ones((), dtype=value.dtype, device=device)
        elif name == "banned":
            inputs[name] = torch.full((_WARM_UP["banned"],), -1, dtype=value.dtype, device=device)
        else:
            inputs[name] = torch.zeros(sizes[name], dtype=value.dtype, device=device)
    return inputs


def _at_least_two(name: str, value: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Pad a leading dimension of 0 or 1 to 2 with entries that do nothing."""
    if value.dim() == 0 or value.shape[0] > 1:
        return value
    if name == "tiles":
        rows = inputs["ids"].shape[0]
        # A single row gains a second one, which sees no key; otherwise the added tile has no rows.
        return torch.cat((value, value.new_tensor([[rows, max(rows, 2), 0, 0]])))
    if name == "banned":
        return F.pad(value, (0, 2 - value.shape[0]), value=-1)
    return value.repeat(2) if value.shape[0] else value.new_zeros(2)
