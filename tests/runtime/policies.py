# SPDX-License-Identifier: Apache-2.0
"""Every cache and suffix policy under test, in sizes that fit the tiny model, and what its forwards computed."""

from __future__ import annotations

from dllm_compile.runtime.engine import decode

from .tiny import FACTS, CachedPrograms

POLICIES: dict[str, dict] = {
    "prefix": {"cache": "prefix"},
    "prefix every 3": {"cache": "prefix", "refresh_interval": 3},
    "dual": {"cache": "dual"},
    "dual every 2": {"cache": "dual", "refresh_interval": 2},
    "vicinity": {"cache": "vicinity", "prefix_look": 3, "after_look": 5},
    "vicinity, warm": {"cache": "vicinity", "after_look": 2, "warmup_steps": 3, "refresh_interval": 4},
    "dkv": {"cache": "dkv"},
    "dkv every 3": {"cache": "dkv", "cache_steps": 3},
    "flash": {"cache": "flash", "window_length": 5, "lookahead": 4, "track": 6},
    "flash, few tracked": {"cache": "flash", "window_length": 4, "lookahead": 0, "track": 0, "score_layers": "all"},
    "flash, wide": {"cache": "flash"},
    "dpad": {"suffix": "dpad", "suffix_window": 12},
    "window": {"suffix": "window", "suffix_window": 5},
    "prefix, dpad": {"cache": "prefix", "suffix": "dpad", "suffix_window": 12, "refresh_interval": 4},
    "dual, dpad": {"cache": "dual", "suffix": "dpad", "suffix_window": 12, "k_sigma": 3.0, "scale": 2.3},
    "vicinity, window": {"cache": "vicinity", "after_look": 7, "suffix": "window", "suffix_window": 4},
    "dkv, dpad": {"cache": "dkv", "cache_steps": 4, "suffix": "dpad", "suffix_window": 12},
}

REFRESH_ALL: dict[str, dict] = {
    "prefix": {"cache": "prefix", "refresh_interval": 1},
    "dual": {"cache": "dual", "refresh_interval": 1},
    "vicinity": {"cache": "vicinity", "refresh_interval": 1},
    "vicinity, looks that cover all": {"cache": "vicinity", "prefix_look": 99, "after_look": 99},
    "dkv": {"cache": "dkv", "cache_steps": 1},
}


def rows_of(programs: CachedPrograms, *, guided: bool = False) -> list[list[int]]:
    """Positions computed in each forward of a run with one sample, padding left out."""
    found = []
    for call, cache in zip(programs.calls, programs.cache_calls, strict=True):
        spare = cache.caches["k_cache_0"].shape[0] - 1
        positions = call.positions[cache.cache_rows < spare].tolist()
        found.append(positions[: len(positions) // 2] if guided else positions)
    return found


def run_alone(model, prompt, config):
    """One prompt: the output, and the positions computed in each forward."""
    programs = CachedPrograms(model)
    output = decode(programs, FACTS, [prompt], config)
    return output, rows_of(programs, guided=config.cfg_scale > 0)
