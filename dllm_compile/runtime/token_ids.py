# SPDX-License-Identifier: Apache-2.0
"""Ids and masks that a user hands over, as plain tensors, or an error that says what they are instead."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PaddingError, PromptError

_INTEGERS = frozenset(
    {
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
_FOREIGN_ID = "use the tokenizer that belongs to the model"


def integer_ids(ids: Tensor, name: str) -> Tensor:
    """`ids` as int64, where they lie.

    Args:
        ids: token ids of any integer dtype.
        name: what they are called in a message.

    Raises:
        PromptError: they are no integers, or hold no numbers that can be read; or an id that int64 cannot hold.
    """
    _refuse_unreadable(ids, name, PromptError)
    if ids.dtype not in _INTEGERS:
        raise PromptError(f"{name} must hold integer token ids, not {ids.dtype}")
    found = ids.detach().to(torch.int64)
    if ids.dtype == torch.uint64 and bool((wrapped := found < 0).any()):
        raise PromptError(f"{name} hold id {2**64 + int(found[wrapped][0])}, outside every vocabulary: {_FOREIGN_ID}")
    return found


def padding_mask(values: object) -> Tensor:
    """`values` of ones and zeros as a bool tensor, where they lie.

    Raises:
        PaddingError: they are no table of numbers, hold no numbers that can be read, or others than 0 and 1.
    """
    try:
        mask = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PaddingError("attention_mask is not rectangular: give one number, 1 or 0, for each id") from error
    _refuse_unreadable(mask, "attention_mask", PaddingError)
    mask = mask.detach()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise PaddingError(
            "attention_mask holds values other than 0 and 1: only padding masks are supported, 1 for tokens and 0 for "
            "padding (it is not added to scores)"
        )
    return mask.bool()


def _refuse_unreadable(values: Tensor, name: str, error: type[PromptError]) -> None:
    """Refuse tensors that are not laid out as plain numbers."""
    if values.is_nested:
        raise error(f"{name}: a nested tensor cannot be read here, pass a padded one and its mask")
    if values.layout is not torch.strided:
        raise error(f"{name}: a tensor of layout {values.layout} cannot be read, pass its .to_dense()")
    if values.is_meta:
        raise error(f"{name}: a tensor on the meta device holds no numbers, pass one with data")
    if values.is_quantized:
        raise error(f"{name}: a quantized tensor ({values.dtype}) cannot be read, pass plain integers")
