# SPDX-License-Identifier: Apache-2.0
"""`optimize` and the user's model: nothing of it changes, and what the user changes is seen or refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import dllm_compile
from dllm_compile import acceptance
from dllm_compile.errors import (
    CertificateError,
    ConfigError,
    CopyError,
    PaddingError,
    PassError,
    PromptError,
    PromptTooLongError,
    StaleWeightsError,
    UnknownOptionError,
    UnsupportedModelError,
)
from dllm_compile.models import LLaDAForMaskedDiffusion
from tests.conftest import tiny_model
from tests.passes.pieces import Mini
from tests.real import assert_plain, model_logits, prompts_of

SHORT = dllm_compile.DecodingConfig(max_new_tokens=6, block_length=6)


@pytest.fixture(scope="module")
def fast():
    """Shared: tests must not change its weights."""
    return dllm_compile.optimize(tiny_model(), compile=False)


def own_fast(**changes):
    return dllm_compile.optimize(tiny_model(**changes), compile=False)


# --- the source model is untouched ----------------------------------------------------------------------------------


def flags():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "rng": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("grad", [True, False])
def test_the_source_model_and_the_process_are_untouched(grad, tmp_path):
    model = tiny_model(include_qkv_bias=True)
    parameters = {name: (id(p), p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: (id(b), b.clone()) for name, b in model.named_buffers()}
    modules = {
        name: (id(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    }
    config, state = json.dumps(model.config.to_dict()), list(model.state_dict())
    forward, ids = type(model).forward, torch.arange(12)[None]
    logits = model_logits(model, ids)
    with torch.set_grad_enabled(grad):
        before = flags()
        fast = dllm_compile.optimize(model, compile=False)
        fast.generate([[3, 4, 5], [7]], SHORT, temperature=0.5)
        fast(ids)
        fast.report()
        assert flags() == before
    assert {name: id(p) for name, p in model.named_parameters()} == {n: one[0] for n, one in parameters.items()}
    for name, p in model.named_parameters():
        assert torch.equal(p, parameters[name][1])
        assert p.requires_grad == parameters[name][2]
        assert p.grad is None
        assert p.is_leaf
    assert {name: id(b) for name, b in model.named_buffers()} == {n: one[0] for n, one in buffers.items()}
    assert all(torch.equal(b, buffers[name][1]) for name, b in model.named_buffers())
    after = {
        name: (id(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    }
    assert after == modules
    assert type(model).forward is forward
    assert "forward" not in vars(model)
    assert (json.dumps(model.config.to_dict()), list(model.state_dict())) == (config, state)
    assert torch.equal(model_logits(model, ids), logits)
    model.save_pretrained(tmp_path)
    again = LLaDAForMaskedDiffusion.from_pretrained(tmp_path)
    for name, p in again.named_parameters():
        assert torch.equal(p, parameters[name][1])
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    weights = sum(p.nbytes for p in model.parameters())
    assert files < 1.1 * weights + 20_000, "views are saved, not the whole packed tensor with each of them"


def test_memory_is_not_doubled():
    model = tiny_model(d_model=128, mlp_hidden_size=256)

    def unique(tensors) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    before = unique([*model.parameters(), *model.buffers()])
    fast = dllm_compile.optimize(model, compile=False)
    fast.generate([[3, 4, 5]], SHORT)
    graphs = [fast._captured.gm, *(program.gm for program in fast.programs.built)]
    tensors = [t for gm in graphs for t in (*gm.parameters(), *gm.buffers())]
    assert unique([*model.parameters(), *model.buffers(), *tensors]) == before


def test_state_dict_loads_into_a_fresh_model():
    fast = own_fast()
    fresh = tiny_model(seed=7)
    fresh.load_state_dict(fast.model.state_dict())
    ids = torch.arange(9)[None]
    assert torch.equal(model_logits(fresh, ids), model_logits(fast.model, ids))


@pytest.mark.parametrize(
    ("options", "error"),
    [({"disable": ("no_such_pass",)}, ConfigError), ({"no_such_option": 1}, UnknownOptionError)],
)
def test_unknown_names(options, error):
    name = "no_such"
    with pytest.raises(error, match=name) as caught:
        dllm_compile.optimize(tiny_model(), **options)
    assert "pack_qkv" in str(caught.value) or "disable" in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"compile": False}, "fast", SHORT, dllm_compile.CompileConfig], ids=str)
def test_another_type_of_configuration_in_optimize(config):
    with pytest.raises(ConfigError, match=r"config must be a CompileConfig, not a .*optimize\(model, compile=False\)"):
        dllm_compile.optimize(tiny_model(), config)


@pytest.mark.parametrize("config", [{}, torch.ones(1, 3), 16, dllm_compile.CompileConfig()], ids=str)
def test_another_type_of_configuration_in_generate(fast, config):
    with pytest.raises(ConfigError, match=r"config must be a DecodingConfig, not a .*max_new_tokens=64"):
        fast.generate([[3, 4, 5]], config)


def test_an_optimized_model_is_not_optimized_again(fast):
    with pytest.raises(UnsupportedModelError, match=r"optimized already: pass the original, `fast\.model`"):
        dllm_compile.optimize(fast)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda fast: copy.deepcopy([fast])],
    ids=["copy", "deepcopy", "pickle", "inside a list"],
)
def test_copies_are_refused(fast, duplicate):
    with pytest.raises(CopyError, match=r"copy or save `fast\.model` and call optimize again") as caught:
        duplicate(fast)
    assert isinstance(caught.value, TypeError)


def test_the_original_can_be_copied():
    fast = own_fast()
    again = dllm_compile.optimize(copy.deepcopy(fast.model), compile=False)
    assert torch.equal(again.generate([[3, 4]], SHORT).sequences, fast.generate([[3, 4]], SHORT).sequences)


def test_train_mode_does_not_reach_the_model():
    fast = own_fast()
    with pytest.raises(UnsupportedModelError, match=r"fast\.model\.train\(\)"):
        fast.train()
    assert not any(module.training for module in fast.modules())
    assert fast.eval() is fast
    fast.model.train()
    assert fast.train(False) is fast
    assert not fast.training
    assert all(module.training for module in fast.model.modules()), "the model stays in the mode it is in"


def test_a_later_optimize_that_packs_more():
    model = tiny_model()
    first = dllm_compile.optimize(model, compile=False, disable=("pack_qkv", "pack_gate_up"))
    second = dllm_compile.optimize(model, compile=False)
    with pytest.raises(StaleWeightsError, match=r"later optimize\(\) of the same model"):
        first.generate([[3, 4]], SHORT)
    assert_plain(second, prompts_of(4), SHORT)


def test_a_model_without_config():
    model = Mini(layers=1)
    del model.config
    with pytest.raises(UnsupportedModelError, match=r"Mini has no \.config"):
        dllm_compile.optimize(model)
    model.config = SimpleNamespace()
    with pytest.raises(UnsupportedModelError, match="neither vocab_size nor embedding_size"):
        dllm_compile.optimize(model)


def test_a_pass_that_falls_short_leaves_the_model_as_it_was():
    model = Mini(ffn_kind="chunked")
    places = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    with pytest.raises(PassError, match="normalize_swiglu rewrote 0 of 2 regions"):
        dllm_compile.optimize(model, compile=False)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == places


def test_the_last_certificate(monkeypatch):
    """A rewritten graph that computes something else is never handed out."""
    real = acceptance.ModelPrograms.forward
    for scale, refused in ((1 + 1e-3, True), (1 + 1e-7, False)):
        wrong = lambda self, scale=scale, **rows: real(self, **rows) * scale  # noqa: E731
        monkeypatch.setattr(acceptance.ModelPrograms, "forward", wrong)
        if refused:
            with pytest.raises(CertificateError, match=r"differ from LLaDAModel's by \d.* more than rounding explains"):
                dllm_compile.optimize(tiny_model(), compile=False)
        else:
            dllm_compile.optimize(tiny_model(), compile=False)


def test_logits_are_compared_where_no_length_is_stated():
    fast = dllm_compile.optimize(tiny_model(), compile=False)
    facts = dataclasses.replace(fast.facts, max_sequence_length=None)
    assert acceptance.accept_logits(fast._captured, facts) <= 1e-5


def test_rounding_noise_is_of_the_size_of_the_models_own_error():
    """The noise that is held against a difference: near what fp32 itself is away from fp64, far below an error."""
    model = tiny_model(d_model=256, n_heads=2, n_kv_heads=1)
    fast = dllm_compile.optimize(model, compile=False)
    ids = torch.randint(0, 60, (13,), generator=torch.Generator().manual_seed(0))
    rows = {"ids": ids, "positions": torch.arange(13), "tiles": torch.tensor([[0, 13, 0, 13]], dtype=torch.int32)}
    with torch.no_grad():
        truth = tiny_model(d_model=256, n_heads=2, n_kv_heads=1).double()(ids[None]).logits[0]
        noise = acceptance.rounding_noise(fast.programs.forward_program().gm, rows)
        logits = fast.programs.forward(**rows)
    own = ((logits.double() - truth).abs().max() / truth.abs().max()).item()
    assert own / 10 < noise < own * 10


# --- the user changes the weights -----------------------------------------------------------------------------------


def test_updates_in_place_are_seen():
    fast = own_fast()
    ids, prompts = torch.arange(11)[None], prompts_of(4, 7)
    first = fast.generate(prompts, SHORT).sequences
    with torch.no_grad():
        for p in fast.model.parameters():
            p.mul_(0.7).add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    torch.testing.assert_close(fast(ids).logits, model_logits(fast.model, ids), rtol=1e-5, atol=1e-5)
    assert not torch.equal(assert_plain(fast, prompts, SHORT).sequences, first)
    fast.model.load_state_dict(tiny_model(seed=9).state_dict())
    torch.testing.assert_close(fast(ids).logits, model_logits(fast.model, ids), rtol=1e-5, atol=1e-5)


def replaced(model):
    model.model.transformer["ln_f"].weight = nn.Parameter(torch.ones(64))


def assigned(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replaced, assigned, lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_replaced_parameters_are_refused(change):
    fast = own_fast()
    change(fast.model)
    for call in (lambda: fast.generate([[3, 4]], SHORT), lambda: fast(torch.arange(4)[None])):
        with pytest.raises(StaleWeightsError, match="replaced, moved or converted after optimize"):
            call()


def test_training_goes_on():
    """Backward and optimizer steps work on packed parameters, and the next call sees the new weights."""
    fast = own_fast()
    model, twin = fast.model, tiny_model()
    ids = torch.randint(0, 120, (2, 10), generator=torch.Generator().manual_seed(0))
    prompts = prompts_of(5, 3)
    before = fast.generate(prompts, SHORT).sequences
    for one in (model, twin):
        one.train()
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(one(ids).logits.flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        one.eval()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{name} was trained differently"
        assert ours.grad.shape == ours.shape
    assert not torch.equal(assert_plain(fast, prompts, SHORT).sequences, before)


# --- forward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_with_padding_equals_unpadded(fast, side):
    prompts = prompts_of(9, 1, 14)
    ids, mask = torch.full((3, 16), 126), torch.zeros(3, 16, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        where = slice(16 - len(prompt), 16) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    logits = fast(ids, attention_mask=mask).logits
    assert logits.shape == (3, 16, 128)
    assert (logits[mask == 0] == 0).all()
    for row, prompt in enumerate(prompts):
        expected = model_logits(fast.model, prompt[None])[0]
        torch.testing.assert_close(logits[row][mask[row] == 1], expected, rtol=1e-5, atol=1e-5)
    garbage = torch.where(mask == 1, ids, 3)
    assert torch.equal(fast(garbage, attention_mask=mask).logits, logits)


def test_forward_without_padding(fast):
    ids = torch.stack(prompts_of(13, 13))
    expected = model_logits(fast.model, ids)
    torch.testing.assert_close(fast(ids).logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast(ids, torch.ones_like(ids)).logits, expected, rtol=1e-5, atol=1e-5)
    one = torch.tensor([[5]])
    torch.testing.assert_close(fast(one).logits, model_logits(fast.model, one), rtol=1e-5, atol=1e-5)


def test_an_empty_row_in_forward(fast):
    ids = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    logits = fast(ids, mask).logits
    assert torch.isfinite(logits).all()
    assert (logits[1] == 0).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1, 1]], "padding stands between tokens"),
        ([[0, 1, 0, 1]], "padding stands between tokens"),
        ([[1, 1, 1]], "must be equal"),
        ([[0, 0, 0, 0]], "hides every token"),
    ],
)
def test_masks_that_are_refused(fast, mask, message):
    with pytest.raises(PaddingError, match=message):
        fast(torch.zeros(1, 4, dtype=torch.int64), torch.tensor(mask))


def test_max_sequence_length(fast):
    limit = fast.facts.max_sequence_length
    ids = torch.randint(0, 120, (1, limit + 1), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        fast(ids[:, :limit]).logits, model_logits(fast.model, ids[:, :limit]), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(PromptTooLongError, match=f"129 tokens, more than max_sequence_length={limit}"):
        fast(ids)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    assert fast(ids, mask).logits.shape[1] == limit + 1, "padding does not count"
    assert_plain(fast, [ids[0, : limit - 6]], SHORT)
    with pytest.raises(PromptTooLongError):
        fast.generate(ids[:, : limit - 5], SHORT)


def test_generate_needs_prompts(fast):
    with pytest.raises(PromptError, match="generate needs prompts"):
        fast.generate()
    with pytest.raises(PromptError, match="pass tokenizer="):
        fast.generate("a question")


def test_what_a_tokenizer_returns_is_a_prompt(fast):
    """`generate(tokenizer(texts))` and `generate(**tokenizer(texts))`, ragged or padded."""
    ragged = {"input_ids": [[3, 4, 5], [7]], "attention_mask": [[1, 1, 1], [1]], "token_type_ids": [[0, 0, 0], [0]]}
    padded = {"input_ids": torch.tensor([[3, 4, 5], [9, 9, 7]]), "attention_mask": torch.tensor([[1] * 3, [0, 0, 1]])}
    expected = fast.generate([[3, 4, 5], [7]], SHORT).sequences
    for form in (ragged, padded, {"input_ids": ragged["input_ids"]}):
        for given in (form, BatchEncoding(form)):
            assert torch.equal(fast.generate(given, SHORT).sequences, expected)
    for form in (ragged, padded):
        keywords = {name: form[name] for name in ("input_ids", "attention_mask")}
        assert torch.equal(fast.generate(config=SHORT, **keywords).sequences, expected)
    one = BatchEncoding({"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1]})
    assert torch.equal(fast.generate(one, SHORT).sequences, fast.generate([[3, 4, 5]], SHORT).sequences)


def test_the_call_a_newcomer_makes(small_fast, small_tokenizer):
    texts = ["Tom has 3 pens.", "Ana has 12 eggs. Ana loses 5."]
    expected = small_fast.generate(texts, SHORT, tokenizer=small_tokenizer)
    out = small_fast.generate(small_tokenizer(texts), SHORT, tokenizer=small_tokenizer)
    assert torch.equal(out.sequences, expected.sequences)
    assert out.texts == expected.texts
    out = small_fast.generate(**small_tokenizer(texts, padding=True, return_tensors="pt"), config=SHORT)
    assert torch.equal(out.sequences, expected.sequences)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["text", [3, 4]], {"tokenizer": len}, r"mix strings and others \(prompt 1 is a list\)"),
        ([[3, 4], "text"], {}, r"mix strings and others \(prompt 0 is a list\)"),
        ([torch.tensor([3]), "text"], {}, r"prompt 0 is a Tensor"),
        ({"ids": [[3]]}, {}, "a dict without input_ids"),
        ([{"role": "user", "content": "hi"}], {}, "apply_chat_template"),
        ({"input_ids": [[3]], "attention_mask": [[1]]}, {"attention_mask": [[1]]}, "given twice"),
        ("text", {"tokenizer": len, "attention_mask": [[1]]}, "leave attention_mask out"),
        (5, {}, "is a int"),
        ({3, 4}, {}, "is a set"),
    ],
    ids=str,
)
def test_what_is_no_prompt(fast, prompts, options, message):
    with pytest.raises(PromptError, match=message):
        fast.generate(prompts, SHORT, **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(5), "must be a"),
        (torch.zeros(1, 4), "must hold integer token ids, not torch.float32"),
        (torch.zeros(0, 4, dtype=torch.int64), "must be a"),
        (torch.tensor([[1, 10_000]]), "outside the vocabulary"),
        (torch.tensor([[1, -1]]), "outside the vocabulary"),
    ],
    ids=["one dimension", "floats", "empty", "beyond", "negative"],
)
def test_forward_says_what_is_wrong_with_ids(ids, message):
    with pytest.raises(PromptError, match=message):
        own_fast()(ids)


def test_forward_takes_other_integers():
    fast, ids = own_fast(), torch.arange(6)[None]
    assert torch.equal(fast(ids.int()).logits, fast(ids).logits)


def test_the_rotary_tables_bound_the_length():
    """A configuration that states no length: positions beyond the tables would be read from nowhere."""
    model = tiny_model()
    rows = model.config.max_sequence_length
    model.config = model.config.to_dict() | {"max_sequence_length": None}
    fast = dllm_compile.optimize(model, compile=False)
    assert fast.facts.max_sequence_length == rows
    with pytest.raises(PromptTooLongError, match=str(rows)):
        fast.generate([[3] * rows], max_new_tokens=1)


@pytest.mark.parametrize("length", [2, 6])
def test_models_too_short_to_certify_are_refused(length):
    model = tiny_model(max_sequence_length=length)
    with pytest.raises(UnsupportedModelError, match="it must be 7 or more"):
        dllm_compile.optimize(model, compile=False)
