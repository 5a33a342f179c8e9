# SPDX-License-Identifier: Apache-2.0
"""Row programs of one model: built from the canonical graph when first needed, compiled once for all sizes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._compat import generated_sources
from ..passes import (
    INLINE_REFERENCES,
    INSERT_VERIFY,
    WHOLE_SAMPLE,
    GraphPass,
    PassResult,
    flatten_rows_pass,
    head_passes,
    insert_kv_cache_pass,
    insert_lacache_pass,
    run_passes,
)
from ..passes.graph import share
from ..passes.insert_verify import OWN_BUFFERS
from .ambient import plain_mode
from .compiling import LayerByLayer, compile_program
from .padding import at_least_two
from .row_programs import CacheInputs, LaCacheInputs, StepInputs, VerifyInputs
from .shape import ModelShape

# Most query rows of a tile on CUDA: those of the tallest block of the attention kernel. Where samples bring fewer rows,
# or the card has room for more programs, a launch cuts tiles into parts (`kernels.row_attention_blocks`).
CUDA_TILE_ROWS = 128


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
        graphs: how many graphs were compiled for it: one, or one for each distinct layer.
        sources: what Inductor generated for each of them.
        calls: how often each of them is called in a run.
    """

    name: str
    gm: GraphModule
    run: Callable[..., Any]
    passes: tuple[PassResult, ...]
    compiled: bool
    seconds: float
    graphs: int
    sources: tuple[str, ...] = ()
    calls: tuple[int, ...] = ()

    def __call__(self, **inputs: Tensor) -> Any:
        """Run with inputs by name; sizes 0 and 1 are padded to 2, the smallest size a compiled program is made for."""
        out = self.run(**at_least_two(inputs))
        rows = inputs.get("wanted", inputs["ids"]).shape[0]
        if rows > 1:
            return out
        return out[:rows] if isinstance(out, Tensor) else tuple(value[:rows] for value in out)


