# SPDX-License-Identifier: Apache-2.0
"""Figures that are the same in every run of the same code: a change of one is a change of the product.

    python -m benchmarks gates             measure, compare with benchmarks/expected, say what differs
    python -m benchmarks gates --update    measure, write the expected figures of this torch (and card)

Both ways count: a figure that is better than expected fails too, until the expected one is changed with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from .card import card_figures, has_card
from .compiled import compiled_figures
from .decoding import decoding_figures
from .expected import Expected, Figures, compare, expected_path
from .graphs import fp8_figures, graph_figures, has_fp8_package

__all__ = ["GROUPS", "Expected", "Figures", "compare", "decoding_figures", "expected_path", "is_possible", "measure"]

GROUPS: dict[str, Callable[[], Figures]] = {
    "graphs": graph_figures,
    "fp8": fp8_figures,
    "compiled": compiled_figures,
    "decoding": decoding_figures,
    "card": card_figures,
}
"""Every figure's name begins with the name of the group that measures it."""


def is_possible(group: str) -> bool:
    """Whether this machine can measure a group: "fp8" needs torchao, "card" a CUDA device."""
    return has_fp8_package() if group == "fp8" else has_card() if group == "card" else True


def measure(group: str) -> Figures:
    """All figures of a group, computed in one thread: how a sum is split must not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {f"{group}/{name}": value for name, value in GROUPS[group]().items()}
    finally:
        torch.set_num_threads(threads)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--update", action="store_true", help="write what is measured as what is expected")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), help="some of the groups")


def main(arguments: argparse.Namespace) -> int:
    """Measure, and compare or write; 1 where something differs."""
    failed = False
    for group in arguments.only or GROUPS:
        if not is_possible(group):
            print(f"{group}: not measured here ({'torchao is not installed' if group == 'fp8' else 'no card'})")
            continue
        path = expected_path(group)
        if arguments.update:
            found = measure(group)
            Expected.read(path).replaced(group, found).write(path)
            print(f"{group}: {len(found)} figures written to {path}")
            continue
        if not path.exists():
            print(f"{group}: {path} is not there; `python -m benchmarks gates --update` writes it")
            failed = True
            continue
        found = measure(group)
        text = compare(Expected.read(path).of(group), found, path)
        print(text or f"{group}: {len(found)} figures as expected")
        failed = failed or bool(text)
    return int(failed)
