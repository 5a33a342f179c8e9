# SPDX-License-Identifier: Apache-2.0
"""What the runtime must know of a model's vocabulary and length, read from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._config_checks import integer_or_integers
from ..errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class ModelFacts:
    """Ids and limits of a model.

    Attributes:
        vocab_size: ids are in [0, vocab_size); rows of the embedding table where it is larger than the vocabulary.
        max_sequence_length: most positions of a canvas; None where the model states none.
        mask_token_id: id of a masked position; None where the model states none (decoding is then refused).
        eos_token_id: the model's end-of-sequence ids, possibly none.
        pad_token_id: id that fills the output in front of shorter prompts; None where the model states none.
    """

    vocab_size: int
    max_sequence_length: int | None
    mask_token_id: int | None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Bring `eos_token_id` into the form of a tuple."""
        object.__setattr__(self, "eos_token_id", id_tuple(self.eos_token_id))

    @classmethod
    def from_config(cls, config: Any, **overrides: Any) -> ModelFacts:
        """Read the facts from a model's configuration.

        Args:
            config: an object with attributes, or a mapping. Read are `vocab_size`, `embedding_size`,
                `max_sequence_length` (or `max_position_embeddings`), `mask_token_id`, `eos_token_id` (int or list)
                and `pad_token_id`.
            **overrides: fields of `ModelFacts` that replace what the configuration says.

        Raises:
            UnsupportedModelError: no size of the vocabulary is stated.
        """
        sizes = [size for size in (_read(config, "vocab_size"), _read(config, "embedding_size")) if size]
        if not sizes and "vocab_size" not in overrides:
            raise UnsupportedModelError(
                "The model's configuration states neither vocab_size nor embedding_size: add one of them to config.json"
            )
        length = _read(config, "max_sequence_length") or _read(config, "max_position_embeddings")
        found: dict[str, Any] = {
            "vocab_size": max(sizes, default=0),
            "max_sequence_length": length,
            "mask_token_id": _read(config, "mask_token_id"),
            "eos_token_id": id_tuple(_read(config, "eos_token_id")),
            "pad_token_id": _read(config, "pad_token_id"),
        }
        return cls(**{**found, **overrides})


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def id_tuple(ids: int | Iterable[int] | None) -> tuple[int, ...]:
    """Ids given as nothing, one or several, as a tuple without repetitions, in the given order.

    Raises:
        ConfigError: they are no integers.
    """
    if ids is None:
        return ()
    found = integer_or_integers("eos_token_id", ids)
    return (found,) if isinstance(found, int) else tuple(dict.fromkeys(found))


def stop_ids(facts: ModelFacts, chosen: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The ids that end an answer: those chosen in the decoding configuration, else the model's.

    Raises:
        ConfigError: a chosen id is no token or is the mask token.
    """
    ids = facts.eos_token_id if chosen is None else id_tuple(chosen)
    for one in ids:
        if not 0 <= one < facts.vocab_size:
            raise ConfigError(f"Stop id {one} is not in the vocabulary of {facts.vocab_size}: set eos_token_id")
        if one == facts.mask_token_id:
            raise ConfigError(f"Stop id {one} is the mask token, which is never decoded: set eos_token_id")
    return ids
