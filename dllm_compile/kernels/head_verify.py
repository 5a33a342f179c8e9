# SPDX-License-Identifier: Apache-2.0
"""`dllm::head_verify`: what `head_confidence` gives, and the probability of a token that somebody else proposed."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels.head_confidence import scan_vocabulary


def head_verify_reference(
    x: Tensor, weight: Tensor, scale: float, mask_id: int, banned: Tensor, given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Most probable token of each row, its probability, and the probability of a given token.

    Args:
        x, weight, scale, mask_id, banned: as in `head_confidence_reference`.
        given: (W,) int64 ids in [0, V).

    Returns:
        token (W,) int64 and confidence (W,) fp32, as `head_confidence_reference` returns them without noise;
        probability (W,) fp32, softmax(z) at the given token, 0 where that is banned.
    """
    found = scan_vocabulary(x, weight, scale, mask_id, banned, given=given)
    return found.token, found.confidence, found.given


def _check(x: Tensor, weight: Tensor, banned: Tensor, given: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"head_verify: x must be [W, C] and weight [V, C], got {[*x.shape]} and {[*weight.shape]}")
    if x.dtype != weight.dtype:
        raise TypeError(f"head_verify: x and weight must share a dtype, got {x.dtype} and {weight.dtype}")
    if banned.ndim != 1:
        raise ValueError(f"head_verify: banned must be (n,), got {[*banned.shape]}")
    if given.shape != x.shape[:1] or given.dtype != torch.int64:
        raise ValueError(f"head_verify: given must be ({x.shape[0]},) int64, got {[*given.shape]} {given.dtype}")


@torch.library.custom_op("dllm::head_verify", mutates_args=())
def head_verify(
    x: Tensor, weight: Tensor, scale: float, mask_id: int, banned: Tensor, given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `head_verify_reference`."""
    _check(x, weight, banned, given)
    return head_verify_reference(x, weight, scale, mask_id, banned, given)


@head_verify.register_fake
def _(
    x: Tensor, weight: Tensor, scale: float, mask_id: int, banned: Tensor, given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:1]
    number = torch.float32
    return x.new_empty(rows, dtype=torch.int64), x.new_empty(rows, dtype=number), x.new_empty(rows, dtype=number)


@head_verify.register_kernel("cuda")
def _(
    x: Tensor, weight: Tensor, scale: float, mask_id: int, banned: Tensor, given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, banned, given)
    if has_triton() and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from dllm_compile.kernels.head_confidence_triton import head_verify_triton

        with torch.cuda.device(x.device):  # Triton launches on the current device
            return head_verify_triton(x, weight, scale, mask_id, banned, given)
    return head_verify_reference(x, weight, scale, mask_id, banned, given)
