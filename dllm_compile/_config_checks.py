# SPDX-License-Identifier: Apache-2.0
"""Ranges and dependencies of configuration fields, as tables, and the checks that raise."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from .errors import ConfigError

# The value a rule takes when it is chosen by name only (sources: algorithms' released defaults).
RULE_DEFAULTS: dict[str, float] = {"threshold": 0.9, "factor": 1.0, "frechet_margin": 0.25}
RULE_PARAMETER: dict[str, str] = {
    "threshold": "threshold",
    "factor": "factor",
    "frechet": "frechet_margin",
    "flash_verify": "threshold",
}
# By verify rule. The product rule's is that of the released scripts for GSM8K; none is published for the other one,
# which compares every probability by itself and so needs a larger one for the same risk.
GAMMA_DEFAULTS: dict[str, float] = {"product": 0.8, "per_token": 0.9}
# Flash-dLLM's released code ends a sample's keys at the next larger multiple of this.
RELEASED_KEY_BLOCK = 128

# Options that only mean something for some values of another one.
BELONGS_TO: dict[str, tuple[str, tuple[str, ...]]] = {
    "lacache_layers": ("cache", ("lacache",)),
    "lacache_interval": ("cache", ("lacache",)),
    "refresh_interval": ("cache", ("prefix", "dual", "vicinity")),
    "prefix_look": ("cache", ("vicinity",)),
    "after_look": ("cache", ("vicinity",)),
    "warmup_steps": ("cache", ("vicinity",)),
    "cache_steps": ("cache", ("dkv",)),
    "window_length": ("cache", ("flash",)),
    "lookahead": ("cache", ("flash",)),
    "track": ("cache", ("flash",)),
    "score_layers": ("cache", ("flash",)),
    "key_end": ("cache", ("flash",)),
    "pin": ("commit", ("flash_verify",)),
    "gamma": ("commit", ("flash_verify",)),
    "verify_rule": ("commit", ("flash_verify",)),
    "verify_candidates": ("commit", ("flash_verify",)),
    "verify_context": ("commit", ("flash_verify",)),
    "verify_rows": ("commit", ("flash_verify",)),
    "suffix_window": ("suffix", ("dpad", "window")),
    "k_sigma": ("suffix", ("dpad",)),
    "scale": ("suffix", ("dpad",)),
}
FP8_BELONGS_TO: dict[str, tuple[str, tuple[str, ...]]] = dict.fromkeys(
    ("fp8_granularity", "fp8_skip_layers", "fp8_linears"), ("precision", ("fp8", "auto"))
)
# Most that an integer may be: sums of a few stay far inside of int64.
MOST = 2**31 - 1
# Integers up to MOST, and the least value of each; None where every integer will do.
INTEGERS: dict[str, int | None] = {
    "max_new_tokens": 1,
    "block_length": 1,
    "check_every": 1,
    "steps": 1,
    "lacache_interval": 1,
    "refresh_interval": 1,
    "prefix_look": 0,
    "after_look": 0,
    "warmup_steps": 0,
    "cache_steps": 1,
    "window_length": 1,
    "lookahead": 0,
    "track": None,
    "verify_candidates": 1,
    "verify_context": 0,
    "verify_rows": 2,
    "suffix_window": 1,
    "slots": 1,
    "seed": None,
}
# Finite real numbers: the least value, and whether that value itself is allowed.
NUMBERS: dict[str, tuple[float, bool]] = {
    "threshold": (0, True),
    "factor": (0, False),
    "frechet_margin": (0, True),
    "gamma": (0, True),
    "temperature": (0, True),
    "cfg_scale": (0, True),
    "k_sigma": (0, True),
    "scale": (0, False),
}
SWITCHES = ("logits_eos_inf", "confidence_eos_eot_inf", "infill")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def one_of(name: str, value: object, kind: Any) -> None:
    allowed = get_args(kind)
    require(
        isinstance(value, str) and value in allowed, f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}"
    )


Config = TypeVar("Config")


def chosen(config: Config | None, kind: type[Config], example: str) -> Config:
    """`config`, or the default of its kind where it is None.

    Args:
        config: what a user passed as `config=`.
        kind: the class that is expected.
        example: how options are given without a configuration.

    Raises:
        ConfigError: it is something else.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(
            f"config must be a {kind.__name__}, not a {type(config).__name__}: build one, or pass its options by name, "
            f"as in {example}"
        )
    return config


