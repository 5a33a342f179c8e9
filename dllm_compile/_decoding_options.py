# SPDX-License-Identifier: Apache-2.0
"""Command-line options made from `DecodingConfig`: one an option, with its type, choices and help text.

They are read off the dataclass and its docstring, so that the command line cannot drift from the configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .config import DecodingConfig
from .errors import ConfigError
from .presets import PRESETS


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and an option for every field of `DecodingConfig`; one that is not given changes nothing."""
    group = parser.add_argument_group("decoding", "the fields of DecodingConfig")
    group.add_argument(
        "--preset",
        metavar="NAME",
        choices=PRESETS,
        help=f"a work's settings for a task; options beside it win. One of: {', '.join(PRESETS)}",
    )
    hints = get_type_hints(DecodingConfig)
    texts = _field_texts()
    for field in dataclasses.fields(DecodingConfig):
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(texts[field.name], field.default),
            **_argument(hints[field.name]),
        )


def decoding_config(namespace: argparse.Namespace) -> DecodingConfig:
    """The configuration that the given options ask for, on top of the preset's where one is named.

    Raises:
        ConfigError: options contradict each other, or what the preset sets.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(DecodingConfig)}
    given = {name: getattr(namespace, name) for name in defaults if name in namespace}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = value[0] if len(value) == 1 and isinstance(value[0], str) else tuple(value)
    if namespace.preset is None:
        return DecodingConfig(**given)
    preset = PRESETS[namespace.preset]
    try:
        return preset.replace(**given)
    except ConfigError as error:
        left = {name: getattr(preset, name) for name in defaults if name not in given}
        sets = ", ".join(f"{name}={value!r}" for name, value in left.items() if value != defaults[name])
        raise ConfigError(f"{error} (--preset {namespace.preset} sets {sets})") from error


def _help(text: str, default: object) -> str:
    """Help text with the default at its end; argparse expands `%`, so it is doubled."""
    return (text if default is None else f"{text} [{default}]").replace("%", "%%")


def _argument(hint: Any) -> dict[str, Any]:
    """Keywords of `add_argument` for a field of type `hint`; None among the alternatives is the option left out."""
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    literal = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    several = any(get_origin(kind) is tuple for kind in kinds)
    if literal and several:  # one of the words, or several numbers
        return {"type": _word_or_int, "nargs": "+", "metavar": f"{{{','.join(literal)}}}|INT"}
    if literal:
        return {"choices": literal}
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    scalar = next((kind for kind in (float, int, str) if kind in kinds), None)
    if scalar is None:
        raise TypeError(f"no command-line form for a field of type {hint}")
    return {"type": scalar, "metavar": scalar.__name__.upper(), **({"nargs": "+"} if several else {})}


def _word_or_int(text: str) -> str | int:
    """A number where there is one; whether a word is known, the configuration says."""
    return int(text) if text.lstrip("-").isdigit() else text


def _alternatives(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _field_texts() -> dict[str, str]:
    """What the docstring's "Args" say about each field, in one line each."""
    doc = inspect.getdoc(DecodingConfig) or ""
    section = doc.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in entries}
