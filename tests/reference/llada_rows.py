# SPDX-License-Identifier: Apache-2.0
"""LLaDA's forward over any rows, written out from its parameters; attention is the caller's (see `stale_rows`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .stale_rows import Attend, dense_attention


class LladaRows:
    """Implements `RowModel` for a LLaDA with RMSNorm, without biases or QK-norm."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.layers: int = model.config.n_layers
        self.weights: dict[str, Tensor] = {name: value.detach() for name, value in model.named_parameters()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer by the name of its weight."""
        return F.linear(x, self.weights[name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.weights[name] * wide.to(x.dtype)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        inverse = 1.0 / self.config.rope_theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
        angle = torch.cat([positions[:, None] * inverse] * 2, dim=-1)[:, None]
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x.float() * angle.cos() + turned.float() * angle.sin()).to(x.dtype)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `RowModel.hidden`."""
        x = self.weights["model.transformer.wte.weight"][ids]
        head_dim = self.config.d_model // self.config.n_heads
        for layer in range(self.layers):
            name = f"model.transformer.blocks.{layer}."
            h = self._norm(x, name + "attn_norm.weight")
            projected = (self.linear(h, f"{name}{part}_proj.weight") for part in "qkv")
            q, k, v = (rows.unflatten(-1, (-1, head_dim)) for rows in projected)
            attended = attend(self._rotate(q, positions), self._rotate(k, positions), v).flatten(-2)
            x = x + self.linear(attended, name + "attn_out.weight")
            h = self._norm(x, name + "ff_norm.weight")
            gated = F.silu(self.linear(h, name + "ff_proj.weight")) * self.linear(h, name + "up_proj.weight")
            x = x + self.linear(gated, name + "ff_out.weight")
        return self._norm(x, "model.transformer.ln_f.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """See `RowModel.logits`."""
        tied = self.weights["model.transformer.wte.weight"]
        return F.linear(hidden, self.weights.get("model.transformer.ff_out.weight", tied))

    def forward(self, ids: Tensor) -> Tensor:
        """The dense call: (1, N) int64 -> logits (1, N, V)."""
        return self.logits(self.hidden(ids[0], torch.arange(ids.shape[1]), dense_attention))[None]
