# SPDX-License-Identifier: Apache-2.0
"""How many kernels a compiled program launches, read from the code that Inductor generated for it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

# Calls of a generated `call` function that compute nothing: they allocate, check or look at memory another way.
_NO_WORK = ("assert", "empty", "reinterpret_tensor", "alloc_from_pool", "_C.", "check_input")


@dataclass(frozen=True)
class Launches:
    """What one run of a program starts.

    Attributes:
        generated: kernels that Inductor wrote (Triton on a card, C++ loops on a CPU).
        library: calls into a library or a kernel of torch's own: matrix products, sorts, copies by index.
        operators: calls of `dllm::` operators, each one or two kernels on a card.
    """

    generated: int
    library: int
    operators: int

    def __str__(self) -> str:
        """For the report."""
        return f"{self.generated} generated, {self.library} library, {self.operators} dllm"


def program_launches(sources: Sequence[str], calls: Sequence[int]) -> Launches | None:
    """Launches of a program compiled to several graphs, each called so many times; None where that is not known."""
    if not sources or len(sources) != len(calls):
        return None
    parts = [source_launches(source) for source in sources]
    generated, library, operators = (
        sum(getattr(part, name) * count for part, count in zip(parts, calls, strict=True))
        for name in ("generated", "library", "operators")
    )
    return Launches(generated, library, operators)


def source_launches(source: str) -> Launches:
    """Launches of one generated module: calls in its `call` function and in the partitions it may consist of."""
    tree = ast.parse(source)
    kernels = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _name(node.value).startswith("async_compile.")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    counts = {"generated": 0, "library": 0, "operators": 0}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if function.name != "call" and not function.name.startswith("partition_"):
            continue
        for node in ast.walk(function):
            kind = _kind(node, kernels) if isinstance(node, ast.Call) else None
            if kind is not None:
                counts[kind] += 1
    return Launches(**counts)


def _kind(call: ast.Call, kernels: set[str]) -> str | None:
    name = _name(call.func)
    if name.removesuffix(".run") in kernels:
        return "generated"
    if name.startswith("torch.ops.dllm."):
        return "operators"
    # `aten` is bound to `torch.ops.aten` in generated modules.
    if name.startswith(("extern_kernels.", "torch.ops.", "aten.")) and not any(word in name for word in _NO_WORK):
        return "library"
    return None


def _name(node: ast.AST) -> str:
    """`a.b.c` of an expression or of what it calls; '' for anything else."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
