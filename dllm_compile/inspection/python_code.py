# SPDX-License-Identifier: Apache-2.0
"""A graph as a Python module that can be read, imported and run.

One line a call, with dtype, sizes and strides of its result behind it, and a comment where the next module of the model
begins. Weights are looked up by name when the function runs (`inspection.dumped`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import __version__
from ..passes.graph import module_path, operator_counts, placeholders

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8e4m3",
    "int64": "i64",
    "int32": "i32",
    "bool": "b8",
}


def value_text(value: Any, *, strides: bool = True) -> str:
    """`f32[s0, 64][64, 1]`: dtype, sizes and strides of a recorded value."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        text = f"{_SHORT.get(dtype, dtype)}[{', '.join(map(str, value.shape))}]"
        return text + f"[{', '.join(map(str, value.stride()))}]" if strides else text
    if isinstance(value, tuple | list):
        return f"({', '.join(value_text(one, strides=strides) for one in value)})"
    return str(value)


def python_module(gm: GraphModule, label: str, example: str | None) -> str:
    """The text of a module that computes what `gm` computes.

    Args:
        gm: any graph of this package.
        label: what it is, the first words of the file.
        example: name of the file with example inputs beside it, without its ending; None: there is none.
    """
    writer = _Writer()
    body = [line for node in gm.graph.nodes for line in writer.lines(node)]
    names = [node.name for node in placeholders(gm)]
    given = {node.name: str(node.target) for node in placeholders(gm)}
    shapes = [f"    {node.name}: {value_text(node.meta.get('val'))}" for node in placeholders(gm)]
    imports = sorted({f"from {module} import {name}" for module, name in writer.functions})
    example_lines = (
        []
        if example is None
        else [
            "",
            "",
            "def example(device=None):",
            '    """Inputs recorded with this file."""',
            f"    return recorded(__file__, {example!r}, {tuple(given)!r}, device)",
        ]
    )
    return "\n".join(
        [
            f"# {label}: {operator_counts(gm).total()} calls",
            f'"""Written by dllm_compile {__version__}, to be read and to be run.',
            "",
            "    load()  # from weights.safetensors in this folder; load(fast) or load(mapping) where there is none",
            "    forward(**example())",
            '"""',
            "",
            *(["import operator", ""] if writer.uses_operator else []),
            "import torch",
            "",
            "import dllm_compile.kernels  # registers the dllm:: operators",
            *imports,
            f"from dllm_compile.inspection.dumped import Weights{', recorded' if example else ''}",
            "",
            "weights = Weights(",
            "    __file__,",
            "    (",
            *(f"        {path!r}," for path in writer.weights),
            "    ),",
            ")",
            "load = weights.load",
            *example_lines,
            "",
            "",
            "@torch.no_grad()",
            f"def forward({', '.join(names)}):",
            '    """Inputs:',
            "",
            *shapes,
            '    """',
            *body,
            "",
        ]
    )


class _Writer:
    """Turns nodes into lines and remembers what the module must import."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.weights: dict[str, None] = {}
        self.uses_operator = False
        self._module = ""
        self._read: set[str] = set()

    def lines(self, node: Node) -> list[str]:
        """The lines of one node."""
        if node.op == "placeholder":
            return []
        if node.op == "output":
            return [f"    return {self._argument(node.args[0])}"]
        if node.op == "get_attr":
            return []  # where it is first read
        if node.op != "call_function":
            raise ValueError(f"a graph of this package has no {node.op} nodes ({node.name})")
        path = module_path(node)
        lines = [f"    # --- {path}"] if path and path != self._module else []
        self._module = path or self._module
        lines += [self._weight(source) for source in node.all_input_nodes if self._is_new(source)]
        return [*lines, f"    {node.name} = {self._call(node)}{_comment(node)}"]

    def _is_new(self, node: Node) -> bool:
        new = node.op == "get_attr" and node.name not in self._read
        self._read.add(node.name)
        return new

    def _weight(self, node: Node) -> str:
        self.weights[str(node.target)] = None
        return f"    {node.name} = weights[{str(node.target)!r}]{_comment(node)}"

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self._argument(node.args[0])}[{self._argument(node.args[1])}]"
        arguments = [self._argument(value) for value in node.args]
        arguments += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        return f"{self._target(node.target)}({', '.join(arguments)})"

    def _target(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
        module, name = target.__module__, target.__qualname__
        if module in ("_operator", "operator"):
            self.uses_operator = True
            return f"operator.{name}"
        self.functions.add((module, name))
        return name

    def _argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, tuple | list):
            inner = ", ".join(map(self._argument, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, slice):
            return f"slice({', '.join(self._argument(part) for part in (value.start, value.stop, value.step))})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        return repr(value)


def _comment(node: Node) -> str:
    return f"  # {value_text(node.meta['val'])}" if "val" in node.meta else ""


def module_name(label: str) -> str:
    """`label` as a name that can be imported."""
    return "".join(letter if letter.isalnum() else "_" for letter in label)
