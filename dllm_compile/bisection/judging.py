# SPDX-License-Identifier: Apache-2.0
"""How far a graph's result is from the ground, in one unit: the difference of logits over the largest logit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..acceptance import LOGITS_BOUND, NOISE_FACTOR
from ..certify import relative_deviation


@dataclass
class Bound:
    """The largest error that rounding explains.

    Args:
        dtype: of the parameters.
        noise: measures how far one rounding in each product reaches; called once, when the plain bound is exceeded.
    """

    dtype: torch.dtype
    noise: Callable[[], float]
    _measured: float | None = field(default=None, init=False)

    def of(self, error: float) -> float:
        """The bound against which `error` is held."""
        plain = LOGITS_BOUND[self.dtype]
        if error <= plain:
            return plain
        if self._measured is None:
            self._measured = self.noise()
        return max(plain, NOISE_FACTOR * self._measured)


def logits_error(expected: Tensor, actual: Tensor) -> float:
    """Of logits (R, V)."""
    return relative_deviation(expected.to(actual.dtype), actual)


def tokens_error(expected: Tensor, token: Tensor, confidence: Tensor, mask_token_id: int) -> float:
    """Of proposals, by the logits (W, V) they should come from.

    How far the logit of the token lies below the best one, and what an error of the logits would have to be to move
    the logarithm of its probability so far (at most twice the error).
    """
    z = expected.float()
    largest = z.abs().max().item()
    own = z.gather(1, token[:, None])[:, 0]
    best = z.index_fill(1, torch.tensor([mask_token_id], device=z.device), -torch.inf).amax(1)
    short = (best - own).max().item()
    moved = (confidence.log() - z.log_softmax(1).gather(1, token[:, None])[:, 0]).abs().max().item() / 2
    error = max(short, moved) / largest
    return error if math.isfinite(error) else math.inf


def probability_error(expected: Tensor, given: Tensor, probability: Tensor) -> float:
    """Of the probabilities (W,) of given tokens, as in `tokens_error`."""
    z = expected.float()
    moved = (probability.log() - z.log_softmax(1).gather(1, given[:, None])[:, 0]).abs().max().item() / 2
    error = moved / z.abs().max().item()
    return error if math.isfinite(error) else math.inf
