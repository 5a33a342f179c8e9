# SPDX-License-Identifier: Apache-2.0
"""Expected figures in a file, one a line, and what is said where measured ones differ."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

Figures = dict[str, int]

FOLDER = Path(__file__).resolve().parents[1] / "expected"
UPDATE = "python -m benchmarks gates --update"

# Differences that are written out; a lost pass moves many figures.
_MOST = 40


def expected_path(group: str) -> Path:
    """The file of this torch version; of this card as well for what is measured on one."""
    version = ".".join(torch.__version__.split(".")[:2])
    if group != "card":
        return FOLDER / f"torch-{version}.json"
    major, minor = torch.cuda.get_device_capability()
    return FOLDER / f"sm{major}{minor}-torch-{version}.json"


@dataclass(frozen=True)
class Expected:
    """A file of expected figures by name."""

    figures: Figures

    @classmethod
    def read(cls, path: Path) -> Expected:
        """What `path` holds; nothing where it does not exist."""
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def of(self, group: str) -> Figures:
        """Those of one group."""
        return {name: value for name, value in self.figures.items() if name.startswith(f"{group}/")}

    def replaced(self, group: str, found: Figures) -> Expected:
        """With all figures of a group replaced."""
        kept = {name: value for name, value in self.figures.items() if not name.startswith(f"{group}/")}
        return Expected(kept | found)

    def write(self, path: Path) -> None:
        """One figure a line, sorted, so that a change is one line of a diff."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(sorted(self.figures.items())), indent=0) + "\n", encoding="utf-8")


def compare(expected: Figures, found: Figures, path: Path) -> str:
    """What differs, in words and with the lines to paste; '' where nothing does.

    Args:
        expected: figures of a group.
        found: the same group, measured.
        path: where the expected ones are.
    """
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    if not names:
        return ""
    names.sort(key=lambda name: (_RANK.get(_kind(name), len(_RANK)), name))
    lines = [f"{len(names)} of {len({*expected, *found})} figures differ from {path.parent.name}/{path.name}:"]
    for name in names[:_MOST]:
        lines += _difference(name, expected.get(name), found.get(name))
    if len(names) > _MOST:
        lines.append(f"... and {len(names) - _MOST} more")
    lines.append(
        f"A worse figure is a regression: mend it. A better one, or one that is meant, is pasted into {path.name} as "
        f"shown, with the reason in the commit; all at once: {UPDATE}"
    )
    return "\n".join(lines)


# Kinds of figures, those first that name a cause: (what it is called, whether more is better, what a worse one means).
_KINDS: dict[str, tuple[str, bool, str]] = {
    "matches": ("regions rewritten by", True, "the pass is disabled, or no longer finds its regions"),
    "recompiles": ("compiled again", False, "a size or a setting became part of what the code is compiled for"),
    "captures": ("graphs captured", False, "a size or a choice became part of what a step is captured for"),
    "captured again": ("graphs captured after the warm-up", False, "the warm-up misses sizes that occur"),
    "segments": ("distinct compiled segments", False, "layers that were alike are no longer"),
    "generated kernels": ("kernels of Inductor", False, "a fusion was lost"),
    "library calls": ("library calls", False, "a product was split, or a fused one was lost"),
    "operator calls": ("calls of our operators", False, "a fusion was lost"),
    "calls": ("calls of", False, "an operator was added or a fusion was lost"),
    "flops": ("FLOPs of a step", False, "more rows or products are computed"),
    "bytes": ("bytes of a step", False, "more is read or written"),
    "state bytes": ("bytes kept between steps", False, "a cache grew"),
    "forwards": ("forwards", False, "fewer tokens are committed in a step"),
    "row forwards": ("rows computed", False, "a policy computes more rows"),
    "answer tokens": ("answer tokens", True, "other answers come out"),
    "solved": ("problems solved", True, "other answers come out"),
}
_RANK = {kind: i for i, kind in enumerate(_KINDS)}


def _kind(name: str) -> str:
    """The part of a name that is a kind of figure."""
    return next((part for part in name.split("/") if part in _KINDS), "")


def _difference(name: str, expected: int | None, found: int | None) -> Iterable[str]:
    """One figure: what it is, which way it went, what to paste."""
    kind = _kind(name)
    where, _, what = name.partition(f"/{kind}/") if f"/{kind}/" in name else (name.removesuffix(f"/{kind}"), "", "")
    label, more_is_better, meaning = _KINDS.get(kind, (kind, False, ""))
    better = ((found or 0) > (expected or 0)) == more_is_better
    saying = "better than expected and nobody said so" if better else f"worse: {meaning}"
    numbers = f"{'none' if found is None else found}, expected {'none' if expected is None else expected}"
    yield f"  {where}: {label}{f' {what}' if what else ''}: {numbers} ({saying})"
    yield f"      remove: {json.dumps(name)}" if found is None else f"      paste:  {json.dumps(name)}: {found},"
