# SPDX-License-Identifier: Apache-2.0
"""Capture: counts as formulas of N, identity of parameters, and every refusal with its reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dllm_compile.capture import capture
from dllm_compile.errors import CaptureError, DeviceMismatchError, UnsupportedModelError
from dllm_compile.passes import NORMALIZE, run_passes
from dllm_compile.passes.graph import check_metadata, operator_counts, output_node, placeholders
from dllm_compile.refusals import logits_of
from tests.conftest import tiny_model
from tests.passes.pieces import LENGTH, Mini, assert_same, capture_mini, listing


def assert_counts(gm, layers: int) -> None:
    counts = operator_counts(gm)
    assert counts["aten.scaled_dot_product_attention"] == layers
    assert counts["aten.silu"] == layers
    assert counts["aten.rsqrt"] == counts["aten.mean"] == counts["aten.pow"] == 2 * layers + 1
    assert counts["aten.linear"] == 7 * layers + 1
    assert counts["aten.embedding"] == 1
    assert counts["aten._to_copy"] == 0, "fp32: no-op casts are gone"
    assert counts["aten._assert_tensor_metadata"] == counts["aten.clone"] == 0


def test_small_model():
    model = tiny_model()
    captured = capture(model, 128, 128)
    gm = captured.gm
    assert captured.layers == 2
    assert_counts(gm, 2)
    assert [node.name for node in placeholders(gm)] == ["input_ids"]
    assert len(output_node(gm).args) == 1
    assert not gm._forward_pre_hooks
    assert not [node for node in gm.graph.nodes if node.op == "call_module"]
    check_metadata(gm, "test")
    assert_same(gm, model)
    with torch.no_grad():
        assert gm(torch.zeros(1, 128, dtype=torch.int64)).shape == (1, 128, 128)


@pytest.mark.slow
def test_random_model_of_32_layers():
    """The depth of the 8B model: counts, canonical counts and values, in one export (it takes half a minute)."""
    layers = 32
    model = tiny_model(
        n_layers=layers, d_model=32, n_heads=4, n_kv_heads=2, mlp_hidden_size=48, max_sequence_length=LENGTH
    )
    captured = capture(model, LENGTH, model.config.vocab_size)
    assert captured.layers == layers
    assert_counts(captured.gm, layers)
    results = run_passes(captured.gm, NORMALIZE, layers=layers)
    assert [result.matches for result in results] == [2 * layers + 1, layers, layers, 1, 1]
    assert all(result.error == 0.0 for result in results[:3])
    counts = operator_counts(captured.gm)
    assert counts["dllm.rms_norm"] == 2 * layers + 1
    assert counts["dllm.attention"] == counts["dllm.swiglu"] == layers
    assert counts["dllm.rope"] == 2 * layers
    assert counts["aten.linear"] + counts["dllm.head"] == 7 * layers + 1 == 225
    assert_same(captured.gm, model)


def test_bfloat16_counts():
    gm = capture(tiny_model(dtype=torch.bfloat16), 128, 128).gm
    counts = operator_counts(gm)
    # Two casts for each of 2N + 1 norms, two to fp32 before each rotation.
    assert counts["aten._to_copy"] == 6 * 2 + 2
    assert counts["aten.linear"] == 15


# --- what is captured -----------------------------------------------------------------------------------------------


def test_the_inner_model_is_captured_and_parameters_are_the_same_objects():
    model = tiny_model()
    captured = capture(model, 128, 128)
    assert captured.source is model.model
    assert captured.prefix == "model."
    theirs = {name: id(p) for name, p in model.named_parameters()}
    ours = {captured.prefix + name: id(p) for name, p in captured.gm.named_parameters()}
    assert ours == theirs


def test_the_inner_model_alone():
    model = tiny_model().model
    captured = capture(model, 128, 128)
    assert captured.source is model
    assert captured.prefix == ""
    assert {id(p) for p in captured.gm.parameters()} == {id(p) for p in model.parameters()}


class Wrapper(nn.Module):
    """Owns no parameter, and yet changes the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        return logits_of(self.model(input_ids)) * 2


def test_a_wrapper_that_changes_the_logits_is_captured_itself():
    model = Wrapper(Mini(layers=1))
    captured = capture_mini(model)
    assert captured.source is model
    assert captured.prefix == ""
    assert_same(captured.gm, model)


class Other(nn.Module):
    """Its inner module returns hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(40, 40), nn.Linear(40, 40))
        self.config = SimpleNamespace(vocab_size=40)
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids).flip(-1)


def test_an_inner_module_with_other_outputs_of_the_same_shape():
    model = Other()
    captured = capture_mini(model)
    assert captured.source is model
    assert_same(captured.gm, model)


@pytest.mark.parametrize("length", [2, 3, 15])
def test_short_models_and_small_vocabularies(length):
    model = tiny_model(max_sequence_length=length, vocab_size=7, mask_token_id=6, eos_token_id=None, pad_token_id=None)
    captured = capture(model, length, 7)
    ids = torch.arange(length)[None] % 7
    with torch.no_grad():
        assert torch.equal(captured.gm(ids), model(ids).logits)


def test_dropout_leaves_no_copies():
    model = tiny_model(residual_dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
    assert operator_counts(capture(model, 128, 128).gm)["aten.clone"] == 0


class WithDropout(Mini):
    """Dropout between the layers, as in the remote code; a copy each in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.dropout(self.wte(input_ids))
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


