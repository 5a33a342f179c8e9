# SPDX-License-Identifier: Apache-2.0
"""`dllm::head_confidence`: head, arg-max (greedy or sampled) and probability of the chosen token, without logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile._compat import has_triton
from dllm_compile.kernels import counter_rng

_CHUNK = 8192  # vocabulary columns the reference holds at once
_LOWEST = torch.finfo(torch.float32).min


def head_confidence_reference(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Proposed token of each row and its probability under the unperturbed logits.

    z = x @ weight.T and z * scale are rounded to x's dtype, then taken as fp32.

    Args:
        x: [W, C] normed hidden rows.
        weight: [V, C] of the head, x's dtype.
        scale: factor on the logits; 1.0 leaves them.
        mask_id: id that is never chosen but keeps its share of the softmax; negative: none.
        banned: (n,) int64 ids with z = -inf, neither chosen nor in the softmax; negative entries mean nothing.
        seeds: (W,) int64. If given, the arg-max is over z + temperature * gumbel(seed, id) (see `counter_rng`).
        temperature: 0-dim fp32, given exactly if `seeds` is.

    Returns:
        token: (W,) int64; the lowest id wins a tie. confidence: (W,) fp32, softmax(z) at the token. Both are
        meaningless in a row where no id is left to choose or whose logits are not finite.
    """
    found = scan_vocabulary(x, weight, scale, mask_id, banned, seeds, temperature)
    return found.token, found.confidence


class Scan(NamedTuple):
    """What one pass over the vocabulary leaves of each row; `given` is meaningful where a token was given."""

    token: Tensor
    confidence: Tensor
    given: Tensor


def scan_vocabulary(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
    given: Tensor | None = None,
) -> Scan:
    """Arg-max, its probability and that of a given token, holding a chunk of the logits at a time.

    Args:
        x, weight, scale, mask_id, banned, seeds, temperature: as in `head_confidence_reference`.
        given: (W,) int64 ids in [0, V), or None.
    """
    rows, vocabulary = x.shape[0], weight.shape[0]
    token = x.new_zeros(rows, dtype=torch.int64)
    best, chosen, asked = x.new_full((3, rows), -torch.inf, dtype=torch.float32)
    peak = x.new_full((rows,), _LOWEST, dtype=torch.float32)  # finite: exponents of removed ids stay -inf, never NaN
    total = x.new_zeros(rows, dtype=torch.float32)
    for begin in range(0, vocabulary, _CHUNK):
        ids = torch.arange(begin, min(begin + _CHUNK, vocabulary), device=x.device)
        logits = F.linear(x, weight[begin : begin + _CHUNK])
        z = (logits if scale == 1.0 else logits * scale).float()
        z = z.masked_fill((ids.unsqueeze(1) == banned).any(1), -torch.inf)
        candidates = z
        if seeds is not None and temperature is not None:
            candidates = z + temperature * counter_rng.gumbel(seeds.unsqueeze(1), ids)
        value, index = candidates.masked_fill(ids == mask_id, -torch.inf).max(1)
        better = value > best  # strict: an earlier chunk has the lower ids
        best = torch.where(better, value, best)
        token = torch.where(better, index + begin, token)
        chosen = torch.where(better, z.gather(1, index.unsqueeze(1)).squeeze(1), chosen)
        if given is not None:
            here = (given >= begin) & (given < begin + len(ids))
            column = torch.where(here, given - begin, 0).unsqueeze(1)
            asked = torch.where(here, z.gather(1, column).squeeze(1), asked)
        new_peak = torch.maximum(peak, z.amax(1))
        total = total * torch.exp(peak - new_peak) + torch.exp(z - new_peak.unsqueeze(1)).sum(1)
        peak = new_peak
    return Scan(token, torch.exp(chosen - peak) / total, torch.exp(asked - peak) / total)


def _check(x: Tensor, weight: Tensor, banned: Tensor, seeds: Tensor | None, temperature: Tensor | None) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"head_confidence: x must be [W, C] and weight [V, C], got {[*x.shape]} and {[*weight.shape]}")
    if x.dtype != weight.dtype:
        raise TypeError(f"head_confidence: x and weight must share a dtype, got {x.dtype} and {weight.dtype}")
    if banned.ndim != 1:
        raise ValueError(f"head_confidence: banned must be (n,), got {[*banned.shape]}")
    if (seeds is None) != (temperature is None):
        raise ValueError("head_confidence: seeds and temperature must be given together")
    if seeds is not None and seeds.shape != x.shape[:1]:
        raise ValueError(f"head_confidence: seeds must be ({x.shape[0]},), got {[*seeds.shape]}")


@torch.library.custom_op(
    "dllm::head_confidence",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, float scale, int mask_id, Tensor banned, Tensor? seeds=None, "
        "Tensor? temperature=None) -> (Tensor, Tensor)"
    ),
)
def head_confidence(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `head_confidence_reference`."""
    _check(x, weight, banned, seeds, temperature)
    return head_confidence_reference(x, weight, scale, mask_id, banned, seeds, temperature)


@head_confidence.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:1], dtype=torch.int64), x.new_empty(x.shape[:1], dtype=torch.float32)


@head_confidence.register_kernel("cuda")
def _(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(x, weight, banned, seeds, temperature)
    if has_triton() and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from dllm_compile.kernels.head_confidence_triton import head_confidence_triton

        with torch.cuda.device(x.device):  # Triton launches on the current device
            return head_confidence_triton(x, weight, scale, mask_id, banned, seeds, temperature)
    return head_confidence_reference(x, weight, scale, mask_id, banned, seeds, temperature)
