# SPDX-License-Identifier: Apache-2.0
"""The small model's tokenizer: byte-level BPE with every digit a token of its own.

`tokenizer(prompt)` gives a prompt the model can continue at once: a start token, the text, and the token after which
the answer's canvas begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

EOS, MASK, BOS, ANSWER = "<|eos|>", "<|mask|>", "<|bos|>", "<|answer|>"
SPECIAL_TOKENS = (EOS, MASK, BOS, ANSWER)
EOS_ID, MASK_ID, BOS_ID, ANSWER_ID = range(4)

# A leading space belongs to what follows it, so that " 3", "4", "7" are three tokens and not four.
_PIECES = Regex(r" ?\d| ?[A-Za-z]+|\n *| ?[^\sA-Za-z\d]+|\s+")

_CHAT_TEMPLATE = f"{BOS}{{{{ messages[-1]['content'] }}}}{ANSWER}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts`; the result has at most `vocab_size` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {ANSWER}", special_tokens=[(BOS, BOS_ID), (ANSWER, ANSWER_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, as `PreTrainedTokenizerFast.from_pretrained` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "bos_token": BOS,
        "model_max_length": max_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
