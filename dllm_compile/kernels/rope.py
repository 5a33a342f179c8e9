# SPDX-License-Identifier: Apache-2.0
"""`dllm::rope`: split a projection into heads and rotate them by their position."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int) -> Tensor:
    """Half-split (NeoX) rotation in fp32.

    Args:
        x: [*, heads * hd] projection, any dtype; may be a strided view of a packed projection.
        cos, sin: [T_max, hd] fp32 tables, the half table repeated twice along hd.
        positions: [*] or its trailing dimensions, int64 canvas positions.
        heads: number of heads in x.

    Returns:
        [*, heads, hd], x's dtype, contiguous.
    """
    wide = x.unflatten(-1, (heads, -1)).to(torch.float32)
    row_cos = cos[positions].unsqueeze(-2)
    row_sin = sin[positions].unsqueeze(-2)
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * row_cos + rotated * row_sin).to(x.dtype)


@torch.library.custom_op("dllm::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int) -> Tensor:
    """See `rope_reference`."""
    return rope_reference(x, cos, sin, positions, heads).contiguous()


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], heads, x.shape[-1] // heads))
