# SPDX-License-Identifier: Apache-2.0
"""Result files: their shape, checked where they are read, how they are written, and the times and ratios in them.

Times are found by what rows hold, so that files of every case and age can be read.
A row is one measurement (`median_ms`, `ms_per_forward`, `seconds`), or several side by side: times by name, in
milliseconds under "median_ms" or in the row's "unit". Side by side, the first is what the others are compared with;
else the first row that names an eager model, or the first row. A ratio is the baseline's time over this one's: higher
is better, and it does not depend on how fast the clock ran.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMES = ("median_ms", "ms_per_forward", "seconds")
_RATES = ("_us", "TBps", "TFLOPs", "_error", "sqnr", "ratio")
_PARTS = {"case": (str, "text"), "environment": (dict, "object"), "settings": (dict, "object"), "rows": (list, "list")}
_FACTS = ("card", "torch", "commit")
# Numbers that say what was measured, not what came out.
_SIZES = ("batch", "samples", "rows", "keys", "length", "layers", "block_length", "m", "M", "slots")


class ResultError(Exception):
    """A file that is no result or cannot be written, or results that must not be compared: why, and what to do."""


def load(path: Path) -> dict[str, Any]:
    """Read a file that `python -m benchmarks CASE --json FILE` wrote.

    Returns:
        `case`: a text; `environment`: an object with `card`, `torch` and `commit`, each a text or None; `settings`: an
        object, empty in older files; `rows`: one object at least.

    Raises:
        ResultError: it cannot be read, or does not hold this.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{_no_result(path)}: it is not JSON ({error})") from error
    if isinstance(data, dict):
        data = {"settings": {}, **data}
    wrong = _wrong_shape(data)
    if wrong:
        raise ResultError(f"{_no_result(path)}: {wrong}")
    return data  # type: ignore[no-any-return]


def _no_result(path: Path) -> str:
    return f"{path} is no result of `python -m benchmarks CASE --json FILE`"


def _wrong_shape(data: Any) -> str | None:
    """What keeps a file's content from being a result, if anything does."""
    if not isinstance(data, dict):
        return "it holds no object"
    for name, (kind, word) in _PARTS.items():
        if name not in data:
            return f"it has no {name}"
        if not isinstance(data[name], kind):
            return f"its {name} is no {word}"
    for fact in _FACTS:
        if not isinstance(data["environment"].get(fact, False), str | None):
            return f"its environment does not say the {fact}"
    if not data["rows"]:
        return "it has no rows"
    for number, row in enumerate(data["rows"], 1):
        if not isinstance(row, dict):
            return f"row {number} is no object"
    return None


