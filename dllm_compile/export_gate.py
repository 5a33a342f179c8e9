# SPDX-License-Identifier: Apache-2.0
"""Programs of all threads pause while one thread exports a model.

`torch.export` marks the whole process as exporting. An operator that another thread calls meanwhile looks for the
export's annotations and fails, and a second export breaks the tracing of both, and of all that follow.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ExportGate:
    """Many run, or one exports. Who waits to export goes first, so that steps without end cannot keep it out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._exporter: int | None = None
        self._waiting = 0
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run operators inside the block; may be entered again inside of itself and inside `exporting`."""
        depth = getattr(self._of_thread, "depth", 0)
        counted = False
        try:
            with self._changed:
                if not depth and self._exporter != threading.get_ident():
                    self._changed.wait_for(lambda: self._exporter is None and not self._waiting)
                self._running += 1
                counted = True
            self._of_thread.depth = depth + 1
            yield
        finally:
            self._of_thread.depth = depth
            if counted:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Export inside the block, while nobody else runs or exports.

        Two threads that both run and both want to export would wait for each other: nothing exports inside a step.
        """
        own = getattr(self._of_thread, "depth", 0)  # what this thread runs cannot end before this does
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._exporter is None and self._running == own)
                self._exporter = threading.get_ident()
            finally:
                self._waiting -= 1
                self._changed.notify_all()  # where waiting was interrupted, nobody else wakes those who stood back
        try:
            yield
        finally:
            with self._changed:
                self._exporter = None
                self._changed.notify_all()


EXPORT_GATE = ExportGate()

# Held from the first look at a model to the end of its rewriting: two calls would pack the same parameters at once.
OPTIMIZING = threading.RLock()
