# SPDX-License-Identifier: Apache-2.0
"""What `dllm-compile bench` decodes: a user's prompts, the bundled model's problems, or text of a wanted length."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from .._checkpoints import Checkpoint
from .._config_checks import integer
from ..errors import ConfigError

# Cut or repeated to a length: what is decoded behind it says nothing about tokens per forward on real prompts.
_TEXT = (
    "A train leaves the station at nine and reaches the next town two hours later. It waits there for ten minutes, "
    "takes on water and mail, and goes on to the coast. How far it has come by noon depends on the hills between. "
)


def prompts_from_file(checkpoint: Checkpoint, path: Path, batch: int | None, *, chat: bool = True) -> list[list[int]]:
    """One prompt a line, the first `batch` of them (None: all).

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or holds fewer.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompts {path} is not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}): save it as UTF-8"
        ) from error
    if len(lines) < (batch or 1):
        raise ConfigError(f"--prompts {path} holds {len(lines)} prompts, fewer than --batch {batch or 1}")
    return [checkpoint.encode(line, chat=chat) for line in lines[:batch]]


def held_out_prompts(checkpoint: Checkpoint, batch: int) -> list[list[int]]:
    """Problems of the bundled model, all of one length so that a plain loop can take them together.

    Raises:
        ConfigError: there are not so many of one length.
    """
    from ..models.small.problem import held_out

    integer("batch", batch, 1)
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for problem in held_out("arithmetic", 500):
        ids = checkpoint.encode(problem.prompt)
        by_length[len(ids)].append(ids)
        if len(by_length[len(ids)]) == batch:
            return by_length[len(ids)]
    most = max(map(len, by_length.values()))
    raise ConfigError(f"--batch {batch}: at most {most} of the bundled problems have one length; use --prompt-lengths")


def made_prompts(checkpoint: Checkpoint, length: int, batch: int) -> list[list[int]]:
    """`batch` different prompts of `length` tokens, from a text that is repeated and begun elsewhere each time."""
    integer("prompt_lengths", length, 1)
    integer("batch", batch, 1)
    words = _TEXT.split()
    prompts = []
    for i in range(batch):
        text = " ".join(words[i % len(words) :] + words[: i % len(words)])
        ids = list(checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append((ids * (length // len(ids) + 1))[:length])
    return prompts
