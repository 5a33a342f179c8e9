# SPDX-License-Identifier: Apache-2.0
"""What `generate` takes as prompts, in the forms that users have them: strings, a tokenizer's output, ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import PromptError

Mask = Tensor | Sequence[int] | Sequence[Sequence[int]]
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
    return [tokenizer(text)["input_ids"] for text in texts], None


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
