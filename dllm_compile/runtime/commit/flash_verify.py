# SPDX-License-Identifier: Apache-2.0
"""Flash-Verify: confident tokens are kept, the next ones are drafted and checked by the model itself.

Source: arXiv 2609.26796, Eq. 5 and Appendix C; the released code's other acceptance rule is here too, and the default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...config import DecodingConfig
from ...kernels.running_sum import running_log_sum
from ..capacity import bucket
from .base import Ranking, prefix
from .threshold import ThresholdRule


@dataclass(frozen=True)
class Search:
    """Candidates of a verify pass, from the most to the least confident draft.

    Attributes:
        columns: (S, c) int64, column of each candidate among the window's.
        real: (S, c) bool; those that are come first.
    """

    columns: Tensor
    real: Tensor


_SMALL = 256  # nothing is cut below this, so that short canvases of all lengths share their sizes


def within_canvas(config: DecodingConfig, longest: int) -> DecodingConfig:
    """The same decoding with no larger window, candidates and verify pass than canvases of `longest` positions fill.

    A verify pass has the size that its options name, so "everything" as an option would be rows that are never used.
    Canvases of nearly the same length get the same sizes, and so the same buffers and graphs.
    """
    longest = max(_SMALL, bucket(longest))
    largest = max(2 * config.window_length, 2 * config.most_candidates, config.verify_rows or 0)
    if config.rule != "flash_verify" or largest <= 2 * longest:
        return config
    return config.replace(
        window_length=min(config.window_length, longest),
        verify_candidates=min(config.most_candidates, longest),
        verify_rows=None if config.verify_rows is None else min(config.verify_rows, 2 * longest),
    )


@dataclass(frozen=True)
class FlashVerifyRule(ThresholdRule):
    """Commit what is confident (`ThresholdRule`), then the longest prefix of the drafts that a second pass confirms.

    The pass asks at candidate i for the model's prediction when all committed tokens and drafts 1..i-1 are filled in
    and the rest is masked: the conditional that one-token-a-step decoding in this order would see. Of that
    distribution, p_i is the probability of draft i and q_i the largest one.

    * `product` (released code): accept while p_1 p_2 ... p_i >= gamma.
    * `per_token` (the paper's Eq. 5): accept while the most probable token is draft i and q_i >= gamma.

    For gamma > 0.5 the product rule accepts a prefix of what the other one does.

    What that bounds, in total variation against sampling the accepted group one by one, in this order, from the
    model's own conditionals (not against the data): one accepted token is within 1 - q_i <= 1 - gamma. A group of m
    tokens has the joint probability P = q_1 ... q_m, and is within 1 - P of the joint distribution. So `per_token` is
    within 1 - gamma^m <= m (1 - gamma), and `product`, which holds P itself against gamma, within 1 - gamma whatever
    m is. The conditionals are those of the pass, over a cache that may be stale. Tokens that are kept for their
    confidence alone are outside of this.

    Attributes:
        threshold: epsilon, confidence of drafts that are kept at once.
        gamma: >= 0; above 1 nothing is accepted, and 0 accepts every draft (`product`), or all that agree.
        product: which of the two rules.
        candidates: most drafts that a pass checks.
    """

    gamma: float
    product: bool
    candidates: int

    @classmethod
    def of(cls, config: DecodingConfig) -> FlashVerifyRule:
        """The rule of a configuration with `commit="flash_verify"`."""
        product = config.verify_rule == "product"
        return cls(config.rule_parameter, config.verify_gamma, product, config.most_candidates)

    def search(self, confidence: Tensor, valid: Tensor) -> Search:
        """Choose what to verify.

        Args:
            confidence: (S, w) fp32 of the draft pass, candidates in ascending order of position.
            valid: (S, w) bool, those that were not committed and lie before the sample's end.
        """
        ranking = Ranking.of(confidence, valid)
        columns = ranking.order[:, : self.candidates]
        return Search(columns, torch.arange(columns.shape[1], device=columns.device) < valid.sum(-1, keepdim=True))

    def accept(self, draft: Tensor, token: Tensor, confidence: Tensor, probability: Tensor, real: Tensor) -> Tensor:
        """(S, c) bool: drafts to keep, a prefix in each row.

        Args:
            draft: (S, c) int64, the drafted tokens, in the order of the search.
            token: (S, c) int64, most probable token of each mask row.
            confidence: (S, c) fp32, q: its probability.
            probability: (S, c) fp32, p: the probability of the draft.
            real: (S, c) bool.
        """
        if self.product:
            # Logarithms, so that a long product of small numbers loses nothing.
            joint = running_log_sum(torch.where(real, probability, 1.0))
            passes = joint >= (math.log(self.gamma) if self.gamma > 0 else -math.inf)
        else:
            passes = (token == draft) & (confidence >= self.gamma)
        return prefix(passes & real)
