# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be rewritten: `optimize` and `bisect` say why and what to do, and chain what happened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dllm_compile
from dllm_compile.errors import CaptureError, ReleasedWeightsError, UnsupportedModelError
from tests.conftest import tiny_model
from tests.passes.pieces import Mini
from tests.real import model_logits

PLAIN = dllm_compile.CompileConfig(compile=False)
CALLS = {
    "optimize": lambda model: dllm_compile.optimize(model, PLAIN),
    "bisect": lambda model: dllm_compile.bisect(model, [1, 2, 3], PLAIN, max_new_tokens=2),
}
both = pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))


class Changed(Mini):
    """Does something else with the logits, or instead of computing them."""

    def __init__(self, change) -> None:
        super().__init__(layers=1)
        self.change = change

    def forward(self, input_ids):
        return self.change(super().forward(input_ids))


def fail(error: BaseException):
    raise error


# --- what a forward returns -----------------------------------------------------------------------------------------

RETURNED = {
    "one position": (lambda z: z[:, 0], r"float32 of shape \(\d, 40\)"),
    "all at once": (lambda z: z[None], r"float32 of shape \(1, \d, \d+, 40\)"),
    "flat": (lambda z: z.flatten(0, 1), r"float32 of shape \(\d+, 40\)"),
    "one less": (lambda z: z[:, 1:], r"float32 of shape \(\d, \d+, 40\)"),
    "ids": (lambda z: z.argmax(-1), r"int64 of shape \(\d, \d+\)"),
    "integers": (lambda z: z.long(), r"int64 of shape \(\d, \d+, 40\)"),
    "sparse": (lambda z: z.to_sparse(), r"a tensor of layout torch\.sparse_coo"),
}


@both
@pytest.mark.parametrize(("change", "words"), list(RETURNED.values()), ids=list(RETURNED))
def test_what_are_no_logits(call, change, words):
    with pytest.raises(UnsupportedModelError, match=rf"Changed returns .*{words} .*\(batch, tokens, vocabulary\)"):
        call(Changed(change))


@both
@pytest.mark.parametrize("value", [None, 3, "logits", (), [], {"logits": 1}, SimpleNamespace(logits=None)], ids=str)
def test_no_logits(call, value):
    words = rf"returns {type(value).__name__} without logits: its forward must return them, .* as `\.logits`"
    with pytest.raises(CaptureError, match=words):
        call(Changed(lambda z: value))


class Fickle(Mini):
    """Returns something else while it is exported."""

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return logits[:, 0] if torch.compiler.is_exporting() else logits


def test_no_logits_in_the_graph():
    with pytest.raises(CaptureError, match="the captured graph returns no logits of 40 tokens"):
        dllm_compile.optimize(Fickle(layers=1), PLAIN)


# --- a forward that does not run ------------------------------------------------------------------------------------


class NoArgument(Mini):
    def forward(self):
        return None


class NamedOnly(Mini):
    def forward(self, *, input_ids):
        return super().forward(input_ids)


class More(Mini):
    def forward(self, input_ids, timestep):
        return super().forward(input_ids) * timestep


@both
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (NoArgument, TypeError),
        (NamedOnly, TypeError),
        (More, TypeError),
        (lambda: Changed(lambda z: fail(KeyError("lost"))), KeyError),
        (lambda: Changed(lambda z: fail(RuntimeError("several\nlines"))), RuntimeError),
        (lambda: Changed(lambda z: fail(AssertionError())), AssertionError),
        (lambda: Changed(lambda z: fail(StopIteration())), StopIteration),
        (lambda: Changed(lambda z: z @ z), RuntimeError),
    ],
    ids=[
        "no argument",
        "named only",
        "one more",
        "KeyError",
        "RuntimeError",
        "AssertionError",
        "StopIteration",
        "shapes",
    ],
)
def test_a_forward_that_does_not_run(call, make, cause):
    words = rf"does not run on input_ids of shape \(\d, \d+\), {cause.__name__}.*: its forward must take input_ids"
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        call(make())
    assert type(caught.value.__cause__) is cause
    assert "\n" not in str(caught.value)


@both
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ReleasedWeightsError("gone"), KeyboardInterrupt()])
def test_errors_that_are_no_fault_of_the_model_stay_what_they_are(call, error):
    with pytest.raises(type(error)) as caught:
        call(Changed(lambda z: fail(error)))
    assert caught.value is error


