# SPDX-License-Identifier: Apache-2.0
"""Every form of input, and every refusal with what to do next."""

from __future__ import annotations

import types

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.errors import (
    DllmCompileError,
    EmptyPromptError,
    MaskTokenError,
    PaddingError,
    PromptError,
    PromptTooLongError,
    UnsupportedModelError,
)
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.prompts import ModelFacts, check_mask_token, check_prompts, split_prompts

from .tiny import EOS, FACTS, MASK, PAD, DensePrograms, TinyModel, prompts_of


def lists(prompts) -> list[list[int]]:
    assert all(prompt.dtype == torch.int64 and prompt.dim() == 1 for prompt in prompts)
    return [prompt.tolist() for prompt in prompts]


def test_forms_of_input():
    ragged = [[1, 2, 3], [4]]
    assert lists(split_prompts(torch.tensor([[1, 2], [3, 4]]))) == [[1, 2], [3, 4]]
    assert lists(split_prompts(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))) == [[1, 2], [3, 4]]
    assert lists(split_prompts(torch.tensor([1, 2]))) == [[1, 2]]
    assert lists(split_prompts([1, 2])) == [[1, 2]]
    assert lists(split_prompts(ragged)) == ragged
    assert lists(split_prompts(tuple(torch.tensor(one) for one in ragged))) == ragged
    assert lists(split_prompts([torch.tensor([1, 2]), [3]])) == [[1, 2], [3]]


def test_padding_on_either_side():
    ids = torch.tensor([[PAD, PAD, 1, 2], [3, 4, PAD, PAD], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    assert lists(split_prompts(ids, mask)) == [[1, 2], [3, 4], [5, 6, 7, 8]]
    assert lists(split_prompts(ids, mask.bool())) == [[1, 2], [3, 4], [5, 6, 7, 8]]
    assert lists(split_prompts(ids.tolist(), mask.tolist())) == [[1, 2], [3, 4], [5, 6, 7, 8]]
    assert lists(split_prompts(ids[0], mask[0])) == [[1, 2]]
    assert lists(split_prompts(ids)) == ids.tolist(), "without a mask every id is a token"


def test_padding_changes_no_token():
    """G4, G5: left padding, right padding, garbage under the mask and an all-ones mask."""
    model, config = TinyModel(seed=1), DecodingConfig(max_new_tokens=10, block_length=4, threshold=0.5)
    prompts = prompts_of(3, 6, seed=1)
    expected = decode(DensePrograms(model), FACTS, prompts, config).sequences
    for filler, left in [(PAD, True), (PAD, False), (17, True), (MASK, False)]:
        ids = torch.full((2, 6), filler)
        mask = torch.zeros(2, 6, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            place = slice(6 - len(prompt), 6) if left else slice(0, len(prompt))
            ids[row, place], mask[row, place] = prompt, 1
        got = decode(DensePrograms(model), FACTS, split_prompts(ids, mask), config)
        assert torch.equal(got.sequences, expected)
    full = torch.stack(prompts_of(4, 4, seed=2))
    assert lists(split_prompts(full, torch.ones_like(full))) == lists(split_prompts(full))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1, 1]], "one side"),
        ([[0, 1, 1, 0]], "one side"),
        ([[1, 1, 1]], "shape"),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], "shape"),
        ([[1, 1, 1, 2]], "other than 0 and 1"),
        ([[0.0, 0.5, 1.0, 1.0]], "other than 0 and 1"),
        ([[[1, 1, 1, 1]]], "shape"),
        ([[1, 1], [1]], "rectangular"),
    ],
)
def test_bad_masks(mask, message):
    with pytest.raises(PaddingError, match=message):
        split_prompts(torch.tensor([[1, 2, 3, 4]]), mask)


def test_a_mask_as_ragged_as_the_prompts():
    """What a tokenizer returns for several texts without padding."""
    assert lists(split_prompts([[1, 2], [3]], [[1, 1], [1]])) == [[1, 2], [3]]
    assert lists(split_prompts([[1, 2], [3]], [torch.tensor([0, 1]), [1]])) == [[2], [3]]
    assert lists(split_prompts([1, 2], [1, 1])) == [[1, 2]]
    with pytest.raises(PaddingError, match="other than 0 and 1"):
        split_prompts([[1, 2], [3]], [[1, 2], [1]])
    with pytest.raises(PaddingError, match="shape"):
        split_prompts([[1, 2], [3]], [[[1], [1]], [1]])
    for bad in ([[1], [1]], [[1, 1], [1], [1]], "11", 1, {"a": 1}):
        with pytest.raises(PaddingError):
            split_prompts([[1, 2], [3]], bad)


