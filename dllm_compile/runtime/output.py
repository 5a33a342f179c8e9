# SPDX-License-Identifier: Apache-2.0
"""What `generate` returns, and how its figures are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput


@dataclass(frozen=True)
class DecodingStats:
    """Figures of one call, all from the same run.

    Prompt tokens are never counted. "Stop id" is any id that ends an answer.

    Attributes:
        batch: prompts in the call.
        answer_tokens: generated tokens up to and excluding the first stop id of the answer, over all rows.
        answer_tokens_per_row: the same, for each row.
        canvas_tokens: answer positions up to the end of the last block that was decoded (all of them unless decoding
            stopped early), over all rows; what stands behind the stop id inside that block is included.
        forwards: forwards of the full network (NFE), whatever the number of rows; guidance counts 2. A forward in
            which no row was active any more (`check_every` > 1) counts as well.
        forwards_per_row: for each row, the forwards in which that row was active.
        row_forwards: rows computed, summed over the forwards: the measure of work of a batch.
        seconds: wall time of the decode loop on the host, the last look at the device included; compilation, when it
            happens inside, too.
    """

    batch: int
    answer_tokens: int
    answer_tokens_per_row: tuple[int, ...]
    canvas_tokens: int
    forwards: int
    forwards_per_row: tuple[int, ...]
    row_forwards: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens of the whole batch in a second of wall time."""
        return self.answer_tokens / self.seconds if self.seconds > 0 else float("nan")

    @property
    def tokens_per_second_per_row(self) -> float:
        """`tokens_per_second` / batch."""
        return self.tokens_per_second / self.batch

    @property
    def ms_per_forward(self) -> float:
        """Wall time of the decode loop / forwards, in milliseconds."""
        return 1000 * self.seconds / self.forwards

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens / forwards in which their row was active, over all rows."""
        return self.answer_tokens / sum(self.forwards_per_row)

    def as_dict(self) -> dict[str, Any]:
        """Every figure by name, the derived ones included; ready for JSON."""
        derived = ("tokens_per_second", "tokens_per_second_per_row", "ms_per_forward", "tokens_per_forward")
        counted = {field.name: getattr(self, field.name) for field in fields(self)}
        return counted | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        return (
            f"{self.answer_tokens} answer tokens in {self.forwards} forwards ({self.tokens_per_forward:.2f} a forward "
            f"and row), {self.seconds:.2f} s: {self.tokens_per_second:.1f} tokens/s, {self.ms_per_forward:.2f} ms per "
            f"forward, batch {self.batch}"
        )


@dataclass
class GenerationOutput(ModelOutput):
    """Result of `generate`: attributes, and a dictionary of those that are not None.

    Attributes:
        sequences: (B, P_max + G) int64, prompt and answer canvas, padded on the left with the pad id. Masks inside
            a prompt are filled in. Behind the end of an answer stands the eos id.
        tokens_per_forward: (B,) fp32, answer tokens of the row (the first stop id and what follows excluded) / forwards
            in which that row was active. Batching does not change a row's figure.
        answers: B tensors (n,) int64: the answer up to and excluding its first stop id.
        texts: decoded answers, when a tokenizer was at hand.
        stats: figures of the call.
    """

    sequences: Tensor | None = None
    tokens_per_forward: Tensor | None = None
    answers: list[Tensor] | None = None
    texts: list[str] | None = None
    stats: DecodingStats | None = None

    def with_texts(self, texts: Sequence[str]) -> GenerationOutput:
        """The same output with decoded answers."""
        return replace(self, texts=list(texts))


@dataclass(frozen=True)
class FinishedRow:
    """One row when its decoding has ended.

    Attributes:
        tokens: (P + G,) int64 on the CPU.
        prompt_length: P.
        decoded: answer positions up to the end of the last decoded block.
        forwards: forwards in which the row was active.
    """

    tokens: Tensor
    prompt_length: int
    decoded: int
    forwards: int

    def answer(self, stops: Sequence[int]) -> Tensor:
        """The answer up to and excluding the first id of `stops`; the whole canvas where there is none."""
        return cut_at_stop(self.tokens[self.prompt_length :], stops)


def cut_at_stop(tokens: Tensor, stops: Sequence[int], *, keep_stop: bool = False) -> Tensor:
    """`tokens` (n,) up to its first stop id, which is itself kept with `keep_stop`."""
    hits = torch.nonzero(torch.isin(tokens, torch.tensor(stops, dtype=tokens.dtype))).flatten()
    return tokens[: int(hits[0]) + int(keep_stop)] if len(hits) else tokens


def build_output(
    rows: Sequence[FinishedRow],
    *,
    stops: Sequence[int],
    pad_id: int,
    forwards: int,
    row_forwards: int,
    seconds: float,
    device: torch.device,
) -> GenerationOutput:
    """Put finished rows together, in the order of the prompts.

    Args:
        rows: one for each prompt.
        stops: ids that end an answer.
        pad_id: id in front of shorter prompts.
        forwards: NFE of the call.
        row_forwards: rows computed, over all forwards.
        seconds: wall time of the decode loop.
        device: where the result shall lie.
    """
    width = max(len(row.tokens) for row in rows)
    sequences = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    for i, row in enumerate(rows):
        sequences[i, width - len(row.tokens) :] = row.tokens
    answers = [row.answer(stops) for row in rows]
    counts = tuple(len(answer) for answer in answers)
    per_row = tuple(row.forwards for row in rows)
    stats = DecodingStats(
        batch=len(rows),
        answer_tokens=sum(counts),
        answer_tokens_per_row=counts,
        canvas_tokens=sum(row.decoded for row in rows),
        forwards=forwards,
        forwards_per_row=per_row,
        row_forwards=row_forwards,
        seconds=seconds,
    )
    return GenerationOutput(
        sequences=sequences.to(device),
        tokens_per_forward=(torch.tensor(counts) / torch.tensor(per_row)).to(device),
        answers=[answer.to(device) for answer in answers],
        stats=stats,
    )
