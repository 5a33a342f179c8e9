# SPDX-License-Identifier: Apache-2.0
"""`generate` through real, uncompiled programs: the plain loop's tokens, whatever surrounds the call."""

from __future__ import annotations

import threading

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from tests.conftest import tiny_model
from tests.passes.pieces import Mini
from tests.real import RULES, assert_plain, model_logits, plain, prompts_of

SHORT = DecodingConfig(max_new_tokens=8, block_length=4)
VARIANTS = {
    "gqa": {},
    "everything": {
        "include_bias": True,
        "attention_layer_norm": True,
        "scale_logits": True,
        "input_emb_norm": True,
        "layer_norm_type": "gemma_rms",
        "weight_tying": True,
        "block_group_size": 2,
        "embedding_size": 136,
    },
    "mha": {"n_kv_heads": 4, "include_qkv_bias": True, "eos_token_id": 3, "pad_token_id": 5, "mask_token_id": 0},
}


@pytest.fixture(scope="module")
def fast():
    """Shared: do not change its weights."""
    return dllm_compile.optimize(tiny_model(), compile=False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [1, 8, 32])
def test_a_ragged_batch_equals_the_plain_loop(fast, rule, block_length):
    config = DecodingConfig(max_new_tokens=20, block_length=block_length, **RULES[rule])
    assert_plain(fast, prompts_of(5, 1, 12, 7, seed=block_length), config)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "seed": 3},
        {"cfg_scale": 1.5},
        {"cfg_scale": 0.5, "temperature": 1.0, "threshold": 0.3},
        {"remasking": "random"},
        {"logits_eos_inf": True, "steps": 4},
    ],
    ids="-".join,
)
def test_options_equal_the_plain_loop(fast, options):
    assert_plain(fast, prompts_of(6, 2, 9), SHORT.replace(**options))


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_equal_the_plain_loop(variant):
    model = dllm_compile.optimize(tiny_model(**VARIANTS[variant]), compile=False)
    prompts = [prompt + 6 for prompt in prompts_of(5, 1, 12, 7, vocab=100)]
    for rule in ("quota", "threshold"):
        assert_plain(model, prompts, DecodingConfig(max_new_tokens=10, block_length=8, **RULES[rule]))
    ids = torch.stack(prompts_of(10, 10))
    torch.testing.assert_close(model(ids).logits, model_logits(model.model, ids), rtol=1e-5, atol=1e-5)


def test_infilling(fast):
    prompts = prompts_of(8, 5)
    prompts[0][[2, 3, 6]] = fast.facts.mask_token_id
    assert_plain(fast, prompts, SHORT.replace(infill=True))


