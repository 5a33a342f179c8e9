# SPDX-License-Identifier: Apache-2.0
"""A tiny random transformer with grouped-query attention, and the ids that it knows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.stale_rows import Attend

VOCAB, MASK, EOS, EOT, PAD = 40, 39, 38, 37, 36


class TinyModel:
    """Two layers, four heads on two key heads of eight; sharp enough that confidences spread over (0, 1)."""

    heads, head_dim = 4, 8

    def __init__(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        eos_bias: float = 0.0,
        layers: int = 2,
        kv_heads: int = 2,
    ) -> None:
        self.layers, self.kv_heads, self.dtype = layers, kv_heads, dtype
        generator = torch.Generator().manual_seed(seed)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def weight(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)).to(dtype)

        self.embedding = weight(VOCAB, width, math.sqrt(width))
        self.blocks = [
            {
                "q": weight(width, width, 4.0),
                "k": weight(kv_width, width, 4.0),
                "v": weight(kv_width, width),
                "o": weight(width, width, 4.0),
                "up": weight(2 * width, width),
                "down": weight(width, 2 * width),
            }
            for _ in range(self.layers)
        ]
        self.head = weight(VOCAB, width, 3.5)
        self.bias = torch.zeros(VOCAB, dtype=dtype)
        self.bias[EOS] = eos_bias

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(R,) ids at canvas positions -> (R, C)."""
        x = self.embedding[ids]
        for block in self.blocks:
            h = _norm(x)
            q = _rotate((h @ block["q"].T).unflatten(-1, (self.heads, self.head_dim)), positions)
            k = _rotate((h @ block["k"].T).unflatten(-1, (self.kv_heads, self.head_dim)), positions)
            v = (h @ block["v"].T).unflatten(-1, (self.kv_heads, self.head_dim))
            x = x + attend(q, k, v).flatten(-2) @ block["o"].T
            x = x + torch.nn.functional.silu(_norm(x) @ block["up"].T) @ block["down"].T
        return _norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T + self.bias

    def forward(self, ids: Tensor) -> Tensor:
        """The dense call: (1, N) int64 -> logits (1, N, V)."""
        return self.logits(self.hidden(ids[0], torch.arange(ids.shape[1]), attention))[None]


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.cat([positions[:, None] * frequency] * 2, dim=-1)[:, None]
    return x * angle.cos().to(x.dtype) + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin().to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(R, H, hd) queries on all the given keys."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
