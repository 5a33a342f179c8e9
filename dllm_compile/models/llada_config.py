# SPDX-License-Identifier: Apache-2.0
"""The fields of a LLaDA `config.json`, checked.

The names are those of the released files, so that a folder written by others loads as it is. Fields this package has no
use for are kept in `extra` and written back by `to_dict`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dllm_compile.errors import CheckpointError, UnsupportedModelError

# A file without one of these says too little: the released configuration class and the released 8B file disagree on
# what they would be, so any default would be a guess.
REQUIRED_FIELDS = (
    "d_model",
    "n_heads",
    "n_layers",
    "vocab_size",
    "max_sequence_length",
    "mask_token_id",
    "rope_theta",
    "activation_type",
    "block_type",
    "layer_norm_type",
    "weight_tying",
    "include_bias",
)

# Field -> the values that are computed; anything else is refused by name.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms", "gemma_rms"),
    "rope": (True,),
    "alibi": (False, None),
    "clip_qkv": (None,),
}


@dataclass
class LLaDAConfig:
    """Shape and flags of a LLaDA model; sizes in elements, ids in the vocabulary's numbering.

    The defaults are the flags shared by the released checkpoints, for building models by hand. A file must name the
    fields of `REQUIRED_FIELDS` itself.

    Attributes:
        d_model: width C of the residual stream.
        n_kv_heads: key/value heads; None means 1 with `multi_query_attention`, else `n_heads`.
        mlp_hidden_size: FFN width; None means `mlp_ratio * d_model`.
        embedding_size: rows of the embedding and of the head, if more than `vocab_size`.
        bias_for_layer_norm: None follows `include_bias`.
        extra: what a file held beside these fields.
    """

    d_model: int
    n_heads: int
    n_layers: int
    vocab_size: int
    max_sequence_length: int
    mask_token_id: int | None = None
    n_kv_heads: int | None = None
    multi_query_attention: bool | None = None
    mlp_hidden_size: int | None = None
    mlp_ratio: int = 4
    embedding_size: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    activation_type: str = "silu"
    block_type: str = "llama"
    block_group_size: int = 1
    layer_norm_type: str = "rms"
    layer_norm_with_affine: bool = True
    rms_norm_eps: float = 1e-5
    bias_for_layer_norm: bool | None = None
    attention_layer_norm: bool = False
    attention_layer_norm_with_affine: bool = True
    rope: bool = True
    rope_full_precision: bool = True
    rope_theta: float = 500000.0
    alibi: bool | None = False
    clip_qkv: float | None = None
    flash_attention: bool = False
    include_bias: bool = False
    include_qkv_bias: bool | None = False
    weight_tying: bool = False
    scale_logits: bool = False
    input_emb_norm: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    init_std: float = 0.02
    model_type: str = "llada"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is not computed and what contradicts itself (`UnsupportedModelError` names the field)."""
        for name, allowed in _SUPPORTED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UnsupportedModelError(
                    f"config field {name}={value!r} is not supported (supported: "
                    f"{', '.join(repr(item) for item in allowed)}); use a checkpoint of the released LLaDA layout"
                )
        if self.n_heads < 1 or self.d_model % self.n_heads or self.head_dim % 2:
            raise UnsupportedModelError(
                f"config field n_heads={self.n_heads} must divide d_model={self.d_model} into heads of even size"
            )
        if self.multi_query_attention and self.n_kv_heads not in (None, 1):
            raise UnsupportedModelError(f"config field n_kv_heads={self.n_kv_heads} contradicts multi_query_attention")
        if self.multi_query_attention is False and self.n_kv_heads == 1 and self.n_heads > 1:
            raise UnsupportedModelError("config field n_kv_heads=1 contradicts multi_query_attention=False")
        if self.kv_heads < 1 or self.n_heads % self.kv_heads:
            raise UnsupportedModelError(f"config field n_kv_heads={self.kv_heads} must divide n_heads={self.n_heads}")
        if self.block_group_size < 1 or self.n_layers % self.block_group_size:
            raise UnsupportedModelError(
                f"config field block_group_size={self.block_group_size} must divide n_layers={self.n_layers}"
            )
        if self.embedding_size is not None and self.embedding_size < self.vocab_size:
            raise UnsupportedModelError(
                f"config field embedding_size={self.embedding_size} is less than vocab_size={self.vocab_size}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        if self.n_kv_heads is not None:
            return self.n_kv_heads
        return 1 if self.multi_query_attention else self.n_heads

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, under the name transformers uses."""
        return self.d_model

    @property
    def ffn_size(self) -> int:
        """Width of the FFN."""
        return self.mlp_hidden_size if self.mlp_hidden_size is not None else self.mlp_ratio * self.d_model

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding and of the head."""
        return self.embedding_size or self.vocab_size

    @property
    def norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.include_bias if self.bias_for_layer_norm is None else self.bias_for_layer_norm

    @property
    def qkv_bias(self) -> bool:
        """Whether the q, k and v projections have a bias."""
        return bool(self.include_bias or self.include_qkv_bias)

    @property
    def dropout(self) -> float:
        """The largest of the dropout probabilities."""
        return max(self.attention_dropout, self.residual_dropout, self.embedding_dropout)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "config") -> LLaDAConfig:
        """Build a configuration from the contents of a `config.json`.

        Args:
            values: field name to value; unknown names go to `extra`.
            source: what to call the file in messages.

        Raises:
            CheckpointError: a field of `REQUIRED_FIELDS` is missing.
            UnsupportedModelError: the model is outside what is computed here.
        """
        missing = [name for name in REQUIRED_FIELDS if name not in values]
        if missing:
            raise CheckpointError(f"{source} lacks {', '.join(missing)}: it does not describe a LLaDA model")
        known = {item.name for item in dataclasses.fields(cls)} - {"extra"}
        chosen = {name: value for name, value in values.items() if name in known}
        extra = {name: value for name, value in values.items() if name not in known}
        return cls(**chosen, extra=extra)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> LLaDAConfig:
        """Read `config.json` of a folder (or that file itself); raises `CheckpointError` when it cannot be read."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise CheckpointError(
                f"no config.json at {str(path)!r}: give the folder of a downloaded checkpoint (nothing is fetched)"
            )
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from error
        return cls.from_dict(values, source=str(file))

    def to_dict(self) -> dict[str, Any]:
        """Every field, `extra` merged in, as `config.json` holds them."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "extra"}
        return {**self.extra, **values}
