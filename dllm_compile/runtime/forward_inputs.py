# SPDX-License-Identifier: Apache-2.0
"""What an optimized model's own forward takes, checked before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PaddingError, PromptError, PromptTooLongError
from .facts import ModelFacts
from .token_ids import integer_ids, padding_mask


def checked_ids(ids: object, vocab_size: int) -> Tensor:
    """`ids` as (B, T) int64, or a `PromptError` that says what is wrong with them."""
    if not isinstance(ids, Tensor):
        raise PromptError(
            f"input_ids must be a (B, T) tensor of token ids, not a {type(ids).__name__}: torch.tensor([[1, 2]]) is "
            "one; prompts of other kinds are for generate"
        )
    found = integer_ids(ids, "input_ids")
    if found.dim() != 2 or not found.numel():
        raise PromptError(f"input_ids must be a (B, T) tensor of token ids, not {tuple(ids.shape)} {ids.dtype}")
    low, high = (int(value) for value in found.aminmax())
    if low < 0 or high >= vocab_size:
        raise PromptError(
            f"input_ids hold {low if low < 0 else high}, outside the vocabulary of {vocab_size}: "
            "use the tokenizer that belongs to the model"
        )
    return found


def checked_mask(attention_mask: object, ids: Tensor, facts: ModelFacts) -> tuple[Tensor, Tensor]:
    """The mask as (B, T) bool, and the tokens of each row (B,).

    Args:
        attention_mask: 1 for tokens; None: every id is one.
        ids: as `checked_ids` returns them.
        facts: how long a row may be.

    Raises:
        PaddingError: it does not fit the ids, hides all of them, or has padding between tokens.
        PromptTooLongError: a row has more tokens than the model has positions.
    """
    mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else padding_mask(attention_mask)
    if mask.shape != ids.shape:
        raise PaddingError(f"attention_mask {tuple(mask.shape)} and input_ids {tuple(ids.shape)} must be equal")
    lengths = mask.sum(1)
    # Contiguous tokens: every row turns from padding to tokens at most once.
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    if bool((starts > 1).any()):
        raise PaddingError("padding stands between tokens: pad each row on one side only")
    longest, limit = int(lengths.max()), facts.max_sequence_length
    if limit is not None and longest > limit:
        raise PromptTooLongError(f"a row has {longest} tokens, more than max_sequence_length={limit}: shorten it")
    if longest == 0:
        raise PaddingError("attention_mask hides every token: give each batch at least one token")
    return mask, lengths
