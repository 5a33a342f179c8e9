# SPDX-License-Identifier: Apache-2.0
"""The token embedding becomes `dllm::embed`.

    embedding(W, ids) -> [mul sqrt(C)]  =>  dllm.embed(ids, W, scale)

Anchor: the `embedding` of the graph's input. Refused: an embedding whose factor is no constant.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from .. import kernels as _kernels  # noqa: F401  (registers the operators)
from .framework import GraphPass, Level, Outcome
from .graph import aten, call, find, is_call, placeholders, replace


def apply(gm: GraphModule) -> Outcome:
    """Rewrite the embedding of `gm`'s ids."""
    outcome = Outcome()
    ids = placeholders(gm)[0]
    for node in find(gm, aten.embedding.default):
        weight, source = node.args[:2]
        if source is not ids:
            outcome.refuse(node, "looks up something else than the input ids")
            continue
        output, scale = node, 1.0
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if is_call(user, aten.mul.Tensor) and isinstance(user.args[1], float | int):  # type: ignore[union-attr]
            output, scale = user, float(user.args[1])  # type: ignore[union-attr,assignment]
        replace(output, call(gm, torch.ops.dllm.embed.default, (ids, weight, scale), like=node, before=output))
        outcome.accept()
    return outcome


NORMALIZE_EMBEDDING = GraphPass("normalize_embedding", Level.EXACT, apply, required=lambda layers: 1)
