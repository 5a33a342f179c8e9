# SPDX-License-Identifier: Apache-2.0
"""`dllm::cached_attention`: `row_attention` of a cached step, in which a few rows may be all that the card has to do.

Then several programs share the keys of a tile, and the last to arrive merges what they found. They count in an array
that every layer of a step uses: one array of zeros a step instead of one a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile.kernels.row_attention import check_row_attention, row_attention_cuda, row_attention_reference

ARRIVALS = 4096
"""Counters that a caller provides: enough wherever programs share the keys of a tile."""


def check_arrived(arrived: Tensor) -> None:
    """Raise `ValueError` where the counters are not contiguous int32."""
    if arrived.ndim != 1 or arrived.dtype != torch.int32 or not arrived.is_contiguous():
        raise ValueError(f"arrived must be contiguous (n,) int32, got {[*arrived.shape]} {arrived.dtype}")


@torch.library.custom_op(
    "dllm::cached_attention",
    mutates_args=("arrived",),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor tiles, SymInt tile_rows, Tensor(a!) arrived) -> Tensor",
)
def cached_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tile_rows: int, arrived: Tensor
) -> Tensor:
    """See `row_attention_reference`. On CUDA no tile may have more than `tile_rows` rows.

    Args:
        q, tiles, tile_rows: as there.
        k_cache, v_cache: [K, H_kv, hd].
        arrived: (`ARRIVALS`,) int32 zeros, contiguous, which are zeros again afterwards. Calls that may run at the same
            time must not share them; fewer than are needed are not used.

    Returns:
        As there.
    """
    check_row_attention(q, k_cache, v_cache, tiles)
    check_arrived(arrived)
    return row_attention_reference(q, k_cache, v_cache, tiles, tile_rows)


@cached_attention.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tile_rows: int, arrived: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@cached_attention.register_kernel("cuda")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tile_rows: int, arrived: Tensor) -> Tensor:
    check_row_attention(q, k_cache, v_cache, tiles)
    check_arrived(arrived)
    return row_attention_cuda(q, k_cache, v_cache, tiles, tile_rows, arrived)
