# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks CASE [options] --json FILE`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from .environment import environment

CASES = {
    "lacache-steps": "lacache_steps",
    "lacache-interval": "lacache_interval",
    "cache-kernels": "cache_kernels",
    "cache-kernel-blocks": "cache_kernel_blocks",
    "decoding": "decoding",
    "fp8-kernels": "fp8_kernels",
    "fp8-accuracy": "fp8_accuracy",
    "frontier": "frontier",
}


def main() -> None:
    """Run one case and write its figures with the environment they belong to."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    cases = parser.add_subparsers(dest="case", required=True)
    for name, module in CASES.items():
        case = cases.add_parser(name, help=importlib.import_module(f".{module}", __package__).__doc__)
        case.add_argument("--json", type=Path, help="write the figures there")
        case.add_argument("--commit", help="the commit that is measured, where the folder is no checkout")
        importlib.import_module(f".{module}", __package__).add_arguments(case)
    arguments = parser.parse_args()
    rows = importlib.import_module(f".{CASES[arguments.case]}", __package__).run(arguments)
    result = {"case": arguments.case, "environment": environment(arguments.commit), "rows": rows}
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