class ModelPrograms:
    """Implements `RowPrograms` for a canonical graph.

    Args:
        canonical: normalised, fused graph whose weights are in place.
        layers: N.
        mask_token_id: the model's mask id (None: only `forward` can be built).
        device: where the parameters lie.
        compiled: whether programs are compiled.
        finish: passes that end every program, in front of `inline_references`.
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
        finish: Sequence[GraphPass] = (),
        inline: bool = True,
        observe: Callable[[str, str, GraphModule], None] | None = None,
    ) -> None:
        self.device = device
        self.tile_rows = CUDA_TILE_ROWS if device.type == "cuda" else None
        self._canonical = canonical
        self._layers = layers
        self._mask_token_id = mask_token_id
        self._compiled = compiled
        self._finish = tuple(finish)
        self._inline = inline
        self._observe = observe
        self._lock = threading.RLock()
        self._programs: dict[str, Program] = {}

    @functools.cached_property
    def shape(self) -> ModelShape:
        """Sizes that caches depend on."""
        return ModelShape.of(self._canonical)

    @property
    def compiled(self) -> bool:
        """Whether programs are compiled."""
        return self._compiled

    @property
    def built(self) -> tuple[Program, ...]:
        """Programs built so far."""
        return tuple(self._programs.values())

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """See `RowPrograms.step`."""
        return self._step_program("step", (), inputs)(**_given(inputs))  # type: ignore[no-any-return]

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, tiles: Tensor) -> Tensor:
        """Logits (R, V) of every row."""
        return self.forward_program()(ids=ids, positions=positions, tiles=tiles)

    @torch.no_grad()
    def lacache_step(self, inputs: StepInputs, cache: LaCacheInputs) -> tuple[Tensor, Tensor]:
        """See `RowPrograms.lacache_step`."""
        insert = insert_lacache_pass(cache.layers, "first" if cache.block_rows is None else "step")
        layers = "" if cache.layers == (0,) else "_layers_" + _spans(cache.layers)
        program = self._step_program(insert.name.removeprefix("insert_") + layers, (insert,), inputs)
        extra = {} if cache.block_rows is None else {"block_rows": cache.block_rows}
        return program(**_given(inputs), **cache.state, **extra, block_tiles=cache.block_tiles)

    @torch.no_grad()
    def cached_step(self, inputs: StepInputs, cache: CacheInputs) -> tuple[Tensor, Tensor]:
        """See `RowPrograms.cached_step`."""
        name = "cached_step" + ("_scored_" + _spans(cache.scored) if cache.scored else "")
        program = self._step_program(name, (insert_kv_cache_pass(cache.scored),), inputs)
        scoring = {"window": cache.window, "spans": cache.spans, "scores": cache.scores} if cache.scored else {}
        extra = {given: value for given, value in scoring.items() if value is not None}
        return program(  # type: ignore[no-any-return]
            **_given(inputs), **cache.caches, **extra, cache_rows=cache.cache_rows
        )

    @torch.no_grad()
    def verify_step(self, inputs: StepInputs, verify: VerifyInputs) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowPrograms.verify_step`."""
        assert self._mask_token_id is not None, "callers check that the model states its mask id"
        flatten = flatten_rows_pass(WHOLE_SAMPLE if self.tile_rows is None else verify.tile_rows)
        name = "verify_step" if self.tile_rows is None else f"verify_step_{verify.tile_rows}"
        program = self._get(name, (flatten, INSERT_VERIFY, *head_passes(self._mask_token_id, given=True)))
        given = {**_given(inputs), **verify.caches, "views": verify.views, "hidden": verify.hidden}
        given |= {"given": verify.given, "own_rows": verify.own_rows, **dict(zip(OWN_BUFFERS, verify.own, strict=True))}
        return program(**given)  # type: ignore[no-any-return]

    def forward_program(self) -> Program:
        """The program with all rows' logits."""
        return self._get("forward", (self._flatten,))

    def _step_program(self, name: str, cache: tuple[GraphPass, ...], inputs: StepInputs) -> Program:
        """The program of a decoding step of the kind that `inputs` asks for."""
        sampled, guided = inputs.seeds is not None, inputs.unconditional is not None
        assert self._mask_token_id is not None, "callers check that the model states its mask id"
        end = head_passes(self._mask_token_id, sampled=sampled, guided=guided)
        return self._get(name + "_sampled" * sampled + "_guided" * guided, (self._flatten, *cache, *end))

    @property
    def _flatten(self) -> GraphPass:
        return flatten_rows_pass(self.tile_rows or WHOLE_SAMPLE)

    def _get(self, name: str, passes: tuple[Any, ...]) -> Program:
        with self._lock:
            if name not in self._programs:
                self._programs[name] = self._build(name, passes)
            return self._programs[name]

    def _build(self, name: str, passes: tuple[Any, ...]) -> Program:
        start = time.perf_counter()
        gm = share(self._canonical)
        passes = (*passes, *self._finish)
        if self._compiled and self._inline:
            passes = (*passes, INLINE_REFERENCES)
        observe = None if self._observe is None else lambda pass_name, graph: self._observe(name, pass_name, graph)  # type: ignore[misc]
        with plain_mode(), generated_sources() as sources:
            results = run_passes(gm, passes, layers=self._layers, observe=observe)
            run, graphs = compile_program(gm, self.device) if self._compiled else (gm, 0)
        calls = run.calls if isinstance(run, LayerByLayer) else (1,) * graphs
        seconds = time.perf_counter() - start
        return Program(name, gm, run, results, self._compiled, seconds, graphs, tuple(sources), calls)


def _spans(layers: tuple[int, ...]) -> str:
    """`0_3-17` for layers 0 and 3 to 17."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return "_".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _given(inputs: StepInputs) -> dict[str, Tensor]:
    return {name: value for name, value in vars(inputs).items() if value is not None}
