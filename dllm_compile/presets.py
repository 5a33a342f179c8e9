# SPDX-License-Identifier: Apache-2.0
"""The papers' settings by task, as decoding configurations with names.

Each is a starting point: `PRESETS["flash/gsm8k"].replace(max_new_tokens=256)`. Lengths, block lengths and parameters
are those of the works' own scripts (for LLaDA-8B-Instruct where nothing else is said); accuracies reported for them
belong to that model and its prompts. Sources:

* Fast-dLLM: arXiv 2505.22618, scripts of NVlabs/Fast-dLLM (threshold 0.9, blocks of 32).
* DPad: arXiv 2508.14148, scripts of Crys-Chen/DPad.
* dKV-Cache: arXiv 2505.15781, README of horseee/dKV-Cache.
* dInfer: arXiv 2510.08666, examples of inclusionAI/dInfer (16 / 16 / 4 with blocks of 64).
* Flash-Cache: arXiv 2609.26796, scripts of VILA-Lab/Flash-dLLM; "flash" without the verify pass, "flash-verify" with
  it. The scripts' gammas belong to the released code's product rule.
"""

from __future__ import annotations

from .config import DecodingConfig

_FAST = DecodingConfig(threshold=0.9, block_length=32)
_FLASH = DecodingConfig(threshold=0.9, cache="flash", max_new_tokens=512)
_VERIFY = _FLASH.replace(commit="flash_verify", gamma=0.8)
_DPAD_SHORT = _FAST.replace(suffix="dpad", max_new_tokens=256)
_DPAD_LONG = _FAST.replace(suffix="dpad", max_new_tokens=512)

PRESETS: dict[str, DecodingConfig] = {
    "fast-dllm/prefix": _FAST.replace(cache="prefix", max_new_tokens=256),
    "fast-dllm/dual": _FAST.replace(cache="dual", max_new_tokens=256),
    "dkv": DecodingConfig(cache="dkv", cache_steps=8, max_new_tokens=128, block_length=64, steps=128),
    "dinfer/vicinity": DecodingConfig(
        threshold=0.9, cache="vicinity", prefix_look=16, after_look=16, warmup_steps=4, block_length=64
    ),
    "flash/gsm8k": _FLASH,
    "flash/math": _FLASH,
    "flash/humaneval": _FLASH,
    "flash/mbpp": _FLASH.replace(track=48),
    "flash-verify/gsm8k": _VERIFY,
    "flash-verify/math": _VERIFY.replace(gamma=0.85),
    "flash-verify/humaneval": _VERIFY.replace(gamma=0.85),
    "flash-verify/mbpp": _VERIFY.replace(track=48),
    "dpad/gsm8k": _DPAD_SHORT.replace(k_sigma=4.0, scale=2.0, suffix_window=256),
    "dpad/math": _DPAD_SHORT.replace(k_sigma=4.0, scale=2.0, suffix_window=256),
    "dpad/humaneval": _DPAD_LONG.replace(k_sigma=3.0, scale=2.3, suffix_window=512),
    "dpad/mbpp": _DPAD_LONG.replace(k_sigma=3.0, scale=2.3, suffix_window=128),
    "dpad-1.5/gsm8k": _DPAD_SHORT.replace(k_sigma=3.0, scale=1.6, suffix_window=256),
    "dpad-1.5/math": _DPAD_SHORT.replace(k_sigma=3.0, scale=1.6, suffix_window=256),
    "dpad-1.5/humaneval": _DPAD_LONG.replace(k_sigma=3.0, scale=2.3, suffix_window=128),
    "dpad-1.5/mbpp": _DPAD_LONG.replace(k_sigma=3.0, scale=1.6, suffix_window=512),
    "dpad-1.5/long": _FAST.replace(suffix="dpad", max_new_tokens=1024, k_sigma=3.0, scale=1.6, suffix_window=256),
}
"""By "work/task"; `dpad-1.5` is for LLaDA-1.5. HumanEval of `dpad-1.5` has the scale of the runs with a threshold."""
