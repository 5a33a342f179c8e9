# SPDX-License-Identifier: Apache-2.0
"""From what a user passes to a list of prompts without padding, and the checks before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import DecodingConfig
from ..errors import ConfigError, EmptyPromptError, MaskTokenError, PaddingError, PromptError, PromptTooLongError
from .facts import ModelFacts, stop_ids
from .token_ids import integer_ids, padding_mask

__all__ = ["ModelFacts", "check_length", "check_mask_token", "check_prompts", "split_prompts"]

PromptInput = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


def split_prompts(
    input_ids: PromptInput, attention_mask: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    """Take padding away and bring every form of input into one.

    Args:
        input_ids: (B, T) integer tensor; (T,) tensor or list of ints, one prompt; or a list of ragged lists or 1-D
            tensors, or a nested tensor of such.
        attention_mask: same shape as `input_ids` (lists as ragged as the prompts, too), 1 for tokens and 0 for padding,
            which may stand on the left or on the right of each row. None: every id is a token (also ids equal to the
            pad id).

    Returns:
        B prompts, each (P,) int64 on the CPU. They may be empty or hold bad ids: `check_prompts` looks at that.

    Raises:
        PromptError: no prompts at all, or ids that are not integers.
        PaddingError: the mask does not fit the ids, or holds padding in the middle of a row.
        EmptyPromptError: a row whose mask is all zeros.
    """
    prompts = _rows(input_ids)
    if not prompts:
        raise PromptError("There are no prompts: pass at least one")
    return prompts if attention_mask is None else _without_padding(prompts, attention_mask)


def _rows(input_ids: PromptInput) -> list[Tensor]:
    if isinstance(input_ids, Tensor) and input_ids.is_nested:
        input_ids = list(input_ids.unbind())
    if isinstance(input_ids, Tensor):
        ids = _integers(input_ids)
        if ids.dim() not in (1, 2):
            raise PromptError(f"input_ids has shape {tuple(ids.shape)}: pass (batch, tokens) or a list of prompts")
        return list(ids) if ids.dim() == 2 else [ids]
    if isinstance(input_ids, str) or not isinstance(input_ids, Sequence):
        raise PromptError(f"input_ids is a {type(input_ids).__name__}: pass a tensor or a list of prompts")
    if input_ids and all(isinstance(one, int) for one in input_ids):
        return [_integers(input_ids)]
    prompts = [_integers(prompt) for prompt in input_ids]
    for i, prompt in enumerate(prompts):
        if prompt.dim() != 1:
            raise PromptError(f"Prompt {i} has shape {tuple(prompt.shape)}: each prompt in a list is one-dimensional")
    return prompts


def _integers(values: object) -> Tensor:
    if isinstance(values, Sequence) and not isinstance(values, str) and not values:
        return torch.empty(0, dtype=torch.int64)
    try:
        ids = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(values, Sequence) and all(isinstance(one, int) for one in values):
            raise PromptError(
                f"Prompts hold id {max(values, key=abs)}, outside every vocabulary: use the tokenizer that belongs to "
                "the model"
            ) from error
        raise PromptError("Prompts must hold token ids (integers); strings need a tokenizer first") from error
    return integer_ids(ids, "Prompts").cpu()


def _on_host(mask: object) -> Any:
    """Moved before it is looked at: each look at a tensor on a card would wait for it."""
    return mask.cpu() if isinstance(mask, Tensor) and not mask.is_meta else mask


def _without_padding(
    prompts: list[Tensor], attention_mask: Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]
) -> list[Tensor]:
    if isinstance(attention_mask, Tensor) and attention_mask.is_nested:
        attention_mask = list(attention_mask.unbind())
    if isinstance(attention_mask, Sequence) and _lengths(attention_mask) == [len(prompt) for prompt in prompts]:
        # As ragged as the prompts: a tokenizer's, without padding.
        masks = [padding_mask(_on_host(row)) for row in attention_mask]
        shape = str([tuple(row.shape) for row in masks])
    else:
        mask = padding_mask(_on_host(attention_mask))
        masks = list(mask[None] if mask.dim() == 1 and len(prompts) == 1 else mask) if mask.dim() else []
        shape = str(tuple(mask.shape))
    if [row.shape for row in masks] != [prompt.shape for prompt in prompts]:
        widths = sorted({len(prompt) for prompt in prompts})
        raise PaddingError(
            f"attention_mask has shape {shape}, which does not fit {len(prompts)} prompts of "
            f"{' or '.join(map(str, widths))} ids: it must have the shape of input_ids. Ragged prompts need no mask"
        )
    return [_unpadded(i, prompt, row) for i, (prompt, row) in enumerate(zip(prompts, masks, strict=True))]


def _lengths(rows: Sequence[object]) -> list[int | None]:
    return [len(row) if isinstance(row, Sequence | Tensor) else None for row in rows]


def _unpadded(index: int, prompt: Tensor, kept: Tensor) -> Tensor:
    places = torch.nonzero(kept).flatten().tolist()
    if not places:
        raise EmptyPromptError(f"Prompt {index} is all padding: remove the row or give it at least one token")
    first, last = places[0], places[-1]
    if last - first + 1 != len(places) or (first > 0 and last + 1 < len(kept)):
        raise PaddingError(
            f"Prompt {index}: attention_mask must have its zeros on one side only (left or right); remove the padding "
            "in between, or pass a list of ragged prompts without a mask"
        )
    return prompt[first : last + 1]


def check_prompts(prompts: Sequence[Tensor], facts: ModelFacts, config: DecodingConfig) -> None:
    """Refuse what cannot be decoded, before anything is computed.

    Raises:
        MaskTokenError: the model has no usable mask id, or a prompt holds it and `config.infill` is off.
        EmptyPromptError: a prompt has no tokens.
        PromptError: there are no prompts, or one holds an id outside the vocabulary.
        PromptTooLongError: prompt and new tokens exceed the model's length.
        ConfigError: an option needs an eos id, and there is none.
    """
    mask_id = check_mask_token(facts)
    if not prompts:
        raise PromptError("There are no prompts: pass at least one")
    if config.key_end == "released" and not stop_ids(facts, config.eos_token_id):
        raise ConfigError("key_end='released' fills with eos ids, and the model states none: set eos_token_id")
    for i, prompt in enumerate(prompts):
        _check_prompt(i, prompt, facts, config, mask_id)


def check_mask_token(facts: ModelFacts) -> int:
    """The mask id, or `MaskTokenError` where it is missing, out of range or the same as another special id."""
    mask_id = facts.mask_token_id
    if mask_id is None:
        raise MaskTokenError("The model's configuration has no mask_token_id: set it (LLaDA-8B uses 126336)")
    if not 0 <= mask_id < facts.vocab_size:
        raise MaskTokenError(f"mask_token_id {mask_id} is not in the vocabulary of {facts.vocab_size}: correct it")
    for name, ids in (("pad_token_id", (facts.pad_token_id,)), ("eos_token_id", facts.eos_token_id)):
        if mask_id in ids:
            raise MaskTokenError(
                f"mask_token_id and {name} are both {mask_id}, so masks cannot be told apart: give {name} another id"
            )
    return mask_id


def _check_prompt(index: int, prompt: Tensor, facts: ModelFacts, config: DecodingConfig, mask_id: int) -> None:
    if len(prompt) == 0:
        raise EmptyPromptError(f"Prompt {index} has no tokens: give at least one (for instance the model's BOS token)")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= facts.vocab_size:
        bad = low if low < 0 else high
        raise PromptError(
            f"Prompt {index} holds id {bad}, outside the vocabulary of {facts.vocab_size}: "
            "use the tokenizer that belongs to the model"
        )
    check_length(index, len(prompt), facts, config)
    if not config.infill and bool((prompt == mask_id).any()):
        raise MaskTokenError(
            f"Prompt {index} holds the mask token {mask_id}: set infill=True to have it filled in, or remove it"
        )


def check_length(index: int, tokens: int, facts: ModelFacts, config: DecodingConfig) -> None:
    """Refuse a prompt of so many tokens if it and the new ones exceed the model's length.

    Raises:
        PromptTooLongError: they do.
    """
    limit, length = facts.max_sequence_length, tokens + config.max_new_tokens
    if limit is not None and length > limit:
        room = limit - tokens
        advice = f"Shorten the prompt by {length - limit} tokens"
        if room > 0:
            advice += f" or lower max_new_tokens to {room}"
        raise PromptTooLongError(
            f"Prompt {index} has {tokens} tokens and max_new_tokens is {config.max_new_tokens}: together {length} "
            f"positions, but the model's max_sequence_length is {limit}. {advice}"
        )
    padding = config.padding_of(length)
    if limit is not None and length + padding > limit:
        raise PromptTooLongError(
            f"Prompt {index}: key_end='released' needs {padding} positions behind its canvas of {length}, but the "
            f"model's max_sequence_length is {limit}. Use key_end='exact', or shorten the prompt or max_new_tokens"
        )
