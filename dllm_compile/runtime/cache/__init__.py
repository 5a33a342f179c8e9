# SPDX-License-Identifier: Apache-2.0
"""Cache policies, one a file, and the choice of one by configuration."""

from __future__ import annotations

from ...config import DecodingConfig
from ..row_programs import RowPrograms
from .base import CachePolicy, CacheRule, Look, Request
from .dkv import DelayedCache, DelayedRule
from .dual import BlockCache, BlockRule
from .flash import FlashCache
from .lacache import LaCache
from .prefix import PrefixCache, PrefixRule
from .uncached import Uncached, UncachedPruned
from .verify_rows import Drafts

__all__ = ["CachePolicy", "CacheRule", "Drafts", "Look", "Request", "cache_policy"]


def cache_policy(
    config: DecodingConfig, programs: RowPrograms, cache_rows: int, mask_token_id: int, *, spare: bool = False
) -> CachePolicy:
    """The policy a decoding configuration names.

    Args:
        config: the configuration.
        programs: computes the forwards.
        cache_rows: rows of all samples that are decoded at the same time.
        mask_token_id: id of a masked position.
        spare: layouts have rows that belong to no sample.

    Raises:
        ConfigError: the configuration names layers the model does not have.
    """
    prunes, interval = config.suffix != "all", config.refresh_interval
    if config.cache == "lacache":
        return LaCache(programs, config, cache_rows)
    if config.cache == "prefix":
        return PrefixCache(programs, cache_rows, PrefixRule(prunes=prunes, interval=interval))
    if config.cache == "dual":
        return BlockCache(programs, cache_rows, BlockRule(prunes=prunes, interval=interval))
    if config.cache == "vicinity":
        near = {"before": config.prefix_look, "behind": config.after_look, "warmup": config.warmup_steps}
        return BlockCache(programs, cache_rows, BlockRule(prunes=prunes, interval=interval, **near))
    if config.cache == "dkv":
        rule = DelayedRule(prunes=prunes, steps=config.cache_steps, mask_token_id=mask_token_id)
        return DelayedCache(programs, cache_rows, rule)
    if config.cache == "flash":
        return FlashCache(programs, cache_rows, config=config, mask_token_id=mask_token_id)
    return UncachedPruned(programs, prunes=prunes) if prunes or spare else Uncached(programs)
