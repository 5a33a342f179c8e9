# SPDX-License-Identifier: Apache-2.0
"""Drawing with matplotlib, which is optional: pictures that are the same to the last byte when drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .figures import ResultError


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files.

    Raises:
        ResultError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ResultError("drawing needs matplotlib: pip install -e '.[plot]'") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG and close it; the same figure gives the same bytes, without a date or random ids."""
    plt = pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "dllm-compile"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
