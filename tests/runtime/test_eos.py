# SPDX-License-Identifier: Apache-2.0
"""Where answers end, on a model whose proposals are written down."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.facts import ModelFacts

from .tiny import EOS, EOT, FACTS, MASK, ScriptedPrograms

PROMPT = torch.tensor([1, 2])


def run(answer, order, **options):
    """Propose `answer`, most confident first in `order` (answer positions)."""
    confidence = [0.0] * len(answer)
    for rank, position in enumerate(order):
        confidence[position] = 1 - (rank + 1) / 100
    programs = ScriptedPrograms([1, 2, *answer], [0.0, 0.0, *confidence])
    config = DecodingConfig(max_new_tokens=len(answer), **{"block_length": 4, **options})
    output = decode(programs, FACTS, [PROMPT], config)
    return output.sequences[0, 2:].tolist(), output


ANSWER = [10, 11, EOS, 12, 13, 14, 15, 16]


def test_block_runs_to_its_end_and_the_rest_is_filled():
    tokens, output = run(ANSWER, [2, 0, 3, 1], eos="block")
    assert tokens == [10, 11, EOS, 12, EOS, EOS, EOS, EOS]
    assert output.stats.forwards == 4
    assert output.stats.canvas_tokens == 4
    assert output.answers[0].tolist() == [10, 11]


def test_first_ends_when_nothing_is_masked_before_it():
    tokens, output = run(ANSWER, [0, 2, 1, 3], eos="first")
    assert tokens == [10, 11, EOS, EOS, EOS, EOS, EOS, EOS]
    assert output.stats.forwards == 3, "position 1 is still decoded after the stop id, position 3 never"
    assert output.stats.canvas_tokens == 4


def test_first_keeps_what_was_committed_behind_the_end():
    tokens, output = run(ANSWER, [3, 2, 0, 1], eos="first")
    assert tokens == [10, 11, EOS, 12, EOS, EOS, EOS, EOS]
    assert output.stats.forwards == 4


def test_first_takes_the_leftmost_of_the_step_in_which_one_appears():
    tokens, output = run([10, EOS, 12, EOS, 9, 9, 9, 9], [1, 3, 0, 2], eos="first", steps=4)
    assert tokens == [10, EOS, EOS, EOS, EOS, EOS, EOS, EOS]
    assert output.stats.forwards == 2, "two tokens a step: both stop ids in the first, one token before the end"


def test_first_is_fixed_by_the_first_appearance():
    """A later stop id further left cuts the answer, but the end stays where it was."""
    tokens, output = run([10, EOS, 12, EOS, 9, 9, 9, 9], [3, 1, 0, 2], eos="first")
    assert tokens == [10, EOS, 12, EOS, EOS, EOS, EOS, EOS]
    assert output.stats.forwards == 4
    assert output.answers[0].tolist() == [10]


def test_first_at_the_very_first_position():
    tokens, output = run([EOS, 10, 11, 12], [0], eos="first")
    assert tokens == [EOS] * 4
    assert output.stats.forwards == 1
    assert output.answers[0].tolist() == []
    assert output.tokens_per_forward.tolist() == [0.0]


def test_none_decodes_everything_and_still_cuts_the_answer():
    tokens, output = run(ANSWER, range(8), eos="none")
    assert tokens == ANSWER
    assert output.stats.forwards == 8
    assert output.answers[0].tolist() == [10, 11]


@pytest.mark.parametrize("eos", ["block", "first"])
def test_another_stop_id_ends_but_the_model_eos_fills(eos):
    answer = [10, EOT, 11, 12, 13, 14, 15, 16]
    tokens, _ = run(answer, range(4), eos=eos, eos_token_id=(EOT, EOS))
    assert tokens[:2] == [10, EOT]
    assert tokens[4:] == [EOS] * 4
    only, _ = run(answer, range(4), eos=eos, eos_token_id=EOT)
    assert only[4:] == [EOT] * 4, "the model's eos is no stop id here, so it cannot stand for the end"


@pytest.mark.parametrize("eos", ["block", "first"])
def test_stop_ids_that_are_not_named_end_nothing(eos):
    tokens, output = run(ANSWER, range(8), eos=eos, eos_token_id=(EOT,))
    assert tokens == ANSWER
    assert output.answers[0].tolist() == ANSWER


@pytest.mark.parametrize("eos", ["block", "first"])
def test_without_stop_ids_everything_is_decoded(eos):
    facts = ModelFacts(vocab_size=40, max_sequence_length=64, mask_token_id=MASK)
    programs = ScriptedPrograms([1, 2, *ANSWER], [0.5] * 10)
    config = DecodingConfig(max_new_tokens=8, block_length=4, eos=eos)
    output = decode(programs, facts, [PROMPT, PROMPT[:1]], config)
    assert output.sequences[0, 2:].tolist() == ANSWER
    assert output.sequences[1, 0] == 0, "no pad id and no eos id: zero"


@pytest.mark.parametrize("eos", ["block", "first"])
def test_stop_id_in_the_prompt_ends_nothing(eos):
    """Given (section 23, T2) or filled into a hole of the prompt."""
    given = torch.tensor([1, EOS, MASK, 3])
    programs = ScriptedPrograms([1, EOS, EOS, 3, 10, 11, 12, 13], [0.5] * 8)
    output = decode(programs, FACTS, [given], DecodingConfig(max_new_tokens=4, block_length=2, eos=eos, infill=True))
    assert output.sequences[0].tolist() == [1, EOS, EOS, 3, 10, 11, 12, 13]
    assert output.answers[0].tolist() == [10, 11, 12, 13]
    assert output.stats.forwards == 5


def test_rows_end_by_themselves():
    """Positions are shared by the script, so prompts of different lengths see different answers."""
    programs = ScriptedPrograms([1, 2, 3, 4, EOS, 5, 6, 7, 8, 9, 10, 11], [0.5] * 12)
    prompts = [torch.tensor([1]), torch.tensor([1, 2, 3, 4, 5])]
    output = decode(programs, FACTS, prompts, DecodingConfig(max_new_tokens=6, block_length=2))
    assert output.sequences[0, 4:].tolist() == [1, 2, 3, 4, EOS, EOS, EOS]
    assert output.sequences[1, 5:].tolist() == [5, 6, 7, 8, 9, 10]
    assert output.stats.forwards_per_row == (4, 6)
