# SPDX-License-Identifier: Apache-2.0
"""Where and with what a figure was measured: part of every result, here and of `python -m benchmarks`."""

from __future__ import annotations

import datetime as dt
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import __version__

PACKAGE = Path(__file__).resolve().parents[1]
_CPUINFO = Path("/proc/cpuinfo")


def environment(device: torch.device | str | None = None, commit: str | None = None) -> dict[str, Any]:
    """Card (or processor), date, versions and commit, ready for JSON.

    Args:
        device: where the figure was measured; None is the first GPU if there is one and else the CPU.
        commit: of this package; None asks git, where the package is used from its checkout.
    """
    import transformers

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    used = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return {
        "card": device_name(used),
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dllm_compile": __version__,
        "commit": commit or checkout_commit(PACKAGE),
    }


def device_name(device: torch.device) -> str:
    """What a card calls itself; a CPU's model (else its architecture) and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return f"{processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """The model that Linux names, else the architecture."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def checkout_commit(folder: Path) -> str | None:
    """The commit checked out where the package lies; None without git, or for files that git does not track.

    An installed package may lie inside somebody else's repository, whose commit says nothing about it.
    """
    try:
        for words in (["ls-files", "--error-unmatch", "__init__.py"], ["rev-parse", "--short", "HEAD"]):
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