def test_clones_of_dropout_are_removed():
    model = WithDropout()
    gm = capture_mini(model).gm
    assert operator_counts(gm)["aten.clone"] == 0
    assert_same(gm, model)


class Tuple(Mini):
    """Hidden states and logits in a tuple, the logits first."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(input_ids)
        return logits, self.wte(input_ids)


def test_the_logits_of_a_tuple():
    model = Tuple(layers=1)
    gm = capture_mini(model).gm
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(gm(ids), model(ids)[0])


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        capture(model, LENGTH, 40)


def test_train_mode():
    refused(Mini(layers=1).train(), UnsupportedModelError, r"train mode: call model\.eval\(\)")
    model = Mini(layers=1)
    model.blocks[0].train()
    refused(model, UnsupportedModelError, "train mode")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value):
    model = Mini(layers=1)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name).fill_(value)
    refused(model, UnsupportedModelError, "logits of Mini are not finite: check the weights")


def test_autocast():
    model = Mini(layers=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(model, UnsupportedModelError, "autocast is on")


def test_meta_device():
    refused(Mini(layers=1).to("meta"), UnsupportedModelError, "meta device: load its weights first")


def test_one_layer_on_the_meta_device():
    model = Mini(layers=1)
    model.head = nn.Linear(16, 40, device="meta").eval()
    refused(model, UnsupportedModelError, "meta device")


@pytest.mark.gpu
def test_several_devices():
    model = Mini(layers=1)
    model.head.to("cuda")
    refused(model, DeviceMismatchError, "parameters on cpu, cuda:0: move it to one device")


def test_mixed_dtypes():
    model = Mini(layers=1)
    model.head.to(torch.bfloat16)
    refused(model, DeviceMismatchError, r"mixes torch\.bfloat16, torch\.float32")


def test_adapters():
    model = Mini(layers=1)
    model.peft_config = {"default": object()}
    refused(model, UnsupportedModelError, "merge_and_unload")
    model = Mini(layers=1)
    layer = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.blocks[0].q = layer(16, 16, bias=False).eval()
    refused(model, UnsupportedModelError, "carries adapters")


def test_quantised():
    model = Mini(layers=1)
    model.hf_quantizer = object()
    refused(model, UnsupportedModelError, "quantised parameters: load it in bf16 or fp32")
    model = Mini(layers=1)
    model.blocks[0].q.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    refused(model, UnsupportedModelError, "quantised parameters")


def test_sharded():
    model = Mini(layers=1)
    model.hf_device_map = {"wte": 0, "blocks": 1, "head": "cpu"}
    refused(model, UnsupportedModelError, r"sharded over \['0', '1', 'cpu'\]: load it on one device")
    model.hf_device_map = {"": "cpu"}
    assert capture_mini(model).layers == 1


def test_no_parameters():
    refused(nn.Identity().eval(), UnsupportedModelError, "has no parameters")


def test_made_in_inference_mode():
    with torch.inference_mode():
        model = Mini(layers=1)
    refused(model, UnsupportedModelError, "made in inference mode")


class Branches(Mini):
    """Depends on the data."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits * 2 if logits.sum() > 0 else logits


class Specialises(Mini):
    """Depends on the length in a way that a graph for every length cannot."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (2 if input_ids.shape[1] > 20 else 1)


@pytest.mark.parametrize("kind", [Branches, Specialises])
def test_what_cannot_be_exported(kind):
    with pytest.raises(CaptureError, match=f"{kind.__name__} could not be exported: ") as caught:
        capture_mini(kind(layers=1))
    assert not isinstance(caught.value, UnsupportedModelError)
    assert caught.value.__cause__ is not None


class Counts(Mini):
    """Depends on how often it was called."""

    calls = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input_ids) * self.calls


def test_hidden_state_is_caught():
    with pytest.raises(CaptureError, match="depends on something outside its inputs and parameters"):
        capture_mini(Counts(layers=1))


class Random(Mini):
    """Never the same twice."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits + torch.randn_like(logits)


def test_randomness_is_caught():
    with pytest.raises(CaptureError, match="depends on something outside"):
        capture_mini(Random(layers=1))


class NoLogits(Mini):
    """Returns a dictionary without logits."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"scores": super().forward(input_ids)}


def test_an_output_without_logits():
    with pytest.raises(CaptureError, match="the model returns dict without logits"):
        capture_mini(NoLogits(layers=1))


def test_a_length_of_one():
    with pytest.raises(UnsupportedModelError, match="max_sequence_length=1"):
        capture(Mini(layers=1), 1, 40)


def test_a_failed_capture_changes_nothing():
    model = Branches(layers=1)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(CaptureError):
        capture_mini(model)
    for name, p in model.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
    assert not model._forward_pre_hooks


def test_two_captures_give_the_same_graph():
    model = Mini(layers=1)
    first, second = capture_mini(model), capture_mini(model)
    assert listing(first.gm) == listing(second.gm)
