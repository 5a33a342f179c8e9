# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks CASE --json FILE` measures; `gates`, `compare`, `history` judge it, `pages` shows it."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .figures import ResultError, check_writable, write

_AsWritten = argparse.RawDescriptionHelpFormatter

CASES = {
    "lacache-steps": "lacache_steps",
    "lacache-interval": "lacache_interval",
    "cache-kernels": "cache_kernels",
    "cache-kernel-blocks": "cache_kernel_blocks",
    "decoding": "decoding",
    "fp8-kernels": "fp8_kernels",
    "fp8-accuracy": "fp8_accuracy",
    "frontier": "frontier",
    "policies": "policies",
    "verify-kernels": "verify_kernels",
    "ratios": "ratios",
    "small-model": "small_model",
    "startup": "startup",
}
"""Modules with `add_arguments` and `run`, which returns one row of figures each."""

COMMANDS = {
    "gates": "gates",
    "compare": "compare",
    "history": "history",
    "pages": "pages",
    "block-picture": "block_picture",
}
"""Modules with `add_arguments` and `main`, which returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one case and write its figures with the environment they belong to, or run a command."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parsers = parser.add_subparsers(dest="case", required=True)
    words = sys.argv[1:] if argv is None else argv
    for name in (*CASES, *COMMANDS):
        about = _docstring(name)
        short = about.partition("\n")[0].replace("%", "%%")  # a help text is expanded, a description is not
        one = parsers.add_parser(name, help=short, description=about, formatter_class=_AsWritten)
        if name in CASES:
            one.add_argument("--json", type=Path, help="write the figures there")
            one.add_argument("--commit", help="the commit that is measured, where the folder is no checkout")
        if name in words:  # the others need not be importable here: some need Triton, or a card
            _module(name).add_arguments(one)
    arguments = parser.parse_args(argv)
    module = _module(arguments.case)
    if arguments.case in COMMANDS:
        return int(module.main(arguments))
    try:
        return _measure(module, arguments)
    except ResultError as error:
        print(f"{arguments.case}: {error}", file=sys.stderr)
        return 2


def _measure(module: ModuleType, arguments: argparse.Namespace) -> int:
    """Run a case, print its figures, write them.

    Raises:
        ResultError: the file cannot be written; where that can be known, nothing is measured.
    """
    from dllm_compile.bench.environment import environment

    if arguments.json:
        check_writable(arguments.json)
    rows = module.run(arguments)
    settings = {k: v for k, v in vars(arguments).items() if k not in ("case", "json", "commit")}
    result = {
        "case": arguments.case,
        "environment": environment(getattr(arguments, "device", None), arguments.commit),
        "settings": settings,
        "rows": rows,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False, default=str)
    try:
        print(text, flush=True)
    finally:  # one of both is enough: a pipe may be closed, a disk full
        if arguments.json:
            write(arguments.json, text + "\n")
    return 0


def _docstring(name: str) -> str:
    """What a case says of itself, without importing it."""
    place = Path(__file__).with_name((CASES | COMMANDS)[name])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{(CASES | COMMANDS)[name]}", __package__)


if __name__ == "__main__":
    sys.exit(main())
