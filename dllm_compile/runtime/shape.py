# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that caches depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from ..passes.graph import find


@dataclass(frozen=True)
class ModelShape:
    """What the size of the state depends on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, canonical: GraphModule) -> ModelShape:
        """Read the sizes off a canonical graph."""
        attentions = find(canonical, torch.ops.dllm.attention.default)
        q, k, _ = (node.meta["val"] for node in attentions[0].args)  # type: ignore[union-attr]
        stream = find(canonical, torch.ops.dllm.head.default)[0].args[0].meta["val"]  # type: ignore[union-attr]
        heads, head_dim = map(int, q.shape[-2:])
        return cls(len(attentions), heads, int(k.shape[-2]), head_dim, int(stream.shape[-1]), q.dtype)

    def lacache_bytes_per_row(self, cached: int, embedding: bool = True) -> int:
        """Bytes of LaCache's state for one row; with guidance there are two rows for each position.

        In each cached layer q, k, v in the model's dtype and m, l, O in fp32; one embedding row in all.
        """
        size = self.dtype.itemsize
        layer = (self.heads + 2 * self.kv_heads) * self.head_dim * size + (self.head_dim + 2) * self.heads * 4
        return cached * layer + embedding * self.width * size
