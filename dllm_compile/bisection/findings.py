# SPDX-License-Identifier: Apache-2.0
"""What each comparison found, and the table of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..report_text import table

Verdict = Literal["same", "within", "by design", "FAULT"]


@dataclass(frozen=True)
class Finding:
    """One layer, compared with what lies below it.

    Attributes:
        layer: what was added: `capture`, a pass, `<pass> in <program>`, `decode loop`, `cache dual, every row`, ….
        switch: how to do without it.
        error: of the logits, relative to the largest; None where tokens were compared.
        bound: largest error that needs no explanation.
        changed: tokens that differ, of `tokens`; None where logits were compared.
        tokens: tokens compared.
        by_design: this layer may change tokens: it rounds otherwise, or is another algorithm.
        reason: what was raised.
    """

    layer: str
    switch: str
    error: float | None = None
    bound: float | None = None
    changed: int | None = None
    tokens: int = 0
    by_design: bool = False
    reason: str = ""

    @property
    def differs(self) -> bool:
        """Whether tokens change, the error is beyond its bound, or it did not run at all."""
        if self.reason or self.changed:
            return True
        return self.error is not None and self.bound is not None and not self.error <= self.bound

    @property
    def verdict(self) -> Verdict:
        """In a word."""
        if self.differs:
            return "by design" if self.by_design and not self.reason else "FAULT"
        return "within" if self.error else "same"

    def __str__(self) -> str:
        """One line."""
        if self.reason:
            return f"{self.layer}: {self.reason}"
        if self.changed is not None:
            return f"{self.layer} changes {self.changed} of {self.tokens} tokens"
        return f"{self.layer}: logits differ by {self.error:.1e} of the largest, {self.bound:.0e} is explained"


@dataclass(frozen=True)
class BisectResult:
    """All comparisons that were made, from the ground up; `print` it.

    Attributes:
        findings: in order. After a fault nothing more is compared: what lies above it inherits it.
        skipped: layers that could not be compared here, and why.
    """

    findings: tuple[Finding, ...]
    skipped: tuple[str, ...] = ()

    @property
    def first(self) -> Finding | None:
        """The first layer that changes tokens or exceeds its bound; None: all agree."""
        return next((finding for finding in self.findings if finding.differs), None)

    @property
    def fault(self) -> Finding | None:
        """The first that must not: no layer that changes tokens by design."""
        return next((finding for finding in self.findings if finding.verdict == "FAULT"), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        findings = [{**asdict(finding), "verdict": finding.verdict} for finding in self.findings]
        return {
            "first": None if self.first is None else self.first.layer,
            "findings": findings,
            "skipped": self.skipped,
        }

    def __str__(self) -> str:
        """The table, and the layer to look at."""
        rows = [("layer", "verdict", "error", "bound", "tokens changed", "without it")]
        for one in self.findings:
            changed = "" if one.changed is None else f"{one.changed} of {one.tokens}"
            error = "" if one.error is None else f"{one.error:.1e}"
            bound = "" if one.bound is None else f"{one.bound:.0e}"
            rows.append((one.layer, one.verdict, error, bound, changed, one.switch))
        lines = table(rows)
        lines += [f"not compared: {reason}" for reason in self.skipped]
        if self.first is None:
            return "\n".join([*lines, "", "every layer computes what the model computes"])
        kind = "first fault" if self.first.verdict == "FAULT" else "first difference (by design)"
        return "\n".join([*lines, "", f"{kind}: {self.first}"])
