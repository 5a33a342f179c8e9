# SPDX-License-Identifier: Apache-2.0
"""The output object and the counters (section 23)."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers.utils import ModelOutput

from dllm_compile import GenerationOutput
from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.output import FinishedRow, build_output, cut_at_stop

from .tiny import EOS, EOT, FACTS, PAD, DensePrograms, TinyModel, prompts_of


def rows(*specs) -> list[FinishedRow]:
    """(prompt, answer, decoded, forwards) -> rows."""
    return [FinishedRow(torch.tensor(p + a), len(p), decoded, forwards) for p, a, decoded, forwards in specs]


def test_counts():
    """T1: EOS in the middle, EOS then text, no EOS, EoT before EOS; T2: EOS in the prompt counts for nothing."""
    output = build_output(
        rows(
            ([1, 2], [3, 4, EOS, EOS], 4, 2),
            ([1], [3, EOS, 5, 6], 4, 4),
            ([1, EOS, 2], [3, 4, 5, 6], 4, 3),
            ([1], [3, EOT, EOS, EOS], 2, 1),
            ([EOS], [EOS, 4, 5, 6], 4, 2),
        ),
        stops=(EOS, EOT),
        pad_id=PAD,
        forwards=4,
        row_forwards=70,
        seconds=2.0,
        device=torch.device("cpu"),
    )
    assert [answer.tolist() for answer in output.answers] == [[3, 4], [3], [3, 4, 5, 6], [3], []]
    stats = output.stats
    assert stats.answer_tokens_per_row == (2, 1, 4, 1, 0)
    assert stats.answer_tokens == 8
    assert stats.canvas_tokens == 18
    assert stats.forwards == 4
    assert stats.forwards_per_row == (2, 4, 3, 1, 2)
    assert stats.batch == 5
    assert stats.row_forwards == 70
    torch.testing.assert_close(output.tokens_per_forward, torch.tensor([1.0, 0.25, 4 / 3, 1.0, 0.0]))
    assert stats.tokens_per_second == 4.0
    assert stats.tokens_per_second_per_row == 0.8
    assert stats.ms_per_forward == 500.0
    assert stats.tokens_per_forward == pytest.approx(8 / 12)
    assert output.sequences.tolist()[1] == [PAD, PAD, 1, 3, EOS, 5, 6]
    assert output.sequences.tolist()[2] == [1, EOS, 2, 3, 4, 5, 6]


def test_no_stop_ids():
    assert cut_at_stop(torch.tensor([1, 2]), ()).tolist() == [1, 2]
    assert cut_at_stop(torch.tensor([1, EOS, 2]), (EOS,), keep_stop=True).tolist() == [1, EOS]


def test_output_object():
    """Attributes, keys, and a tuple, as transformers' outputs."""
    output = decode(
        DensePrograms(TinyModel(seed=1)), FACTS, prompts_of(3, 5), DecodingConfig(max_new_tokens=6, block_length=3)
    )
    assert isinstance(output, ModelOutput)
    assert isinstance(output, GenerationOutput)
    assert list(output) == ["sequences", "tokens_per_forward", "answers", "stats"]
    assert output["sequences"] is output.sequences is output[0]
    assert output.texts is None
    named = output.with_texts(["a", "b"])
    assert named["texts"] == named.texts == ["a", "b"]
    assert named.stats is output.stats
    assert output.texts is None
    assert output.sequences.dtype == torch.int64
    assert output.tokens_per_forward.dtype == torch.float32
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.stats.forwards = 0


def test_stats_can_be_written_and_printed():
    output = decode(
        DensePrograms(TinyModel(seed=1)), FACTS, prompts_of(3), DecodingConfig(max_new_tokens=6, eos="none")
    )
    stats = output.stats
    figures = json.loads(json.dumps(stats.as_dict()))
    assert figures["forwards"] == 6
    assert figures["forwards_per_row"] == [6]
    assert figures["ms_per_forward"] == stats.ms_per_forward > 0
    assert figures["tokens_per_second"] == stats.answer_tokens / stats.seconds
    assert f"{stats.answer_tokens} answer tokens in 6 forwards" in str(stats)
