# SPDX-License-Identifier: Apache-2.0
"""The query that scores keys inside the attention kernel; imported only where Triton is.

The sum of raw logits q . k over the rows of a window is linear in q, so one more row of the attention kernel does it.
Flash-Cache's released code multiplies every row of the window instead, and keeps the products of all heads.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def kernel_tracks(q: Tensor, window: Tensor) -> bool:
    """Whether the attention kernel scores keys for this window: its programs look through all samples.

    Not in fp16, in which a sum of queries may be infinite.
    """
    samples, rows = window.shape
    return q.dtype != torch.float16 and 0 < samples <= 1024 and 0 < rows <= 64


class Tracking(NamedTuple):
    """What `row_attention_scored` takes besides the arguments of `row_attention`: see there."""

    window: Tensor
    spans: Tensor
    scores: Tensor


@triton.jit
def summed_query(
    q,
    window,
    spans,
    samples,
    window_rows,
    q_row,
    k_begin,
    first_row,
    last_row,
    HEAD_DIM: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """A sample's summed query of one head as rows [16, HEAD_DIM] of q's dtype, and whether this program scores keys.

    `q` points to a head's row 0, [1, HEAD_DIM]. The program among whose rows is the window's last one scores the keys
    of that sample. 16-bit parts of the sum are rows of their own: three of bf16 hold every bit of an fp32 number.
    """
    sample = tl.arange(0, BLOCK_SAMPLES)
    begins = tl.load(spans + sample * 2, mask=sample < samples, other=0)
    ends = tl.load(spans + sample * 2 + 1, mask=sample < samples, other=0)
    found = tl.max(tl.where((begins == k_begin) & (ends > begins), sample, -1), 0)
    index = tl.arange(0, WINDOW)
    in_window = (index < window_rows) & (found >= 0)
    chosen = tl.load(window + found.to(tl.int64) * window_rows + index, mask=in_window, other=-1)
    last = tl.max(chosen, 0)
    here = (last >= first_row) & (last < last_row)
    queries = tl.load(q + chosen[:, None] * q_row, mask=(chosen >= 0)[:, None] & here, other=0.0)
    rest = tl.sum(queries.to(tl.float32), 0)[None, :]
    row = tl.arange(0, 16)[:, None]
    parts = tl.zeros((16, HEAD_DIM), q.dtype.element_ty)
    for i in tl.static_range(1 if q.dtype.element_ty == tl.float32 else 3):
        part = rest.to(q.dtype.element_ty)
        parts = tl.where(row == i, part, parts)
        rest -= part.to(tl.float32)
    return parts, here
