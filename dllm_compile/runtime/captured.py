# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole steps: one for each size, captured when the size comes back, replayed from then on."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..config import NewShapes
from ..errors import UnknownShapeError

# A step of more rows is long enough to hide its launches, and a graph would keep the memory of its activations.
MOST_CAPTURED_ROWS = 8192

# A process captures one graph at a time: what another thread captures must not see this one's allocations.
_CAPTURING = threading.Lock()


class CapturedSteps:
    """Runs a step by replay where one was captured.

    A size is run once as it is, which compiles, tunes and allocates whatever it needs for the first time; when it comes
    back it is captured. Graphs share one pool, since no step reads what another left there: all that outlives a step
    is written into buffers of the session.

    Args:
        device: a CUDA device.
        new_shapes: what happens, after `freeze`, to a size that was not captured.
        held: tensors that every step reads and writes. They must stay where they are.
    """

    def __init__(self, device: torch.device, new_shapes: NewShapes, held: Callable[[], Sequence[Tensor]]) -> None:
        self._device = device
        self._new_shapes = new_shapes
        self._held = held
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._sizes: dict[bool, list[int]] = {False: [], True: []}
        self._addresses: tuple[int, ...] = ()
        self._seen: set[Hashable] = set()
        self._frozen = False
        self.seconds = 0.0
        """Spent on capturing."""

    def __len__(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def freeze(self) -> None:
        """The warm-up is over."""
        self._frozen = True

    def at_least(self, refreshing: bool, rows: int) -> int | None:
        """After the warm-up: rows of the smallest captured step that a step of `rows` rows may be padded to."""
        larger = [size for size in self._sizes[refreshing] if size >= rows] if self._frozen else []
        return min(larger, default=None)

    def run(self, key: tuple[bool, int] | None, step: Callable[[], None]) -> None:
        """Run `step`, or the graph that was captured of it.

        Args:
            key: whether it refreshes, and its rows (0 where they are always the same); None if it is not captured.
            step: reads nothing on the host, and writes what outlives it in place.

        Raises:
            UnknownShapeError: after the warm-up, with `new_shapes="raise"`, for a size that was not captured.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._check_addresses()
            graph.replay()
            return
        if key is not None and self._frozen and self._new_shapes == "raise":
            raise UnknownShapeError(
                f"no step was captured for {key}: warm up with prompts of this length and this many at a time, or set "
                "CompileConfig(new_shapes='capture')"
            )
        if key is None or key not in self._seen or (self._frozen and self._new_shapes == "eager"):
            self._seen.add(key)
            step()
            return
        self.capture(key, step)
        self._graphs[key].replay()

    def capture(self, key: tuple[bool, int], step: Callable[[], None]) -> None:
        """Record `step`, which has run before with this key, without running it."""
        start = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            collecting = gc.isenabled()
            gc.disable()  # a graph that is freed during a capture would break it
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        step()
                    finally:
                        graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
            torch.cuda.current_stream().wait_stream(stream)
        if not self._graphs:
            self._addresses = self._where()
        self._graphs[key] = graph
        self._sizes[key[0]].append(key[1])
        self.seconds += time.perf_counter() - start

    def _where(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._held())

    def _check_addresses(self) -> None:
        assert self._where() == self._addresses, "a tensor that captured steps use was replaced"
