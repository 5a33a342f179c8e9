# SPDX-License-Identifier: Apache-2.0
"""Times and ratios in a result file, found by what its rows hold, so that files of every case and age can be read.

A row is one measurement (`median_ms`, `ms_per_forward`, `seconds`), or several side by side: times by name, in
milliseconds under "median_ms" or in the row's "unit". Side by side, the first is what the others are compared with;
else the first row that names an eager model, or the first row. A ratio is the baseline's time over this one's: higher
is better, and it does not depend on how fast the clock ran.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMES = ("median_ms", "ms_per_forward", "seconds")
_RATES = ("_us", "TBps", "TFLOPs", "_error", "sqnr", "ratio")
# Numbers that say what was measured, not what came out.
_SIZES = ("batch", "samples", "rows", "keys", "length", "layers", "block_length", "m", "M", "slots")


class ResultError(Exception):
    """A file that is no result, or results that must not be compared; the message says why and what to do."""


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
            ResultError: it is not there, or none.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(path.name, data["case"], data["environment"], data.get("settings", {}), figures_of(data["rows"]))
        except OSError as error:
            raise ResultError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ResultError(
                f"{path} is no result of `python -m benchmarks CASE --json FILE`: it has no case, environment and rows"
            ) from error


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """Everything timed in `rows`, by label."""
    figures: dict[str, Figure] = {}
    alone: list[tuple[str, Figure]] = []
    for row in rows:
        label = _label(row)
        if "ratio" in row:
            spread = (row["highest"] - row["lowest"]) / row["ratio"] if "highest" in row else None
            figures[label] = Figure(row.get("fast_ms", row.get("ms", float("nan"))), "ms", row["ratio"], spread)
            continue
        side_by_side = _side_by_side(row)
        baseline = next(iter(side_by_side.values()), None)
        for i, (name, (time, unit, spread)) in enumerate(side_by_side.items()):
            ratio = None if i == 0 or baseline is None else baseline[0] / time
            figures[f"{label}: {name}"] = Figure(time, unit, ratio, spread)
        if not side_by_side:
            for key in _TIMES:
                if isinstance(row.get(key), int | float):
                    alone.append((label, Figure(row[key], "s" if key == "seconds" else "ms", None, _spread(row))))
                    break
    return figures | _with_ratios(alone)


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
        return {name: (value["median_ms"], "ms", _spread(value)) for name, value in nested.items()}
    unit = row.get("unit")
    if unit is None:
        return {}
    return {
        name: (float(value), unit, None)
        for name, value in row.items()
        if isinstance(value, float) and name not in _SIZES and not any(rate in name for rate in _RATES)
    }


def _spread(times: dict[str, Any]) -> float | None:
    if "min_ms" not in times or not times.get("median_ms"):
        return None
    return (times["max_ms"] - times["min_ms"]) / times["median_ms"]


def _label(row: dict[str, Any]) -> str:
    """What was measured: the words of a row and its sizes."""
    words = [value for key, value in row.items() if isinstance(value, str) and key not in ("unit", "schedule", "rule")]
    sizes = [f"{key} {row[key]}" for key in _SIZES if isinstance(row.get(key), int)]
    return ", ".join([*words, *sizes])
