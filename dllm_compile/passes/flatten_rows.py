# SPDX-License-Identifier: Apache-2.0
"""The canonical graph of a rectangular batch becomes a row program.

    ids [B, T]                      =>  ids [R], positions [R], tiles [n, 4]
    rope(., arange(T))              =>  rope(., positions)
    attention(q, k, v)              =>  row_attention(q, k, v, tiles, tile_rows)

Rows of all samples lie in one axis without padding; every other operator is row-wise and stays. Refused: a graph in
which something else than the canonical operators depends on the batch's shape.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from ..errors import PassError
from .framework import GraphPass, Level, Outcome
from .graph import aten, attribute, describe, find, placeholders, record_values, remove_dead_code
from .inputs import add_input, symbolic

# One tile per sample: what the CPU implementation takes.
WHOLE_SAMPLE = 0


def flatten_rows(gm: GraphModule, tile_rows: int) -> Outcome:
    """Rewrite `gm` for a flat row axis; `tile_rows` is the largest tile, or `WHOLE_SAMPLE`."""
    outcome = Outcome()
    ids = placeholders(gm)[0]
    device = attribute(gm, next(node for node in gm.graph.nodes if node.op == "get_attr")).device
    # Example sizes differ from each other, so that no two dimensions are taken to be one.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    row = symbolic(mode, torch.zeros(19, dtype=torch.int64, device=device), 0)
    with mode:
        positions_value = torch.empty_like(row)
    tiles_value = symbolic(mode, torch.zeros(5, 4, dtype=torch.int32, device=device), 0)
    positions = add_input(gm, "positions", positions_value)
    tiles = add_input(gm, "tiles", tiles_value)
    for node in find(gm, aten.arange.default):
        if node.meta.get("dllm_positions"):
            node.replace_all_uses_with(positions)
            outcome.accept()
    attentions = find(gm, torch.ops.dllm.attention.default)
    operator = torch.ops.dllm.row_attention.default
    for node in attentions:
        with gm.graph.inserting_before(node):
            flat = gm.graph.call_function(operator, (*node.args, tiles, tile_rows))
        flat.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        node.replace_all_uses_with(flat)
        outcome.accept()
    remove_dead_code(gm)
    left = find(gm, aten.sym_size.int, aten.scaled_dot_product_attention.default)
    if left or not attentions:
        what = describe(left[0]) if left else "the graph (it has no dllm.attention)"
        raise PassError(
            f"flatten_rows: {what} keeps the batch's shape; a row program needs every attention in canonical form"
        )
    ids.name = ids.target = "ids"
    gm.recompile()
    record_values(gm, mode, (row, positions_value, tiles_value))
    return outcome


def flatten_rows_pass(tile_rows: int) -> GraphPass:
    """The pass for a device's tile height."""
    return GraphPass(
        "flatten_rows",
        Level.EXACT,
        lambda gm: flatten_rows(gm, tile_rows),
        required=lambda layers: layers + 1,
        saves="padding rows of ragged batches",
    )