def test_a_mask_does_not_go_with_ragged_prompts():
    with pytest.raises(PaddingError, match="Ragged prompts need no mask"):
        split_prompts([[1, 2], [3]], torch.ones(2, 2))


def test_empty():
    with pytest.raises(EmptyPromptError, match="Prompt 1 is all padding"):
        split_prompts(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]]))
    with pytest.raises(EmptyPromptError, match="Prompt 1 has no tokens"):
        check_prompts(split_prompts([[1], []]), FACTS, DecodingConfig(max_new_tokens=4))
    with pytest.raises(EmptyPromptError):
        check_prompts(split_prompts(torch.empty(2, 0, dtype=torch.int64)), FACTS, DecodingConfig(max_new_tokens=4))
    for nothing in ([], torch.empty(0, 4, dtype=torch.int64)):
        with pytest.raises(PromptError, match="no prompts"):
            split_prompts(nothing)


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([[0.5, 0.25, 0.5]]),
        [[0.5, 1.0]],
        torch.ones(1, 2, dtype=torch.bool),
        "text",
        ["text"],
        5,
        torch.ones(1, 1, 1).long(),
    ],
    ids=str,
)
def test_what_is_no_prompt(bad):
    with pytest.raises(PromptError):
        split_prompts(bad)


def test_too_long():
    """G12: one more token than the model has positions."""
    config = DecodingConfig(max_new_tokens=40)
    check_prompts(prompts_of(56), FACTS, config)
    with pytest.raises(PromptTooLongError, match=r"57 tokens .* 40: together 97 .* 96\. Shorten .* by 1 .* to 39"):
        check_prompts(prompts_of(3, 57), FACTS, config)
    with pytest.raises(PromptTooLongError, match=r"is 96\. Shorten the prompt by 60 tokens$"):
        check_prompts(prompts_of(116), FACTS, config)
    unlimited = ModelFacts(vocab_size=40, max_sequence_length=None, mask_token_id=MASK)
    check_prompts(prompts_of(5000), unlimited, config)


def test_ids_outside_the_vocabulary():
    for bad in (40, -1):
        with pytest.raises(PromptError, match=f"id {bad}, outside the vocabulary of 40"):
            check_prompts([torch.tensor([1, bad])], FACTS, DecodingConfig(max_new_tokens=4))


def test_masks_in_prompts():
    prompt = torch.tensor([1, MASK, 2])
    with pytest.raises(MaskTokenError, match="infill=True"):
        check_prompts([prompt], FACTS, DecodingConfig(max_new_tokens=4))
    check_prompts([prompt], FACTS, DecodingConfig(max_new_tokens=4, infill=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "no mask_token_id"),
        ({"mask_token_id": 40}, "not in the vocabulary"),
        ({"pad_token_id": MASK}, "pad_token_id are both"),
        ({"eos_token_id": (EOS, MASK)}, "eos_token_id are both"),
    ],
)
def test_mask_id_of_the_model(changes, message):
    facts = ModelFacts(**{"vocab_size": 40, "max_sequence_length": 96, "mask_token_id": MASK} | changes)
    with pytest.raises(MaskTokenError, match=message):
        check_prompts(prompts_of(3), facts, DecodingConfig(max_new_tokens=4))


def test_pad_id_may_be_the_eos_id():
    assert check_mask_token(ModelFacts(40, 96, MASK, (EOS,), EOS)) == MASK


def test_all_refusals_are_one_family():
    for error in (EmptyPromptError, PromptTooLongError, PaddingError, MaskTokenError):
        assert issubclass(error, PromptError)
        assert issubclass(error, DllmCompileError)
        assert issubclass(error, ValueError)


def test_facts_from_a_configuration():
    config = {"vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096, "mask_token_id": 126336}
    facts = ModelFacts.from_config({**config, "eos_token_id": 126081, "pad_token_id": 126081})
    assert facts == ModelFacts(126464, 4096, 126336, (126081,), 126081)
    as_object = types.SimpleNamespace(vocab_size=100, embedding_size=128, eos_token_id=[5, 2, 5], mask_token_id=7)
    assert ModelFacts.from_config(as_object) == ModelFacts(128, None, 7, (5, 2), None)
    assert ModelFacts.from_config({"vocab_size": 9, "max_position_embeddings": 32}) == ModelFacts(9, 32, None)
    assert ModelFacts.from_config(as_object, mask_token_id=3, eos_token_id=4) == ModelFacts(128, None, 3, (4,), None)
    with pytest.raises(UnsupportedModelError, match="vocab_size"):
        ModelFacts.from_config({"mask_token_id": 3})