def check_writable(path: Path) -> None:
    """Create the folder of a file that is written later, after what must not be lost.

    Raises:
        ResultError: it is a folder, or no file can be made there.
    """
    try:
        if path.is_dir():
            raise ResultError(f"{path} is a folder: give the name of a file in it")
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        if _is_replaced(path):
            _beside(target, b"").unlink()
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def write(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder where there is none: what was there stays until all of it is written.

    Raises:
        ResultError: no file can be made there.
    """
    check_writable(path)
    content = content.encode() if isinstance(content, str) else content
    try:
        if not _is_replaced(path):
            path.write_bytes(content)
            return
        target = path.resolve()  # a link stays one
        new = _beside(target, content)
        try:
            if target.exists():
                shutil.copymode(target, new)
            new.replace(target)
        except OSError:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def _is_replaced(path: Path) -> bool:
    """Pipes and devices are written into."""
    return path.is_file() or not path.exists()


def _beside(path: Path, content: bytes) -> Path:
    """A new file with `content` in the folder of `path`; none is left where that fails."""
    new = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with new.open("xb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            new.unlink(missing_ok=True)
            raise
    return new


@dataclass(frozen=True)
class Figure:
    """One thing that was measured.

    Attributes:
        time: median, in `unit`.
        unit: `ms`, `us` or `s`.
        ratio: how many times as fast as the baseline of its file; None for a baseline.
        spread: (highest - lowest) / median over the rounds, where the file says.
    """

    time: float
    unit: str
    ratio: float | None
    spread: float | None = None


@dataclass(frozen=True)
class Result:
    """A result file.

    Attributes:
        name: of the file.
        case: what was run.
        environment: card, versions, commit, date.
        settings: options of the case; empty in older files.
        figures: by what was measured.
    """

    name: str
    case: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    figures: dict[str, Figure]

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a file that `python -m benchmarks CASE --json FILE` wrote.

        Raises:
            ResultError: it cannot be read, is none, or holds a time or ratio that is no positive number.
        """
        data = load(path)
        try:
            figures = figures_of(data["rows"])
        except ResultError as error:
            raise ResultError(f"{path}: {error}") from error
        return cls(path.name, data["case"], data["environment"], data["settings"], figures)


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """Everything timed in `rows`, by label.

    Raises:
        ResultError: a time or ratio is no positive number.
    """
    figures: dict[str, Figure] = {}
    alone: list[tuple[str, Figure]] = []
    for number, row in enumerate(rows, 1):
        try:
            found = _compared(row)
            figures |= found
            if not found:
                alone += _alone(row)
        except ResultError as error:
            raise ResultError(f"row {number}: {error}") from error
    return figures | _with_ratios(alone)


def _compared(row: dict[str, Any]) -> dict[str, Figure]:
    """What a row holds with its ratios: a ratio itself, or times side by side."""
    label = _label(row)
    if "ratio" in row:
        ratio = _positive(row, "ratio")
        spread = (_positive(row, "highest") - _positive(row, "lowest")) / ratio if "highest" in row else None
        time = next((_positive(row, key) for key in ("fast_ms", "ms") if key in row), float("nan"))
        return {label: Figure(time, "ms", ratio, spread)}
    side_by_side = _side_by_side(row)
    baseline = next(iter(side_by_side.values()), None)
    return {
        f"{label}: {name}": Figure(time, unit, None if i == 0 or baseline is None else baseline[0] / time, spread)
        for i, (name, (time, unit, spread)) in enumerate(side_by_side.items())
    }


def _alone(row: dict[str, Any]) -> list[tuple[str, Figure]]:
    """The one time of a row, with its label, where there is one."""
    for key in _TIMES:
        if row.get(key) is not None:
            return [(_label(row), Figure(_positive(row, key), "s" if key == "seconds" else "ms", None, _spread(row)))]
    return []


def _with_ratios(alone: list[tuple[str, Figure]]) -> dict[str, Figure]:
    """Rows of one time each: those in the baseline's unit get a ratio."""
    if not alone:
        return {}
    first = next((one for one in alone if "eager" in one[0]), alone[0])
    return {
        label: figure
        if label == first[0] or figure.unit != first[1].unit
        else Figure(figure.time, figure.unit, first[1].time / figure.time, figure.spread)
        for label, figure in alone
    }


def _side_by_side(row: dict[str, Any]) -> dict[str, tuple[float, str, float | None]]:
    """(time, unit, spread) by name."""
    nested = {k: v for k, v in row.items() if isinstance(v, dict) and "median_ms" in v}
    if nested:
        return {name: (_positive(value, "median_ms"), "ms", _spread(value)) for name, value in nested.items()}
    unit = row.get("unit")
    if not isinstance(unit, str):
        return {}
    return {
        name: (_positive(row, name), unit, None)
        for name, value in row.items()
        if isinstance(value, float) and name not in _SIZES and not any(rate in name for rate in _RATES)
    }


def _spread(times: dict[str, Any]) -> float | None:
    if "min_ms" not in times or "median_ms" not in times:
        return None
    return (_positive(times, "max_ms") - _positive(times, "min_ms")) / _positive(times, "median_ms")


def _positive(values: dict[str, Any], key: str) -> float:
    """A time or ratio: what is divided by, and drawn.

    Raises:
        ResultError: it is missing, or no positive number.
    """
    value = values.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise ResultError(f"{key} is {value!r}, which is no positive number")


def _label(row: dict[str, Any]) -> str:
    """What was measured: the words of a row and its sizes."""
    words = [value for key, value in row.items() if isinstance(value, str) and key not in ("unit", "schedule", "rule")]
    sizes = [f"{key} {row[key]}" for key in _SIZES if isinstance(row.get(key), int)]
    return ", ".join([*words, *sizes])