class SilentExport(Mini):
    """Cannot be exported, and does not say why."""

    def forward(self, input_ids):
        assert not torch.compiler.is_exporting()
        return super().forward(input_ids)


def test_an_export_that_fails_without_a_word():
    with pytest.raises(CaptureError, match="SilentExport could not be exported: AssertionError") as caught:
        dllm_compile.optimize(SilentExport(layers=1), PLAIN)
    assert caught.value.__cause__ is not None


# --- states of a model ----------------------------------------------------------------------------------------------


def inside(change):
    """The model with its inner module changed."""

    def make():
        model = tiny_model()
        model.model = change(model.model)
        return model

    return make


def in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


@both
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.compile(tiny_model()), r"pass the original model \(`model\._orig_mod`\)"),
        (inside(torch.compile), r"model\.model is the result of torch\.compile.*: put back `model\.model\._orig_mod`"),
        (
            lambda: in_place(tiny_model()),
            r"compiled in place \(model\.compile\(\)\).*`model\._compiled_call_impl = None`",
        ),
        (inside(in_place), r"compiled in place \(model\.model\.compile\(\)\)"),
        (lambda: tiny_model().to("meta"), "meta device: load its weights first"),
        (lambda: tiny_model().train(), r"train mode: call model\.eval\(\)"),
    ],
    ids=["compiled", "compiled inside", "compiled in place", "compiled in place inside", "meta", "train"],
)
def test_states_of_a_model(call, make, words):
    with pytest.raises(UnsupportedModelError, match=words):
        call(make())


def undone(model: nn.Module) -> nn.Module:
    model = in_place(model)
    model._compiled_call_impl = None
    return model


@pytest.mark.parametrize("undo", [lambda model: torch.compile(model)._orig_mod, undone], ids=["original", "in place"])
def test_what_the_message_says_works(undo):
    model, ids = undo(tiny_model()), torch.arange(5)[None]
    fast = dllm_compile.optimize(model, PLAIN)
    torch.testing.assert_close(fast(ids).logits, model_logits(model, ids), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize(
    "model", [None, "a path", 3, nn.Linear(1, 1).eval(), tiny_model, {}], ids=lambda m: type(m).__name__
)
def test_what_is_no_model(call, model):
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} has no \.config"):
        call(model)


def test_bisect_takes_modules_only():
    with pytest.raises(UnsupportedModelError, match=r"is no torch\.nn\.Module"):
        dllm_compile.bisect(SimpleNamespace(config={"vocab_size": 4}), [1], PLAIN)


REGISTER = {
    "full": lambda module: module.register_full_backward_hook(lambda *_: None),
    "pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}
HARMLESS = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "tensor": lambda module: next(module.parameters()).register_hook(lambda _: None),
}


@pytest.mark.parametrize("path", ["model.transformer.blocks.0", "model.transformer.ln_f"])
@pytest.mark.parametrize("register", list(REGISTER.values()), ids=list(REGISTER))
def test_backward_hooks_become_operators(register, path):
    model = tiny_model()
    handle = register(model.get_submodule(path))
    with pytest.raises(UnsupportedModelError, match=r"full backward hook.*handle\.remove\(\), and register it again"):
        dllm_compile.optimize(model, PLAIN)
    handle.remove()
    fast = dllm_compile.optimize(model, PLAIN)
    register(model.get_submodule(path))
    ids = torch.arange(5)[None]
    torch.testing.assert_close(fast(ids).logits, model_logits(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("register", "path"),
    [*((one, "") for one in REGISTER.values()), *((one, "model.transformer.blocks.0") for one in HARMLESS.values())],
    ids=[*REGISTER, *HARMLESS],
)
def test_hooks_that_change_nothing(register, path):
    """Of the whole model, which is called and not traced through; and those that leave no operator."""
    model = tiny_model()
    register(model.get_submodule(path))
    ids = torch.arange(5)[None]
    fast = dllm_compile.optimize(model, PLAIN)
    torch.testing.assert_close(fast(ids).logits, model_logits(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}, {"release": True, "precision": "fp8"}], ids=str)
@pytest.mark.parametrize(
    "model",
    [None, "path", SimpleNamespace(config=SimpleNamespace(vocab_size=7)), nn.ReLU()],
    ids=lambda m: type(m).__name__,
)
def test_what_is_no_model_is_refused_before_its_options(model, options):
    with pytest.raises(UnsupportedModelError, match=r"no torch\.nn\.Module with parameters; optimize needs a model"):
        dllm_compile.optimize(model, **options)
