# SPDX-License-Identifier: Apache-2.0
"""Work of a program for given sizes: multiply-adds and bytes of each call, counted from its graph.

The count says what an ideal execution would move: every operand once, weights included; views and index arithmetic are
free. It is a floor, equal on every machine, so that a change of a pass shows as a number in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from .passes.graph import describe, target_name

_FREE = frozenset({"getitem", "aten.split_with_sizes", "aten.unflatten", "aten.view", "aten.transpose"})


Table = list[list[int]]
_Cost = Callable[[tuple[Any, ...], Any, list[Table]], tuple[int, int]]


@dataclass(frozen=True)
class CallCost:
    """Work of one call.

    Attributes:
        node: name in the graph.
        operator: `aten.linear`, `dllm.row_attention`, ….
        module: where in the model it came from.
        flops: two for each multiply-add of matrix products and attention; pointwise work is not counted.
        bytes: operands and results, each once.
        fp8_flops: those of `flops` whose operands are FP8 codes, which a card does about twice as fast as others.
    """

    node: str
    operator: str
    module: str
    flops: int
    bytes: int
    fp8_flops: int = 0


def program_costs(gm: GraphModule, inputs: Mapping[str, Tensor]) -> tuple[CallCost, ...]:
    """Cost of every call of a program.

    Args:
        gm: the program.
        inputs: by name. Tables (`tiles`, `block_tiles`) must hold values; of the others only shape and dtype count, so
            meta tensors will do.
    """
    counter = _Counter(gm, inputs)
    counter.run_counted()
    return tuple(counter.costs)


def total(costs: Iterable[CallCost]) -> CallCost:
    """Sum over calls."""
    costs = list(costs)
    flops, size, fp8 = (sum(getattr(c, name) for c in costs) for name in ("flops", "bytes", "fp8_flops"))
    return CallCost("total", "", "", flops, size, fp8)


class _Counter(Interpreter):
    def __init__(self, gm: GraphModule, inputs: Mapping[str, Tensor]) -> None:
        super().__init__(gm)
        self.inputs = inputs
        self.costs: list[CallCost] = []
        self.tables: dict[str, Table] = {n: t.tolist() for n, t in inputs.items() if n.endswith("tiles")}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run_counted(self) -> None:
        names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
        missing = [name for name in names if name not in self.inputs]
        if missing:
            raise KeyError(f"the program has the inputs {', '.join(names)}; {', '.join(missing)} missing")
        with self.mode, torch.no_grad():
            self.run(*(self._fake(self.inputs[name]) for name in names))

    def _fake(self, value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")

    def fetch_attr(self, target: str) -> Any:
        """Parameters count by shape."""
        return self._fake(super().fetch_attr(target))

    def run_node(self, node: Node) -> Any:
        """Run on fake values and record the cost of a call."""
        result = super().run_node(node)
        if node.op == "call_function":
            args, _ = self.fetch_args_kwargs_from_env(node)
            self.costs.append(self._cost(node, args, result))
        return result

    def _cost(self, node: Node, args: tuple[Any, ...], result: Any) -> CallCost:
        name = target_name(node)
        special = _SPECIAL.get(name)
        if special is not None:
            tables = [self.tables[str(arg.target)] for arg in node.all_input_nodes if str(arg.target) in self.tables]
            flops, size = special(args, result, tables)
        else:
            flops = 0
            size = 0 if name in _FREE else sum(map(_bytes, (*args, result)))
        return CallCost(node.name, name, describe(node), flops, size, flops if name in _FP8 else 0)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, tuple | list) else 0


def _linear(args: tuple[Any, ...], result: Any, _: list[Table]) -> tuple[int, int]:
    x, weight = args[:2]
    rows = prod(x.shape[:-1])
    return 2 * rows * prod(weight.shape), sum(map(_bytes, (*args, result)))


def _fp8_linear(args: tuple[Any, ...], result: Any, _: list[Table]) -> tuple[int, int]:
    codes, _, weight = args[:3]
    return 2 * codes.shape[0] * prod(weight.shape), sum(map(_bytes, (*args, result)))


def _gather(args: tuple[Any, ...], result: Any, _: list[Table]) -> tuple[int, int]:
    return 0, 2 * _bytes(result)


def _write_rows(args: tuple[Any, ...], _: Any, __: list[Table]) -> tuple[int, int]:
    return 0, 2 * _bytes(args[2])


def _cache_write(args: tuple[Any, ...], result: Any, __: list[Table]) -> tuple[int, int]:
    # Read: the projection, two rows of the rotary tables, two indices. Written: q, and a row of each cache.
    qkv, cos, _, positions, rows = args[:5]
    tables = 2 * len(rows) * cos.shape[1] * cos.element_size()
    return 0, 2 * _bytes(qkv) + tables + _bytes(positions) + _bytes(rows)


def _row_scores(args: tuple[Any, ...], _: Any, __: list[Table]) -> tuple[int, int]:
    # Every cached key against one summed query for each key head.
    window, keys, spans, scores = args[1:]
    return 2 * prod(keys.shape), _bytes(keys) + _bytes(spans) + 2 * _bytes(scores) + _bytes(window)


def _scored_attention(args: tuple[Any, ...], result: Any, tables: list[Table]) -> tuple[int, int]:
    # Attention, and every key it reads against one summed query for each head.
    flops, size = _attention("dllm.row_attention")(args, result, tables)
    keys = sum(end - begin for begin, end in {(tile[2], tile[3]) for tile in tables[-1] if tile[0] < tile[1]})
    q, window, spans, scores = args[0], *args[5:8]
    written = 2 * keys * q.shape[1] * scores.element_size()
    return flops + 2 * keys * q.shape[1] * q.shape[2], size + _bytes(window) + _bytes(spans) + written


def pairs(operator: str, tiles: Table) -> int:
    """Scores an attention operator computes for the rows of a tile table: (query row, key row) pairs of one head."""
    count = 0
    for begin, end, key_begin, key_end, *block in tiles:
        if operator == "dllm.facache_step" and not block[0] <= begin < block[1]:
            key_begin, key_end = block
        count += max(end - begin, 0) * (key_end - key_begin)
    return count


def _attention(operator: str) -> _Cost:
    def cost(args: tuple[Any, ...], result: Any, tables: list[Table]) -> tuple[int, int]:
        q, k = args[:2]
        flops = 4 * pairs(operator, tables[-1]) * q.shape[1] * q.shape[2]
        keys = sum(end - begin for begin, end in {(tile[2], tile[3]) for tile in tables[-1] if tile[0] < tile[1]})
        state = sum(map(_bytes, args[3:6])) if operator.startswith("dllm.facache") else 0
        return flops, _bytes(q) + _bytes(result) + 2 * keys * prod(k.shape[1:]) * k.element_size() + state

    return cost


def _verify_attention(args: tuple[Any, ...], result: Any, tables: list[Table]) -> tuple[int, int]:
    # The rows of a tile and its keys in the cache, all against all: what the small mask hides is computed as well.
    q, k, v = args[:3]
    tiles = [tile for tile in tables[-1] if tile[0] < tile[1]]
    own = sum((end - begin) ** 2 for begin, end, *_ in tiles)
    keys = sum(k_end - k_begin for *_, k_begin, k_end in tiles)
    flops = 4 * (pairs("dllm.verify_attention", tiles) + own) * q.shape[1] * q.shape[2]
    return flops, sum(map(_bytes, (q, k, v, result))) + 2 * keys * prod(k.shape[1:]) * k.element_size()


# Products of FP8 codes.
_FP8 = frozenset({"dllm.quantized_linear", "dllm.fp8_linear", "dllm.fp8_linear_add_rms_norm"})

_SPECIAL: dict[str, _Cost] = {
    "aten.linear": _linear,
    "dllm.quantized_linear": _linear,
    "dllm.linear_add_rms_norm": _linear,
    "dllm.linear_add_rms_norm_quant": _linear,
    "dllm.fp8_linear": _fp8_linear,
    "dllm.fp8_linear_add_rms_norm": _fp8_linear,
    "dllm.head": _linear,
    "head_reference": _linear,
    "dllm.head_confidence": _linear,
    "dllm.head_verify": _linear,
    "dllm.verify_attention": _verify_attention,
    "dllm.embed": _gather,
    "embed_reference": _gather,
    "aten.index_select": _gather,
    "dllm.write_rows": _write_rows,
    "dllm.qkv_rope_cache_write": _cache_write,
    "dllm.row_attention_scored": _scored_attention,
    "dllm.row_scores": _row_scores,
    **{
        name: _attention(name)
        for name in ("dllm.row_attention", "dllm.cached_attention", "dllm.facache_first", "dllm.facache_step")
    },
}