def check_belonging(config: Any, table: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
    """Refuse options that are set although the choice they belong to was not made.

    Args:
        config: what is built.
        table: option -> the option it belongs to, and the values of that one with which it means something.

    Raises:
        ConfigError: naming both options.
    """
    for option, (chooser, values) in table.items():
        chosen, default = getattr(config, chooser), type(config).__dataclass_fields__[option].default
        if chosen not in values and getattr(config, option) != default:
            raise ConfigError(
                f"{option} belongs to {chooser}={' or '.join(map(repr, values))}, not to {chooser}={chosen!r}: "
                "remove one of the two"
            )


def normalise(config: Any) -> None:
    """Bring every number, switch and list of ids of a `DecodingConfig` into Python's own types, or refuse it.

    None is accepted where it is the default.

    Raises:
        ConfigError: naming the option, what it takes and what was given.
    """
    fields = type(config).__dataclass_fields__
    found: dict[str, Any] = {}
    for option, least in INTEGERS.items():
        value = getattr(config, option)
        if value is not None or fields[option].default is not None:
            found[option] = integer(option, value, least, None if option == "seed" else MOST)
    for option, (low, included) in NUMBERS.items():
        value = getattr(config, option)
        if value is not None or fields[option].default is not None:
            found[option] = number(option, value, low, included)
    for option in SWITCHES:
        check_switch(option, getattr(config, option))
    if config.eos_token_id is not None:
        found["eos_token_id"] = integer_or_integers("eos_token_id", config.eos_token_id)
    found["lacache_layers"] = _layers(config.lacache_layers)
    for option, value in found.items():
        object.__setattr__(config, option, value)


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int: an int or what counts as one (numpy's integers), but no bool.

    Raises:
        ConfigError: it is none, or is smaller than `least` or larger than `most`.
    """
    found = _index(value)
    if found is not None and most is not None and found > most:
        raise ConfigError(f"{name} must be at most {most}, not {value!r}: where that means everything, say {most}")
    if least is None and most is not None:
        least = -most
    if found is None or (least is not None and found < least):
        kind = "an integer" if least is None else f"an integer of at least {least}"
        raise ConfigError(f"{name} must be {kind}, not {value!r}")
    return found


def number(name: str, value: object, low: float, included: bool) -> float:
    """`value` as a finite float of at least `low`, or above it where that is not `included`.

    Raises:
        ConfigError: it is no such number (a bool, a string, NaN and infinity are none).
    """
    found = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            found = float(value)
    if not math.isfinite(found) or found < low or (found == low and not included):
        raise ConfigError(f"{name} must be a finite number {'>=' if included else '>'} {low}, not {value!r}")
    return found


def integer_or_integers(name: str, value: object) -> int | tuple[int, ...]:
    """`value` as an int or, given several, as a tuple of ints.

    Raises:
        ConfigError: it is neither an integer nor a collection of integers.
    """
    one = _index(value)
    if one is not None:
        return one
    several = None if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) else _items(value)
    found = None if several is None else [_index(item) for item in several]
    if found is None or None in found:
        raise ConfigError(f"{name} must be an integer or a list of integers, not {value!r}")
    return tuple(item for item in found if item is not None)


def layer_numbers(name: str, value: object) -> tuple[int, ...]:
    """Numbers of layers from 0 on as a tuple, ascending and each once; one number may stand alone, () is none.

    Raises:
        ConfigError: they are something else.
    """
    try:
        found = integer_or_integers(name, value)
    except ConfigError:
        raise ConfigError(f"{name} must be layer numbers, () for none, not {value!r}") from None
    layers = (found,) if isinstance(found, int) else found
    require(min(layers, default=0) >= 0, f"{name}={value!r} must name layers from 0 on")
    return tuple(sorted(set(layers)))


def check_switch(name: str, value: object) -> None:
    """Refuse what is neither True nor False: "no" and 0.5 would count as True.

    Raises:
        ConfigError: naming the option.
    """
    require(isinstance(value, bool), f"{name} must be True or False, not {value!r}")


def pass_names(value: object) -> tuple[str, ...]:
    """Names of passes as a tuple; one name may stand alone.

    Raises:
        ConfigError: they are no strings.
    """
    if isinstance(value, str):
        return (value,)
    names = _items(value) if isinstance(value, Iterable) and not isinstance(value, Mapping) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"disable must be a list of names of passes, () for none, not {value!r}")
    return tuple(str(name) for name in names)


def _index(value: object) -> int | None:
    """`value` as an int where it is an integer, else None; bools of Python, numpy and torch are none."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _items(value: Iterable[object]) -> list[object] | None:
    try:
        return list(value)
    except TypeError:  # an array or a tensor without dimensions
        return None


def _layers(value: object) -> str | tuple[int, ...]:
    """The layers of LaCache: one of the words, or their numbers."""
    if isinstance(value, str):
        require(value in ("first", "wide"), f"lacache_layers={value!r}: choose 'first', 'wide' or layer numbers")
        return value
    try:
        found = integer_or_integers("lacache_layers", value)
    except ConfigError:
        raise ConfigError(f"lacache_layers must be 'first', 'wide' or layer numbers, not {value!r}") from None
    layers = (found,) if isinstance(found, int) else found
    require(len(layers) > 0 and min(layers) >= 0, f"lacache_layers={value!r} must name layers from 0 on")
    return layers
