# SPDX-License-Identifier: Apache-2.0
"""`dllm::write_rows`: fresh rows into a preallocated state, in place."""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows_reference(state: Tensor, rows: Tensor, value: Tensor) -> None:
    """`state[rows] = value`.

    Args:
        state: [R, *], written at `rows` only.
        rows: [W] int64; a row may be named twice when both carry the same value.
        value: [W, *], state's dtype; may be a strided view.
    """
    state.index_copy_(0, rows, value)


@torch.library.custom_op("dllm::write_rows", mutates_args=("state",))
def write_rows(state: Tensor, rows: Tensor, value: Tensor) -> None:
    """See `write_rows_reference`."""
    write_rows_reference(state, rows, value)


@write_rows.register_fake
def _(state: Tensor, rows: Tensor, value: Tensor) -> None:
    return None
