# SPDX-License-Identifier: Apache-2.0
"""Arguments of a kind that cannot be used: refused by the package's own errors, before anything is computed."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.streamers import TextStreamer

import dllm_compile
from dllm_compile.errors import ConfigError, EmptyPromptError, PaddingError, PromptError, PromptTooLongError
from dllm_compile.runtime.streamers import CanvasStreamer
from tests.conftest import tiny_model
from tests.real import prompts_of

SHORT = dllm_compile.DecodingConfig(max_new_tokens=4, block_length=4)
IDS = torch.tensor([[3, 4, 5, 6]])
ONES = torch.ones(1, 4, dtype=torch.int64)
BEYOND = 2**63 + 5


@pytest.fixture(scope="module")
def fast():
    return dllm_compile.optimize(tiny_model(), compile=False)


@pytest.fixture
def idle(fast, monkeypatch):
    """The model, which must not be asked to compute anything."""

    def refuse(*_, **__):
        pytest.fail("a step was computed")

    monkeypatch.setattr("dllm_compile.runtime.session.Session.step", refuse)
    monkeypatch.setattr("dllm_compile.runtime.session.Session.rehearse", refuse)
    return fast


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def quantized(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values.float(), 1.0, 0, torch.quint8)


def nested(values: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor(list(values), layout=layout)


# Tensors that hold no plain numbers, whatever they stand for; the words that say so.
UNREADABLE = {
    "on meta": (lambda one: one.to("meta"), "meta device holds no numbers, pass one with data"),
    "coo": (lambda one: one.to_sparse(), r"sparse_coo cannot be read, pass its \.to_dense\(\)"),
    "csr": (lambda one: one.to_sparse_csr(), r"sparse_csr cannot be read, pass its \.to_dense\(\)"),
    "quantized": (quantized, "pass plain integers"),
}
NESTED = {
    "nested": (lambda one: nested(one, torch.strided), "pass a padded one and its mask"),
    "jagged": (lambda one: nested(one, torch.jagged), "pass a padded one and its mask"),
}
WIDE = torch.tensor([[3, BEYOND]], dtype=torch.uint64)


def kind(one: object) -> str:
    return f"class {one.__name__}" if isinstance(one, type) else type(one).__name__


def cases(table):
    return pytest.mark.parametrize(("make", "message"), list(table.values()), ids=list(table))


# --- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[[1, 2]], None, "text", 5, {"input_ids": [[1]]}, IDS.numpy()], ids=kind)
def test_forward_takes_a_tensor(fast, ids):
    with pytest.raises(PromptError, match=rf"must be a \(B, T\) tensor of token ids, not a {type(ids).__name__}: "):
        fast(ids)


@cases(UNREADABLE | NESTED)
def test_ids_that_cannot_be_read_in_forward(fast, make, message):
    with pytest.raises(PromptError, match=message):
        fast(make(IDS))


@cases(UNREADABLE)
def test_ids_that_cannot_be_read_in_generate(idle, make, message):
    for prompts in (make(IDS), [make(IDS)], {"input_ids": make(IDS)}):
        with pytest.raises(PromptError, match=message):
            idle.generate(prompts, SHORT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_ids_that_are_no_integers(idle, dtype):
    for call in (idle, lambda ids: idle.generate(ids, SHORT)):
        with pytest.raises(PromptError, match=str(dtype)):
            call(IDS.to(dtype))


@pytest.mark.parametrize(
    "dtype",
    [getattr(torch, name) for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64")],
    ids=str,
)
def test_every_integer_dtype(fast, dtype):
    assert torch.equal(fast(IDS.to(dtype)).logits, fast(IDS).logits)
    assert torch.equal(fast.generate(IDS.to(dtype), SHORT).sequences, fast.generate(IDS, SHORT).sequences)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (WIDE, BEYOND),
        ([[3, BEYOND]], BEYOND),
        ([3, BEYOND], BEYOND),
        ([[1], [3, 2**70]], 2**70),
        ([[-(2**70)]], -(2**70)),
        (torch.tensor([[3, 2**62]]), 2**62),
        (torch.tensor([[3, -7]]), -7),
    ],
    ids=str,
)
def test_an_id_outside_is_named_as_it_was_given(idle, ids, named):
    """Also one that int64 cannot hold."""
    generate = lambda ids: idle.generate(ids, SHORT)  # noqa: E731
    calls = (idle, generate) if isinstance(ids, torch.Tensor) else (generate,)
    for call in calls:
        with pytest.raises(PromptError, match=rf"id {named}, outside|hold {named}, outside"):
            call(ids)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_a_list_of_prompts(fast, layout):
    prompts = prompts_of(5, 2)
    expected = fast.generate(prompts, SHORT).sequences
    together = torch.nested.nested_tensor(prompts, layout=layout)
    assert torch.equal(fast.generate(together, SHORT).sequences, expected)
    mask = torch.nested.nested_tensor([torch.ones(5), torch.ones(2)], layout=layout)
    assert torch.equal(fast.generate(together, SHORT, attention_mask=mask).sequences, expected)


# --- masks ----------------------------------------------------------------------------------------------------------


@cases(UNREADABLE)
def test_masks_that_cannot_be_read(idle, make, message):
    for call in (idle, lambda ids, mask: idle.generate(ids, SHORT, attention_mask=mask)):
        with pytest.raises(PaddingError, match=message):
            call(IDS, make(ONES))


@cases(NESTED)
def test_nested_masks_in_forward(fast, make, message):
    with pytest.raises(PaddingError, match=message):
        fast(IDS, make(ONES))


@pytest.mark.parametrize("mask", ["x", b"1111", [[1], [1, 1]], [None] * 4, {"a": 1}], ids=str)
def test_masks_that_are_no_table(idle, mask):
    for call in (idle, lambda ids, mask: idle.generate(ids, SHORT, attention_mask=mask)):
        with pytest.raises(PaddingError, match="rectangular: give one number, 1 or 0, for each id"):
            call(IDS, mask)


@pytest.mark.parametrize("mask", [5, [[1, 1, 1, 2]], torch.full((1, 4), -torch.inf), [[float("nan")] * 4]], ids=str)
def test_masks_of_other_values(idle, mask):
    for call in (idle, lambda ids, mask: idle.generate(ids, SHORT, attention_mask=mask)):
        with pytest.raises(PaddingError, match="values other than 0 and 1"):
            call(IDS, mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64, torch.float32], ids=str)
def test_masks_of_every_dtype(fast, dtype):
    mask = torch.tensor([[0, 1, 1, 1]])
    assert torch.equal(fast(IDS, mask.to(dtype)).logits, fast(IDS, mask).logits)


# --- lengths of a warm-up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        [-1],
        [4, -2],
        "ab",
        ["4"],
        b"ab",
        3,
        None,
        [1.5],
        [True],
        [[1, 2]],
        [None],
        {4: 1},
        torch.tensor(4),
        torch.ones(2),
    ],
    ids=str,
)
def test_what_is_no_list_of_lengths(idle, lengths):
    with pytest.raises(PromptError, match=r"prompt_lengths must be a list .* as in \[768\], not "):
        idle.warm_up(lengths, SHORT)


@pytest.mark.parametrize(
    ("lengths", "error"),
    [([], PromptError), ([4, 0], EmptyPromptError), ([10**13], PromptTooLongError), ([2**70], PromptTooLongError)],
    ids=str,
)
def test_lengths_that_no_prompt_may_have(idle, lengths, error):
    """Nothing of that length is made to find it out."""
    with pytest.raises(error):
        idle.warm_up(lengths, SHORT)


@pytest.mark.parametrize(
    "lengths", [[4, 2], (4,), range(3, 5), {4}, torch.tensor([4]), torch.tensor([4, 2]).numpy()], ids=str
)
def test_lists_of_lengths(fast, lengths):
    assert fast.warm_up(lengths, SHORT).seconds > 0


# --- who looks on ---------------------------------------------------------------------------------------------------


class Shown:
    """A whole streamer."""

    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value)

    def end(self):
        self.seen.append(None)


class NoEnd:
    put = Shown.put


class NoPut:
    end = Shown.end


class BrokenDraft(Shown):
    put_draft = 3


@pytest.mark.parametrize(
    "bad", ["x", 5, True, None, object(), NoEnd(), NoPut(), BrokenDraft(), Shown, TextStreamer], ids=kind
)
def test_what_is_no_streamer(idle, bad):
    words = r"streamer must be an object with put\(tokens\) and end\(\), such as CanvasStreamer\(tokenizer\), not "
    good = Shown()
    with pytest.raises(ConfigError, match=words):
        idle.generate([[3], [4]], SHORT, streamer=[good, bad])
    assert not good.seen, "the others are handed nothing"
    if bad is not None:
        with pytest.raises(ConfigError, match=words):
            idle.generate([3], SHORT, streamer=bad)


class Encodes:
    """A tokenizer without `decode`."""

    def __call__(self, text):
        return {"input_ids": [3, 4]}


class Whole(Encodes):
    def decode(self, ids, **_):
        return "".join(map(chr, ids))


class Returns(Whole):
    def __init__(self, value):
        self.value = value

    def __call__(self, text):
        return self.value


class Broken(Whole):
    """Its own mistake, which is not ours to name."""

    def __call__(self, text):
        raise KeyError("merges")


class OnlyDecodes:
    decode = Whole.decode


@pytest.mark.parametrize("bad", [5, "x", True, object(), Encodes(), len, Whole], ids=kind)
def test_a_tokenizer_that_does_not_decode(idle, bad):
    with pytest.raises(ConfigError, match=r"tokenizer must be an object with decode\(ids\), not "):
        idle.generate([3, 4], SHORT, tokenizer=bad)
    with pytest.raises(ConfigError, match=r"CanvasStreamer takes the model's tokenizer, an object with decode\(ids\)"):
        CanvasStreamer(bad)


def test_a_tokenizer_that_only_encodes(idle):
    with pytest.raises(ConfigError, match="tokenizer must be an object with decode"):
        idle.generate("text", SHORT, tokenizer=Encodes())


@pytest.mark.parametrize("bad", [5, "x", object(), OnlyDecodes(), Whole], ids=kind)
def test_a_tokenizer_that_cannot_be_called(idle, bad):
    with pytest.raises(ConfigError, match="tokenizer must be an object that is called with a text, not "):
        idle.generate("text", SHORT, tokenizer=bad)


@pytest.mark.parametrize("value", [[3, 4], None, 5, {"ids": [3]}, "text"], ids=str)
def test_a_tokenizer_that_returns_no_ids(idle, value):
    words = rf'must return a mapping with "input_ids", and it returned a {type(value).__name__}'
    with pytest.raises(ConfigError, match=words) as caught:
        idle.generate(["text"], SHORT, tokenizer=Returns(value))
    assert caught.value.__cause__ is not None


def test_errors_of_a_tokenizer_are_its_own(idle):
    with pytest.raises(KeyError, match="merges"):
        idle.generate("text", SHORT, tokenizer=Broken())
    with pytest.raises(PromptError):
        idle.generate("text", SHORT, tokenizer=Returns({"input_ids": None}))


def test_a_whole_tokenizer(fast):
    output = fast.generate("text", SHORT, tokenizer=Whole())
    assert output.texts == ["".join(map(chr, output.answers[0]))]


@pytest.mark.parametrize("bad", [5, True, False, "x", []], ids=str)
def test_cancelled_is_asked(idle, bad):
    with pytest.raises(ConfigError, match="cancelled must be a function .* such as an event's is_set, not "):
        idle.generate([3, 4], SHORT, cancelled=bad)
