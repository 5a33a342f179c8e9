# SPDX-License-Identifier: Apache-2.0
"""Ranges and dependencies of configuration fields, as tables, and the checks that raise."""

from __future__ import annotations

from typing import Any, get_args

from .errors import ConfigError

# The value a rule takes when it is chosen by name only (sources: algorithms' released defaults).
RULE_DEFAULTS: dict[str, float] = {"threshold": 0.9, "factor": 1.0, "frechet_margin": 0.25}
RULE_PARAMETER: dict[str, str] = {"threshold": "threshold", "factor": "factor", "frechet": "frechet_margin"}

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
    "suffix_window": ("suffix", ("dpad", "window")),
    "k_sigma": ("suffix", ("dpad",)),
    "scale": ("suffix", ("dpad",)),
}
AT_LEAST: dict[str, int] = {
    "lacache_interval": 1,
    "refresh_interval": 1,
    "prefix_look": 0,
    "after_look": 0,
    "warmup_steps": 0,
    "cache_steps": 1,
    "window_length": 1,
    "lookahead": 0,
    "suffix_window": 1,
    "slots": 1,
}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def one_of(name: str, value: object, kind: Any) -> None:
    allowed = get_args(kind)
    require(value in allowed, f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")


def check_belonging(config: Any) -> None:
    """Refuse options that are set although the choice they belong to was not made.

    Raises:
        ConfigError: naming both options.
    """
    for option, (chooser, values) in BELONGS_TO.items():
        chosen, default = getattr(config, chooser), type(config).__dataclass_fields__[option].default
        if chosen not in values and getattr(config, option) != default:
            raise ConfigError(
                f"{option} belongs to {chooser}={' or '.join(map(repr, values))}, not to {chooser}={chosen!r}: "
                "remove one of the two"
            )


def check_integers(config: Any) -> None:
    """Refuse values that are neither None nor integers of at least what the table says.

    Raises:
        ConfigError: naming the option.
    """
    for option, least in AT_LEAST.items():
        value = getattr(config, option)
        fits = value is None or (isinstance(value, int) and value >= least)
        require(fits, f"{option} must be an integer of at least {least}, not {value!r}")
