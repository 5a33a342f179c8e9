# SPDX-License-Identifier: Apache-2.0
"""A decoding configuration with parts taken out, so that one part at a time can be compared."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._config_checks import BELONGS_TO
from ..config import DecodingConfig


def _kept(config: DecodingConfig, *owners: str) -> dict[str, Any]:
    """Fields of `config` without the given ones and what belongs to them."""
    gone = {*owners, "slots", "check_every", *(name for name, (owner, _) in BELONGS_TO.items() if owner in owners)}
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in gone}


def ground(config: DecodingConfig) -> DecodingConfig:
    """The same commit rule and sampling, every row computed in every step; drafts are not verified.

    With Flash-Cache the window stays, which decides the order in which tokens are committed.
    """
    kept = _kept(config, "cache", "suffix", "commit")
    commit = "threshold" if config.rule == "flash_verify" else config.commit
    flash: dict[str, Any] = {}
    if not config.has_blocks:
        flash = {"cache": "flash", "window_length": config.window_length, "track": -1}
    return DecodingConfig(**kept, commit=commit, **flash)


def exact_caches(config: DecodingConfig) -> dict[str, DecodingConfig]:
    """Forms of the configured cache that give the tokens of `ground`, by what they are."""
    plain, cache = ground(config), config.cache
    if cache == "lacache":
        found = {"cache lacache, layer 0": plain.replace(cache="lacache")}
        if config.lacache_layers != "first":
            every = plain.replace(cache="lacache", lacache_layers=config.lacache_layers, lacache_interval=1)
            found["cache lacache, every row"] = every
        return found
    if cache in ("none", "flash"):  # the ground of flash is flash itself, over all rows
        return {}
    if cache == "dkv":
        return {"cache dkv, every row": plain.replace(cache="dkv", cache_steps=1)}
    looks = {name: getattr(config, name) for name in ("prefix_look", "after_look", "warmup_steps")}
    extra = looks if cache == "vicinity" else {}
    return {f"cache {cache}, every row": plain.replace(cache=cache, refresh_interval=1, **extra)}


def policies(config: DecodingConfig) -> dict[str, tuple[DecodingConfig, str]]:
    """What changes tokens by design, one at a time over `ground`: by name, the configuration and the switch."""
    plain = ground(config)
    found: dict[str, tuple[DecodingConfig, str]] = {}
    if config.suffix != "all":
        names = [name for name, (owner, kinds) in BELONGS_TO.items() if owner == "suffix" and config.suffix in kinds]
        options = {name: getattr(config, name) for name in names}
        found[f"suffix {config.suffix}"] = (plain.replace(suffix=config.suffix, **options), 'suffix="all"')
    exact = config.cache == "none" or (config.cache == "lacache" and config.lacache_layers == "first")
    if not exact:
        commit = "threshold" if config.rule == "flash_verify" else config.commit
        cached = DecodingConfig(**_kept(config, "suffix", "commit"), commit=commit)
        found[f"cache {config.cache}, as configured"] = (cached, 'cache="none"')
    if config.rule == "flash_verify":
        found["commit flash_verify"] = (config.replace(slots=None, check_every=None), 'commit="threshold"')
    return found


def one_by_one(config: DecodingConfig) -> DecodingConfig:
    """`ground` with the quota rule, one token a step."""
    rules = ("commit", "steps", "threshold", "factor", "frechet_margin")
    return DecodingConfig(**{**_kept(ground(config)), **dict.fromkeys(rules)})
