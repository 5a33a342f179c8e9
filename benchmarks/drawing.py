# SPDX-License-Identifier: Apache-2.0
"""Drawing with matplotlib, which is optional: pictures that are the same to the last byte when drawn again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .figures import ResultError, write

ENDINGS: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
"""What pictures can be written as, and the metadata to leave out."""


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


def check_ending(path: Path) -> None:
    """Refuse, before anything is drawn, what `save` cannot write.

    Raises:
        ResultError: another ending than those of `ENDINGS`.
    """
    if path.suffix not in ENDINGS:
        raise ResultError(f"{path} does not end in one of {', '.join(ENDINGS)}, which are what can be drawn")


def save(figure: Any, path: Path) -> None:
    """Write a figure and close it; the same figure gives the same bytes, without a date or random ids.

    Raises:
        ResultError: another ending than those of `ENDINGS`, or no file can be made there.
    """
    check_ending(path)
    plt = pyplot()
    picture = io.BytesIO()
    try:
        with plt.rc_context({"svg.hashsalt": "dllm-compile"}):
            figure.savefig(picture, format=path.suffix[1:], metadata=ENDINGS[path.suffix])
    finally:
        plt.close(figure)
    write(path, picture.getvalue())
