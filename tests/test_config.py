# SPDX-License-Identifier: Apache-2.0
"""Configurations: values of a wrong type are refused by name when they are given, not where they are first used."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig
from dllm_compile._config_checks import INTEGERS, MOST, NUMBERS, SWITCHES
from dllm_compile.errors import ConfigError
from dllm_compile.runtime.facts import ModelFacts, id_tuple
from tests.conftest import tiny_model

# What an option needs beside it.
BESIDE = {
    "lacache_layers": {"cache": "lacache"},
    "lacache_interval": {"cache": "lacache"},
    "refresh_interval": {"cache": "dual"},
    "prefix_look": {"cache": "vicinity"},
    "after_look": {"cache": "vicinity"},
    "warmup_steps": {"cache": "vicinity"},
    "cache_steps": {"cache": "dkv"},
    "window_length": {"cache": "flash"},
    "lookahead": {"cache": "flash"},
    "track": {"cache": "flash"},
    "gamma": {"cache": "flash", "commit": "flash_verify"},
    "verify_candidates": {"cache": "flash", "commit": "flash_verify"},
    "verify_context": {"cache": "flash", "commit": "flash_verify"},
    "verify_rows": {"cache": "flash", "commit": "flash_verify", "window_length": 4},
    "suffix_window": {"suffix": "dpad"},
    "k_sigma": {"suffix": "dpad"},
    "scale": {"suffix": "dpad"},
}


def config_with(name: str, value: object) -> DecodingConfig:
    return DecodingConfig(**{**BESIDE.get(name, {}), name: value})


def test_every_field_is_checked():
    """A field that is added must be put into a table or be a choice of words."""
    words = {
        "commit",
        "verify_rule",
        "last_rank",
        "remasking",
        "eos",
        "cache",
        "score_layers",
        "key_end",
        "pin",
        "suffix",
    }
    by_hand = {"eos_token_id", "lacache_layers"}
    fields = {field.name for field in dataclasses.fields(DecodingConfig)}
    assert fields == words | by_hand | set(INTEGERS) | set(NUMBERS) | set(SWITCHES)
    for name in words:
        for bad in (1, ["none"], np.array(["none", "all"])):
            with pytest.raises(ConfigError, match=f"{name}="):
                DecodingConfig(**{name: bad})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("bad", [True, 8.0, "8", [8], np.bool_(True), torch.tensor(True), math.nan, 1j], ids=repr)
def test_integers_are_integers(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be an integer"):
        config_with(name, bad)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_numpy_are_integers(name):
    config = config_with(name, np.int64(8))
    assert config == config_with(name, 8)
    assert type(getattr(config, name)) is int


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bad", [True, "0.5", [0.5], math.nan, math.inf, -math.inf, -0.5, 10**400, 1j], ids=str)
def test_numbers_are_finite_and_not_negative(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be a finite number >=? 0"):
        config_with(name, bad)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [1, np.float32(0.5), np.float64(0.5), np.int32(1), Fraction(1, 2)], ids=repr)
def test_numbers_become_floats(name, value):
    found = getattr(config_with(name, value), name)
    assert type(found) is float
    assert found == value


def test_a_threshold_above_one_is_one_token_a_step():
    assert DecodingConfig(threshold=1.5).rule_parameter == 1.5
    fast = dllm_compile.optimize(tiny_model(), compile=False)
    one = fast.generate([[3, 4, 5]], max_new_tokens=6, block_length=6, eos="none")
    above = fast.generate([[3, 4, 5]], max_new_tokens=6, block_length=6, eos="none", threshold=1.5)
    assert torch.equal(one.sequences, above.sequences)
    assert above.stats.forwards == one.stats.forwards == 6


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS, *SWITCHES])
def test_none_only_where_it_is_the_default(name):
    if DecodingConfig.__dataclass_fields__[name].default is None:
        assert getattr(config_with(name, None), name) is None
        return
    with pytest.raises(ConfigError, match=f"{name} must be"):
        config_with(name, None)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("bad", ["no", 1, 0.0])
def test_switches_are_switches(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be True or False"):
        DecodingConfig(**{name: bad})


@pytest.mark.parametrize(
    ("given", "found"),
    [(3, 3), (np.int64(3), 3), ([3, 4], (3, 4)), (np.array([3, 4]), (3, 4)), (torch.tensor([3, 4]), (3, 4)), ((), ())],
    ids=str,
)
def test_stop_ids(given, found):
    config = DecodingConfig(eos_token_id=given)
    assert config.eos_token_id == found
    assert config == DecodingConfig(eos_token_id=found)


@pytest.mark.parametrize("bad", ["3", b"3", 3.0, True, [3, "4"], [3.5], [True], {3: 4}, [[3]], np.array(3.0)], ids=str)
def test_what_is_no_stop_id(bad):
    with pytest.raises(ConfigError, match="eos_token_id must be an integer or a list of integers"):
        DecodingConfig(eos_token_id=bad)
    with pytest.raises(ConfigError, match="eos_token_id must be an integer or a list of integers"):
        id_tuple(bad)
    with pytest.raises(ConfigError, match="eos_token_id"):
        ModelFacts.from_config({"vocab_size": 9, "eos_token_id": bad})


@pytest.mark.parametrize(
    ("given", "found"),
    [("first", "first"), ("wide", "wide"), (2, (2,)), (0, (0,)), ([0, np.int32(3)], (0, 3)), (range(2), (0, 1))],
    ids=str,
)
def test_layers(given, found):
    assert config_with("lacache_layers", given).lacache_layers == found


@pytest.mark.parametrize("bad", ["all", None, True, 1.0, ["wide", 3], [], [-1], -1, [0.5]], ids=str)
def test_what_is_no_layer(bad):
    with pytest.raises(ConfigError, match="lacache_layers"):
        config_with("lacache_layers", bad)


def test_replace_checks_again():
    with pytest.raises(ConfigError, match="max_new_tokens must be an integer"):
        DecodingConfig().replace(max_new_tokens=None)


def test_disable():
    assert CompileConfig(disable="pack_qkv").disable == ("pack_qkv",)
    assert CompileConfig(disable=["pack_qkv"]).disable == ("pack_qkv",)
    for bad in (None, 3, ["pack_qkv", 3], b"pack_qkv", {"pack_qkv": True}, torch.tensor(3), torch.tensor([3])):
        with pytest.raises(ConfigError, match="disable must be a list of names"):
            CompileConfig(disable=bad)


@pytest.mark.parametrize("bad", ["yes", 1, 0, "False"])
def test_compile_and_strict(bad):
    with pytest.raises(ConfigError, match="compile must be True, False or None"):
        CompileConfig(compile=bad)
    with pytest.raises(ConfigError, match="strict must be True or False"):
        CompileConfig(strict=bad)


VERIFY = {"cache": "flash", "commit": "flash_verify"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "dual"}, ("flash_verify", "cache='flash'", "cache='dual'")),
        ({"cache": "none"}, ("flash_verify", "cache='flash'", "cache='none'")),
        ({"temperature": 0.5}, ("flash_verify", "temperature=0.5")),
        ({"cfg_scale": 1.5}, ("flash_verify", "cfg_scale=1.5")),
        ({"remasking": "random"}, ("flash_verify", "remasking='random'")),
        ({"steps": 4}, ("flash_verify", "steps")),
        ({"factor": 1.0}, ("flash_verify", "factor")),
        ({"verify_rows": 23}, ("verify_rows=23", "24")),
        ({"verify_rows": 24, "verify_candidates": 9}, ("verify_rows=24", "25")),
        ({"commit": "threshold", "gamma": 0.8}, ("gamma", "flash_verify", "'threshold'")),
        ({"commit": None, "threshold": 0.9, "verify_rule": "per_token"}, ("verify_rule", "flash_verify")),
        ({"commit": "threshold", "pin": "released"}, ("pin", "flash_verify", "'threshold'")),
        ({"pin": "none"}, ("pin='none'", "'all'", "'released'")),
    ],
    ids=str,
)
def test_flash_verify_goes_with_flash_cache_and_greedy_tokens(options, words):
    with pytest.raises(ConfigError) as error:
        DecodingConfig(**{**VERIFY, **options})
    assert all(word in str(error.value) for word in words)


def test_sizes_of_a_verify_pass():
    """The published ones by default; more candidates than fit make the pass larger."""
    config = DecodingConfig(**VERIFY)
    assert (config.verify_size, config.most_candidates, config.verify_gamma, config.rule_parameter) == (32, 8, 0.8, 0.9)
    assert config.replace(verify_rule="per_token").verify_gamma == 0.9
    assert config.replace(window_length=8).verify_size == 16
    assert config.replace(verify_candidates=16).verify_size == 32
    assert config.replace(verify_candidates=20).verify_size == 36
    assert config.replace(window_length=1).most_candidates == 1
    assert config.replace(gamma=1.1, threshold=0.8).rule_parameter == 0.8


@pytest.mark.parametrize("option", [name for name in INTEGERS if name != "seed"])
def test_numbers_that_sums_would_overflow_are_refused(option):
    """Where everything is meant, the largest number that is allowed says so."""
    for value in (2**63 - 1, 10**30, MOST + 1):
        with pytest.raises(ConfigError, match=f"{option} must be at most {MOST}"):
            DecodingConfig(**{**BESIDE.get(option, {}), option: value})


def test_numbers_that_are_too_small_say_so():
    for option, value in (("max_new_tokens", -(10**30)), ("lookahead", -1), ("track", -MOST - 5)):
        with pytest.raises(ConfigError, match=f"{option} must be an integer of at least"):
            DecodingConfig(**{**BESIDE.get(option, {}), option: value})


def test_the_largest_looks_are_everything():
    fast = dllm_compile.optimize(tiny_model(), compile=False)
    whole = {"cache": "vicinity", "prefix_look": 99, "after_look": 99}, {"cache": "flash", "lookahead": 99, "track": 99}
    for options in whole:
        largest = {name: MOST if value == 99 else value for name, value in options.items()}
        few, most = (fast.generate([1, 2, 3], max_new_tokens=8, **one).sequences for one in (options, largest))
        assert torch.equal(few, most)
