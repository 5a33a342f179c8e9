# SPDX-License-Identifier: Apache-2.0
"""Training rows: prompt, answer, then end tokens up to a fixed length; made by several processes."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dllm_compile.models.small.problem import stream
from dllm_compile.models.small.tokenizer import EOS_ID

Rows = tuple[NDArray[np.int16], NDArray[np.int16]]


def encode_rows(tokenizer_json: str, family: str, n: int, seed: int, length: int, min_canvas: int) -> Rows:
    """`n` training problems of one family as token rows.

    Args:
        tokenizer_json: the tokenizer, as its JSON text.
        family: which problems.
        n: how many are drawn; those that do not fit are left out.
        seed: of the stream of problems.
        length: tokens in a row.
        min_canvas: prompts that leave less room than this are left out.

    Returns:
        Tokens [<= n, length] and prompt lengths [<= n].
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    problems = list(islice(stream(family, "train", seed), n))
    prompts = tokenizer.encode_batch([problem.prompt for problem in problems])
    answers = tokenizer.encode_batch([problem.answer for problem in problems], add_special_tokens=False)
    rows = np.full((n, length), EOS_ID, dtype=np.int16)
    starts = np.zeros(n, dtype=np.int16)
    kept = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        start, stop = len(prompt.ids), len(prompt.ids) + len(answer.ids)
        if start > length - min_canvas or stop >= length:
            continue
        rows[kept, :start] = prompt.ids
        rows[kept, start:stop] = answer.ids
        starts[kept] = start
        kept += 1
    return rows[:kept], starts[:kept]


class RowBuilder:
    """`encode_rows` for a mixture, by several processes that start at once and are waited for in `collect`.

    Make it before CUDA is used: the processes are forked, so that they need not import everything again.
    """

    def __init__(
        self,
        tokenizer_json: str,
        mixture: dict[str, int],
        seed: int,
        length: int,
        min_canvas: int,
        workers: int,
        chunk: int = 8192,
    ) -> None:
        """Start the work.

        Args:
            tokenizer_json: the tokenizer, as its JSON text.
            mixture: family to number of problems.
            seed: of the streams of problems.
            length: tokens in a row.
            min_canvas: least room for an answer.
            workers: number of processes.
            chunk: problems a job; with the seed it decides which problems are drawn.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"))
        self._jobs = [
            self._pool.submit(
                encode_rows, tokenizer_json, family, min(chunk, n - at), seed * 1_000_003 + at, length, min_canvas
            )
            for family, n in mixture.items()
            for at in range(0, n, chunk)
        ]

    def collect(self) -> Rows:
        """Wait for all rows; their order does not depend on the number of processes."""
        parts = [job.result() for job in self._jobs]
        self._pool.shutdown()
        return np.concatenate([rows for rows, _ in parts]), np.concatenate([starts for _, starts in parts])
