# SPDX-License-Identifier: Apache-2.0
"""What torch.compile made of a program, decompiled by depyf (optional, `pip install -e '.[debug]'`)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from pathlib import Path

import torch

from .._compat import distinct_sizes
from ..passes.graph import share
from ..runtime.ambient import plain_mode
from ..runtime.compiling import compile_program
from ..runtime.programs import Program


def has_depyf() -> bool:
    """Whether depyf is installed."""
    return importlib.util.find_spec("depyf") is not None


def decompile(program: Program, folder: Path, device: torch.device) -> str | None:
    """Compile a program once more, caches off, with depyf looking on; its files go to `folder`.

    A warm cache would hide most of what is made. Nothing that is in use changes.

    Returns:
        None, or why there is nothing: a tool for debugging must not take the rest of the dump with it.
    """
    import depyf
    import torch._inductor.config

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            warnings.catch_warnings(),
            torch._inductor.config.patch(force_disable_caches=True),
            contextlib.redirect_stdout(io.StringIO()),
            plain_mode(),
            distinct_sizes(),
        ):
            warnings.simplefilter("ignore")
            with depyf.prepare_debug(str(folder)):
                # A new module, so that its code is made while depyf looks on.
                compile_program(share(program.gm), device)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        return f"depyf failed on {program.name}: {type(error).__name__}: {reason}"
    return None
