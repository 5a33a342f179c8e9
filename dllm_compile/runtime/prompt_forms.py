# SPDX-License-Identifier: Apache-2.0
"""What `generate` takes as prompts, in the forms that users have them: strings, a tokenizer's output, ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import ConfigError, PromptError

Mask = Tensor | Sequence[int] | Sequence[Sequence[int]]
_TOKENIZERS = "pass one of transformers, or encode the prompts and decode `answers` yourself"
Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | str | Sequence[str] | Mapping[str, Any]


def encoded(prompts: Prompts | None, attention_mask: Mask | None, tokenizer: Any) -> tuple[Any, Mask | None]:
    """Ids and mask of `prompts`, which `split_prompts` takes.

    Args:
        prompts: ids, one or several strings, or a mapping with "input_ids" and perhaps "attention_mask" (a
            `BatchEncoding`); what else a mapping holds is not read.
        attention_mask: the mask that belongs to ids.
        tokenizer: encodes strings, as `tokenizer(text)["input_ids"]` does.

    Raises:
        PromptError: nothing that can be decoded; strings without a tokenizer or mixed with ids; strings or a mapping
            with a mask of its own together with `attention_mask`.
        ConfigError: `tokenizer` cannot encode.
    """
    if prompts is None:
        raise PromptError("generate needs prompts: ids, or strings together with tokenizer=")
    if isinstance(prompts, Mapping):
        return _of_mapping(prompts, attention_mask)
    texts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(texts, Tensor) or not isinstance(texts, Sequence):
        return prompts, attention_mask
    for i, one in enumerate(texts):
        if isinstance(one, Mapping):
            raise PromptError(
                f"prompt {i} is a {type(one).__name__}, not ids: pass its input_ids, or a chat's messages through "
                "tokenizer.apply_chat_template first"
            )
    strings = [isinstance(text, str) for text in texts]
    if not any(strings):
        return prompts, attention_mask
    if not all(strings):
        other = strings.index(False)
        raise PromptError(
            f"the prompts mix strings and others (prompt {other} is a {type(texts[other]).__name__}): pass strings "
            "only, or ids only"
        )
    if tokenizer is None:
        raise PromptError("the prompts are strings: pass tokenizer= as well, or token ids")
    if attention_mask is not None:
        raise PromptError("strings have no padding: leave attention_mask out")
    return [_ids_of(tokenizer, text) for text in texts], None


def check_decodes(tokenizer: Any) -> None:
    """Refuse a tokenizer that could not fill `texts` after everything has been decoded.

    Raises:
        ConfigError: it has no `decode`.
    """
    if tokenizer is not None and (isinstance(tokenizer, type) or not callable(getattr(tokenizer, "decode", None))):
        raise ConfigError(f"tokenizer must be an object with decode(ids), not {tokenizer!r}: {_TOKENIZERS}")


def _ids_of(tokenizer: Any, text: Any) -> Any:
    """Ids of one string.

    Raises:
        ConfigError: `tokenizer` cannot be called, or what it returns has no ids.
    """
    if isinstance(tokenizer, type) or not callable(tokenizer):
        raise ConfigError(f"tokenizer must be an object that is called with a text, not {tokenizer!r}: {_TOKENIZERS}")
    found = tokenizer(text)
    try:
        return found["input_ids"]
    except (TypeError, LookupError) as error:
        raise ConfigError(
            f'tokenizer must return a mapping with "input_ids", and it returned a {type(found).__name__}: {_TOKENIZERS}'
        ) from error


def _of_mapping(prompts: Mapping[str, Any], attention_mask: Mask | None) -> tuple[Any, Mask | None]:
    if "input_ids" not in prompts:
        raise PromptError(
            f"the prompts are a {type(prompts).__name__} without input_ids: pass what tokenizer(texts) returns, or ids"
        )
    own = prompts.get("attention_mask")
    if own is not None and attention_mask is not None:
        raise PromptError(
            "attention_mask is given twice: pass input_ids=enc['input_ids'] together with the attention_mask you want"
        )
    return prompts["input_ids"], attention_mask if own is None else own