def test_a_batch_changes_no_tokens(fast):
    prompts = prompts_of(*range(1, 17))
    config = SHORT.replace(threshold=0.5)
    together = fast.generate(prompts, config)
    for i, prompt in enumerate(prompts):
        alone = fast.generate([prompt], config)
        assert torch.equal(alone.sequences[0], together.sequences[i, 16 - len(prompt) :])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_tensors_equal_ragged_lists(fast, side):
    prompts = prompts_of(4, 9, 6)
    ids, mask = torch.full((3, 9), 126), torch.zeros(3, 9, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        where = slice(9 - len(prompt), 9) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    padded = fast.generate(ids, SHORT, attention_mask=mask)
    assert torch.equal(padded.sequences, fast.generate(prompts, SHORT).sequences)


class Letters:
    """A tokenizer of single letters."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [100] * add_special_tokens + [ord(letter) - ord("a") for letter in text]}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids.tolist()))


def test_strings(fast):
    """Encoded as the tokenizer does by itself, special tokens included."""
    out = fast.generate(["abc", "z"], SHORT, tokenizer=Letters())
    same = fast.generate([[100, 0, 1, 2], [100, 25]], SHORT)
    assert torch.equal(out.sequences, same.sequences)
    assert out.texts == [" ".join(map(str, answer.tolist())) for answer in same.answers]
    assert same.texts is None
    assert torch.equal(
        fast.generate("abc", SHORT, tokenizer=Letters()).sequences, fast.generate([[100, 0, 1, 2]], SHORT).sequences
    )


# --- whatever surrounds the call ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "surround",
    [
        torch.inference_mode,
        torch.no_grad,
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference", "no_grad", "grad", "autocast"],
)
def test_surroundings_change_nothing(fast, surround):
    prompts, ids = prompts_of(6, 3), torch.stack(prompts_of(7, 7))
    expected, logits = fast.generate(prompts, SHORT).sequences, fast(ids).logits
    with surround():
        out = fast.generate(prompts, SHORT)
        again = fast(ids).logits
    assert torch.equal(out.sequences, expected)
    assert torch.equal(again, logits)
    assert not out.sequences.is_inference()
    assert not again.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(dtype):
    prompts = prompts_of(6, 3)
    model = tiny_model()
    expected = dllm_compile.optimize(tiny_model(), compile=False).generate(prompts, SHORT, temperature=0.7)
    torch.set_default_dtype(dtype)
    try:
        out = dllm_compile.optimize(model, compile=False).generate(prompts, SHORT, temperature=0.7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out.sequences, expected.sequences)


def test_optimize_in_inference_mode():
    model = tiny_model()
    with torch.inference_mode():
        fast = dllm_compile.optimize(model, compile=False)
    assert not any(p.is_inference() for p in model.parameters())
    assert_plain(fast, prompts_of(4), SHORT)
    model(torch.arange(5)[None]).logits.sum().backward()


def in_threads(*calls):
    """Results of `calls`, started together."""
    results, barrier = [None] * len(calls), threading.Barrier(len(calls))

    def run(i):
        barrier.wait()
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_and_several_models():
    """Two models, three threads each, programs built by whoever comes first: the same tokens as one after the other."""
    models = [dllm_compile.optimize(tiny_model(seed=seed), compile=False) for seed in (0, 5)]
    batches = [prompts_of(5, 2, seed=1), prompts_of(9, seed=2), prompts_of(1, 4, 7, seed=3)]
    configs = [SHORT, SHORT.replace(temperature=0.6), SHORT.replace(threshold=0.4)]
    cases = [(model, batch, config) for model in models for batch, config in zip(batches, configs, strict=True)]
    together = in_threads(*(lambda case=case: case[0].generate(case[1], case[2]).sequences for case in cases))
    for (model, batch, config), tokens in zip(cases, together, strict=True):
        assert torch.equal(tokens, model.generate(batch, config).sequences)
        width = max(map(len, batch))
        rows = [row[width - len(p) :].tolist() for row, p in zip(tokens, batch, strict=True)]
        assert rows == [one.canvas for one in plain(model, batch, config)]
    assert not torch.equal(together[0], together[3])


# --- the fallback for attentions that were refused ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rectangular_fallback(dtype):
    """In bf16 the low-precision rotation is refused; decoding goes on through the model's own attention."""
    source = tiny_model(dtype=dtype, rope_full_precision=False)
    model = dllm_compile.optimize(source, compile=None, strict=False)
    refused = dtype == torch.bfloat16
    report = model.report()
    attention = next(result for result in report.passes if result.name == "normalize_attention")
    assert (attention.matches, len(attention.refusals)) == ((0, 2) if refused else (2, 0))
    assert bool(report.notes) == refused
    ids = torch.stack(prompts_of(9, 9))
    if refused:
        assert "samples are computed one by one" in report.notes[0]
        assert "left as it was - normalize_attention: transformer.blocks.0" in str(report)
        expected = torch.cat([model_logits(source, row[None]) for row in ids])
        torch.testing.assert_close(model(ids).logits, expected, rtol=2e-2, atol=2e-2)
        prompts = prompts_of(5, 1, 12)
        for options in ({}, {"threshold": 0.5}, {"temperature": 0.5}, {"cfg_scale": 1.0}):
            out = model.generate(prompts, SHORT, **options)
            for i, prompt in enumerate(prompts):
                alone = model.generate([prompt], SHORT, seed=i, **options)
                assert torch.equal(alone.sequences[0], out.sequences[i, 12 - len(prompt) :])
        assert_plain(model, prompts, SHORT)


@pytest.mark.parametrize("attend", ["causal", "scaled", "doubled query"])
def test_rectangular_fallback_in_fp32_equals_the_plain_loop(attend):
    model = dllm_compile.optimize(Mini(attend=attend), strict=False, compile=False)
    prompts = prompts_of(5, 1, 9, vocab=38)
    for options in ({}, {"threshold": 0.3, "temperature": 0.5}, {"cfg_scale": 1.0}):
        assert_plain(model, prompts, SHORT.replace(eos_token_id=37, **options))


def test_a_partly_refused_model_decodes(fast):
    """One layer with tables of its own: the others are rewritten, decoding falls back."""
    model = dllm_compile.optimize(Mini(tables="own", layers=3), strict=False, compile=False)
    assert {p.name: p.matches for p in model.report().passes}["normalize_attention"] == 1
    assert_plain(model, prompts_of(5, 1, 9, vocab=38), SHORT)
