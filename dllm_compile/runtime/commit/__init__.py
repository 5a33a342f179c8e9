# SPDX-License-Identifier: Apache-2.0
"""Commit rules, one a file, and the choice of one by configuration."""

from __future__ import annotations

from ...config import DecodingConfig
from .base import CommitRule
from .factor import FactorRule
from .flash_verify import FlashVerifyRule
from .frechet import FrechetRule
from .quota import QuotaRule
from .threshold import ThresholdRule

__all__ = ["CommitRule", "FactorRule", "FlashVerifyRule", "FrechetRule", "QuotaRule", "ThresholdRule", "commit_rule"]


def commit_rule(config: DecodingConfig) -> CommitRule:
    """The rule in force under `config`."""
    if config.rule == "threshold":
        return ThresholdRule(config.rule_parameter)
    if config.rule == "flash_verify":
        return FlashVerifyRule.of(config)
    if config.rule == "factor":
        return FactorRule(config.rule_parameter, released=config.last_rank == "released")
    if config.rule == "frechet":
        return FrechetRule(config.rule_parameter)
    return QuotaRule(config.steps_per_block)
