# SPDX-License-Identifier: Apache-2.0
"""The FP8 operators against bf16 at the 8B shape, in one run: products, whole feed-forward layers, fused row kernels.

`product`: `dllm::fp8_linear` for the four linear layers at nine row counts, against cuBLAS in bf16 and torch's
block-scaled product. `next`: products followed by residual add and norm, as a step has them. `ffn`: both projections
with activation and all quantization, against the same in bf16 compiled by Inductor, alone and with the norms around
it. `rows`: bytes a second of the kernels that quantize. Operands rotate among several sets, so that the L2 does not
help; times are medians of graph replays. `--tune` times neighbours of the shipped launch configurations instead.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=("product", "next", "ffn", "rows"), help="measure one of the tables")
    parser.add_argument("--tune", action="store_true", help="time neighbours of the launch configurations instead")
    parser.add_argument("--tune-shapes", nargs="+", help="some of gate+up, down, QKV, out, out-bf16, norm, swiglu")
    parser.add_argument("--tune-rows", nargs="+", type=int, help="row counts to tune for")


@torch.no_grad()
def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the tables that are asked for."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise SystemExit("fp8-kernels measures CUDA kernels: run it on a card with FP8")
    # Imported here, since they import Triton: the other cases run without.
    if arguments.tune:
        from .fp8_tuning import tune

        return tune(arguments.tune_shapes, arguments.tune_rows, arguments.rounds)
    from .fp8_tables import TABLES

    rows = []
    for name, measure in TABLES.items():
        if arguments.only in (None, name):
            for row in measure(arguments.rounds):
                rows.append({"table": name, "unit": "us", **row})
                print(rows[-1], flush=True)
    return rows
