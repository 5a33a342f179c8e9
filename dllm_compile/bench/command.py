# SPDX-License-Identifier: Apache-2.0
"""The command `dllm-compile bench`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

from .. import _checkpoints
from .._config_checks import integer
from ..config import CompileConfig, DecodingConfig
from ..errors import ConfigError
from .plain import plain_config
from .prompts import held_out_prompts, made_prompts, prompts_from_file
from .run import bench


def run(
    arguments: argparse.Namespace, config: DecodingConfig, compile_config: CompileConfig, say: Callable[[str], None]
) -> int:
    """Measure and print one table for each prompt length, or one list in JSON, with `say`.

    Raises:
        ConfigError: options that contradict each other.
    """
    from ..api import optimize

    integer("rounds", arguments.rounds, 1)
    if arguments.prompts and arguments.prompt_lengths:
        raise ConfigError("--prompts and --prompt-lengths both say what is decoded: give one of them")
    if not arguments.no_baselines:
        plain_config(config)  # before the model is loaded: a contradiction is said at once
    checkpoint = _checkpoints.load(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    started = time.perf_counter()
    fast = optimize(checkpoint.model, compile_config)
    seconds = time.perf_counter() - started
    found = []
    for prompts, note in _prompts(arguments, checkpoint):
        one = bench(
            fast,
            prompts,
            config,
            rounds=arguments.rounds,
            baselines=not arguments.no_baselines,
            optimize_seconds=seconds,
            notes=note,
        )
        found.append(one.to_dict())
        if not arguments.json:
            say(f"{checkpoint.name}\n{one}\n")
    if arguments.json:
        say(json.dumps(found, indent=2))
    return 0


def _prompts(
    arguments: argparse.Namespace, checkpoint: _checkpoints.Checkpoint
) -> Iterator[tuple[list[list[int]], tuple[str, ...]]]:
    if arguments.prompts:
        yield prompts_from_file(checkpoint, arguments.prompts, arguments.batch), ()
        return
    batch = 1 if arguments.batch is None else arguments.batch
    if not arguments.prompt_lengths and arguments.model is None:
        yield held_out_prompts(checkpoint, batch), ()
        return
    for length in arguments.prompt_lengths or [256]:
        note = "prompts were made up to have a length: tokens per forward are those of no real task (--prompts FILE)"
        yield made_prompts(checkpoint, length, batch), (note,)
