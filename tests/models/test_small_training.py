# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, rows, noise, optimizer and a few steps of training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dllm_compile.models.llada import LLaDAForMaskedDiffusion
from dllm_compile.models.small.dataset import RowBuilder, encode_rows
from dllm_compile.models.small.families import MAKERS
from dllm_compile.models.small.noise import noised
from dllm_compile.models.small.optimizer import MatrixMomentum, orthogonalised
from dllm_compile.models.small.problem import held_out, training
from dllm_compile.models.small.tokenizer import ANSWER_ID, BOS_ID, EOS_ID, MASK_ID, save_tokenizer
from dllm_compile.models.small.train import Settings, make_tokenizer, run

TINY = Settings(
    problems=200,
    batch=16,
    max_steps=60,
    warmup_steps=5,
    long_every=10,
    d_model=64,
    n_layers=2,
    n_heads=1,
    mlp_hidden_size=128,
    eval_problems=1,
    workers=2,
    compile=False,
)


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    return make_tokenizer(TINY).to_str()


def test_tokenizer_roundtrip_through_transformers(tmp_path: Path) -> None:
    trained = make_tokenizer(TINY)
    assert trained.get_vocab_size() <= TINY.vocab_size
    save_tokenizer(trained, tmp_path, 512)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (EOS_ID, EOS_ID)
    assert (loaded.mask_token_id, loaded.bos_token_id) == (MASK_ID, BOS_ID)
    texts = [text for family in MAKERS for p in held_out(family, 10) for text in (p.prompt, p.answer)]
    for text in [*texts, "Żółć 12 345\n\n    {x} ☂", " 7"]:
        ids = loaded(text)["input_ids"]
        assert (ids[0], ids[-1]) == (BOS_ID, ANSWER_ID)
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert loaded.encode(text, add_special_tokens=False) == ids[1:-1]
    chat = loaded.apply_chat_template([{"role": "user", "content": texts[0]}], tokenize=True, return_dict=False)
    assert chat == loaded(texts[0])["input_ids"]


def test_every_digit_is_a_token(tokenizer_json: str) -> None:
    from tokenizers import Tokenizer

    pieces = Tokenizer.from_str(tokenizer_json).encode("Tom has 1234 pens", add_special_tokens=False).tokens
    assert [piece.lstrip("Ġ") for piece in pieces if piece.lstrip("Ġ").isdigit()] == ["1", "2", "3", "4"]


def test_rows(tokenizer_json: str) -> None:
    rows, starts = encode_rows(tokenizer_json, "code", 30, 1, 96, 50)
    assert rows.shape == (30, 96)
    for row, start in zip(rows, starts, strict=True):
        assert row[0] == BOS_ID
        assert row[start - 1] == ANSWER_ID
        assert row[-1] == EOS_ID
        assert EOS_ID not in row[:start]
    short, _ = encode_rows(tokenizer_json, "code", 30, 1, 48, 10)
    assert 0 < len(short) < 30
    again = RowBuilder(tokenizer_json, {"code": 30, "prose": 5}, 0, 96, 50, workers=2, chunk=8).collect()
    other = RowBuilder(tokenizer_json, {"code": 30, "prose": 5}, 0, 96, 50, workers=1, chunk=8).collect()
    assert np.array_equal(again[0], other[0])
    assert np.array_equal(again[1], other[1])


@pytest.mark.parametrize("block_share", [0.0, 0.5, 1.0])
def test_noise(block_share: float) -> None:
    rows = torch.full((4000, 60), 9)
    rows[:, 45:] = EOS_ID
    starts = torch.full((4000,), 10)
    ids, weights = noised(rows, starts, torch.Generator().manual_seed(0), block_share)
    hidden = ids == MASK_ID
    assert not hidden[:, :10].any()
    assert torch.equal(ids[~hidden], rows[~hidden])
    assert not (weights[~hidden] != 0).any()
    # Each row's weights add up to 1/B in expectation.
    assert abs(float(weights.sum()) - 1) < 0.05
    if block_share == 0:
        assert torch.equal(weights != 0, hidden)
        assert abs(float(hidden[:, 10:].float().mean()) - 0.5) < 0.02
    if block_share == 1:
        # What is masked without counting is everything after the block: one run up to the end of the row.
        tail = hidden & (weights == 0)
        assert torch.equal(tail, tail.int().cummax(1).values.bool())
        assert 0.3 < float(tail[:, -1].float().mean()) < 0.9


def test_orthogonalised_and_momentum() -> None:
    stack = torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(stack).float())
    assert ((values > 0.6) & (values < 1.3)).all()
    assert torch.allclose(orthogonalised(stack.mT), orthogonalised(stack).mT, atol=2e-2)
    target = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    parameters = [torch.nn.Parameter(torch.zeros(8, 16)) for _ in range(2)]
    optimizer = MatrixMomentum(parameters, lr=0.2)
    losses = []
    for _ in range(60):
        loss = sum(((p - target) ** 2).mean() for p in parameters)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.3 * losses[0]


def test_training_lowers_the_loss_and_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(replace(TINY, max_steps=100), tmp_path)
    first, last = 6.9, result["training"]["loss"][-1][1]
    assert last < 0.75 * first
    assert json.loads((tmp_path / "training.json").read_text())["settings"]["max_steps"] == 100
    model = LLaDAForMaskedDiffusion.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.mask_token_id == MASK_ID
    assert {rule["threshold"] for rule in result["held_out"]["prose"]} == {None, 0.9, 0.7}
    assert "step 100" in capsys.readouterr().out


def test_streams_of_different_seeds_share_little() -> None:
    first = {p.prompt for p in training("arithmetic", 300, seed=0)}
    assert not first & {p.prompt for p in training("arithmetic", 300, seed=1)}
