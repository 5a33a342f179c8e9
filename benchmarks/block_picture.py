# SPDX-License-Identifier: Apache-2.0
"""One block of the bundled model as captured, rewritten, and in the step of Flash-Cache, drawn side by side as SVG.

The same drawings as in the `index.html` of `dump_graphs`. Nothing is measured; calls are counted on this machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch.fx import GraphModule

import dllm_compile
from dllm_compile.inspection.blocks import block_drawing, block_path
from dllm_compile.inspection.svg import beside, svg

from .figures import ResultError, write

LAYER = 1  # the first that looks like all others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--out", type=Path, default=Path("docs/block.svg"), help="SVG to write [%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    """Draw and write the picture."""
    fast = dllm_compile.optimize(dllm_compile.models.load_small(), compile=False)
    fast.generate([[5, 6, 7]], cache="flash", max_new_tokens=8)
    stages = dict(fast._snapshots)
    step = next(program for program in fast.programs.built if program.name.startswith("cached_step"))
    graphs = {
        "captured": stages["captured"],
        "rewritten": stages["pack_gate_up"],
        "in a step of Flash-Cache": step.gm,
    }
    try:
        write(arguments.out, beside([_drawn(name, gm) for name, gm in graphs.items()]) + "\n")
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {arguments.out}")
    return 0


def _drawn(name: str, gm: GraphModule) -> tuple[str, str]:
    path = block_path(gm, LAYER)
    assert path is not None
    drawing = block_drawing(gm, path)
    calls = sum(box.kind not in ("input", "output") for box in drawing.boxes.values())
    caption = f"{name}: {calls} calls"
    return caption, svg(drawing, caption)
