# SPDX-License-Identifier: Apache-2.0
"""Running a generated function: syntax allow-list first, then a separate, limited process.

The code comes from a model, so it is not trusted: only a small part of Python's syntax passes (no imports, no attribute
but `append`, no names beginning with an underscore), and what passes runs with a handful of builtins in an isolated
interpreter with limits on processor time, memory and open files.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from typing import Any

TIME_LIMIT_S = 5.0
_BUILTINS = ("sum", "len", "max", "min", "sorted", "range", "abs", "list", "int", "enumerate", "zip", "map", "filter")
_ALLOWED: tuple[type[ast.AST], ...] = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.If,
    ast.Expr, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Store, ast.Constant, ast.List, ast.Tuple, ast.ListComp,
    ast.GeneratorExp, ast.comprehension, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.Attribute, ast.Subscript, ast.Slice, ast.Pass, ast.Break, ast.Continue,
)  # fmt: skip
_RUNNER = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
job = json.load(sys.stdin)
import builtins
names = {"__builtins__": {name: getattr(builtins, name) for name in job["builtins"]}}
exec(job["code"], names)
ok = all(names[job["function"]](list(values)) == expected for values, expected in job["tests"])
print("passed" if ok else "failed")
"""


def is_allowed(code: str) -> bool:
    """Whether `code` parses and uses nothing outside the allowed syntax."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or isinstance(node, ast.Pow | ast.LShift):
            return False
        if isinstance(node, ast.Attribute) and node.attr != "append":
            return False
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return False
        name = {ast.Name: "id", ast.FunctionDef: "name", ast.arg: "arg"}.get(type(node))
        if name is not None and getattr(node, name).startswith("_"):
            return False
    return True


def run_tests(code: str, function: str, tests: list[tuple[list[int], Any]]) -> bool:
    """Whether `function`, as defined by `code`, returns the expected value for every (list, expected) pair."""
    if not is_allowed(code):
        return False
    job = json.dumps({"code": code, "function": function, "tests": tests, "builtins": _BUILTINS})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _RUNNER],
            input=job,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            env={},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.stdout.strip() == "passed"
