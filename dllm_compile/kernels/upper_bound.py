# SPDX-License-Identifier: Apache-2.0
"""`dllm::upper_bound`: where values belong among sorted boundaries, by the kernel that torch launches."""

from __future__ import annotations

import torch
from torch import Tensor


def upper_bound(boundaries: Tensor, values: Tensor) -> Tensor:
    """How many boundaries are not above each value: `torch.searchsorted(boundaries, values, right=True)`.

    Inductor writes a search of its own for CUDA. In torch 2.11 that one reads a view of the boundaries from the start
    of its storage (the first row of `running[1:]` was lost), and does not compile for two dimensions. Compiled code
    therefore calls this operator, which stays what it is.

    Args:
        boundaries: [*, n], ascending along n.
        values: [*, w], same leading dimensions, or any shape where boundaries are [n].

    Returns:
        Like values, int64.
    """
    if torch.compiler.is_compiling():
        return _upper_bound(boundaries, values)  # type: ignore[no-any-return]
    return torch.searchsorted(boundaries, values, right=True)


@torch.library.custom_op("dllm::upper_bound", mutates_args=())
def _upper_bound(boundaries: Tensor, values: Tensor) -> Tensor:
    return torch.searchsorted(boundaries.contiguous(), values.contiguous(), right=True)


@_upper_bound.register_fake
def _(boundaries: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(values, dtype=torch.int64, memory_format=torch.contiguous_format)
