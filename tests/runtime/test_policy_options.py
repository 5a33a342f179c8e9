# SPDX-License-Identifier: Apache-2.0
"""What a configuration refuses: options without their policy, pairs that mean nothing, values out of range."""

from __future__ import annotations

import pytest

from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError

FOREIGN = {
    "refresh_interval": (4, ("prefix", "dual", "vicinity")),
    "prefix_look": (4, ("vicinity",)),
    "after_look": (4, ("vicinity",)),
    "warmup_steps": (4, ("vicinity",)),
    "cache_steps": (4, ("dkv",)),
    "window_length": (8, ("flash",)),
    "lookahead": (8, ("flash",)),
    "track": (8, ("flash",)),
    "score_layers": ("all", ("flash",)),
    "key_end": ("released", ("flash",)),
    "lacache_layers": ("wide", ("lacache",)),
    "lacache_interval": (4, ("lacache",)),
}
CACHES = ("none", "lacache", "prefix", "dual", "vicinity", "dkv", "flash")


@pytest.mark.parametrize("option", FOREIGN)
@pytest.mark.parametrize("cache", CACHES)
def test_options_belong_to_a_cache(option, cache):
    """Named together with the cache they belong to and the one that was chosen."""
    value, owners = FOREIGN[option]
    if cache in owners:
        assert getattr(DecodingConfig(cache=cache, **{option: value}), option) == value
    else:
        with pytest.raises(ConfigError, match=rf"{option} belongs to cache='{owners[0]}'.*not to cache='{cache}'"):
            DecodingConfig(cache=cache, **{option: value})


@pytest.mark.parametrize("option", ["suffix_window", "k_sigma", "scale"])
@pytest.mark.parametrize("suffix", ["all", "dpad", "window"])
def test_options_belong_to_a_suffix(option, suffix):
    if suffix == "dpad" or (suffix == "window" and option == "suffix_window"):
        assert getattr(DecodingConfig(suffix=suffix, **{option: 3}), option) == 3
    else:
        with pytest.raises(ConfigError, match=rf"{option} belongs to suffix='dpad'.*not to suffix='{suffix}'"):
            DecodingConfig(suffix=suffix, **{option: 3})


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "kv"},
        {"suffix": "gaussian"},
        {"cache": "flash", "score_layers": "some"},
        {"cache": "flash", "key_end": 128},
        {"cache": "dual", "refresh_interval": 0},
        {"cache": "dual", "refresh_interval": 2.5},
        {"cache": "vicinity", "prefix_look": -1},
        {"cache": "dkv", "cache_steps": 0},
        {"cache": "flash", "window_length": 0},
        {"cache": "flash", "lookahead": -1},
        {"suffix": "window", "suffix_window": 0},
        {"suffix": "dpad", "scale": 0.0},
        {"suffix": "dpad", "k_sigma": -1.0},
        {"slots": 0},
        {"eos": "last"},
    ],
    ids=str,
)
def test_values_out_of_range(options):
    name = list(options)[-1]
    with pytest.raises(ConfigError, match=name):
        DecodingConfig(**options)


@pytest.mark.parametrize("suffix", ["dpad", "window"])
def test_flash_has_no_blocks(suffix):
    """Both options are named."""
    with pytest.raises(ConfigError, match=rf"suffix='{suffix}'.*cache='flash'"):
        DecodingConfig(cache="flash", suffix=suffix)
    with pytest.raises(ConfigError, match="cache='flash'.*eos='block'"):
        DecodingConfig(cache="flash", eos="block")


def test_end_rule_in_force():
    assert DecodingConfig().eos_rule == "block"
    assert DecodingConfig(cache="dual").eos_rule == "block"
    assert DecodingConfig(cache="flash").eos_rule == "first"
    assert DecodingConfig(cache="flash", eos="none").eos_rule == "none"


def test_steps_without_blocks():
    """A quota counts the whole answer as one block."""
    assert DecodingConfig(cache="flash", max_new_tokens=64, steps=7).steps_per_block == 7
    with pytest.raises(ConfigError, match="multiple of the 2 blocks"):
        DecodingConfig(cache="dual", max_new_tokens=64, steps=7)
