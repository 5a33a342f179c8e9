# SPDX-License-Identifier: Apache-2.0
"""Keeps what each comparison found, and ends at the first fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .findings import Finding
from .judging import Bound


class Fault(Exception):
    """A fault was found: what lies above it inherits it."""


class Recorder:
    """Findings so far.

    Args:
        dtype: of the parameters.
        stop: raise `Fault` at the first fault.
        told: called with the name of each layer before it is compared.
    """

    bound: Bound

    def __init__(self, dtype: torch.dtype, *, stop: bool, told: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self.skipped: list[str] = []
        self.told = told
        self._stop = stop
        # In 16 bit another order of sums may change a token; that is no fault.
        self._rounds = dtype not in (torch.float32, torch.float64)

    def add(self, finding: Finding) -> None:
        """Keep a finding."""
        self.findings.append(finding)
        if finding.verdict == "FAULT" and self._stop:
            raise Fault

    @contextlib.contextmanager
    def layer(self, layer: str, switch: str) -> Iterator[None]:
        """What is raised inside is a fault of this layer."""
        self.told(layer)
        try:
            yield
        except Fault:
            raise
        except Exception as error:  # whatever it is, it is this layer that raised it
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self.add(Finding(layer, switch, reason=f"{type(error).__name__}: {' '.join(lines[:2])}"))

    def error(self, layer: str, switch: str, error: float | None, bound: float | None = None) -> None:
        """Hold an error of logits against its bound; None: there was nothing to compare."""
        if error is not None:
            bound = self.bound.of(error) if bound is None else bound
            self.add(Finding(layer, switch, error=error, bound=bound))

    def tokens(self, layer: str, switch: str, actual: Tensor, expected: Tensor, *, by_design: bool = False) -> None:
        """Compare answers (G,) token by token."""
        changed = int((actual != expected).sum())
        by_design = by_design or self._rounds
        self.add(Finding(layer, switch, changed=changed, tokens=len(expected), by_design=by_design))
