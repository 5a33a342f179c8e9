# SPDX-License-Identifier: Apache-2.0
"""`pack_qkv`, `pack_gate_up` and the storage that packed weights share with the user's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dllm_compile
from dllm_compile import api
from dllm_compile.errors import CertificateError
from dllm_compile.passes import NORMALIZE
from dllm_compile.passes.graph import find, lookup
from dllm_compile.passes.pack_gate_up import PACK_GATE_UP
from dllm_compile.passes.pack_qkv import PACK_QKV
from dllm_compile.passes.packing import packed, plans
from tests.conftest import tiny_model

from .pieces import (
    Mini,
    apply,
    assert_idempotent,
    assert_refused,
    assert_same,
    capture_mini,
    count,
    listing,
    llada,
    mini,
    normalized,
)


def storages(model: nn.Module) -> dict[int, int]:
    """Bytes of each storage behind the parameters."""
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def snapshot(model: nn.Module) -> dict[str, tuple[int, Tensor, bool]]:
    return {name: (id(p), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor, bool]]) -> None:
    after = snapshot(model)
    assert list(after) == list(before)
    for name, (identity, value, grad) in before.items():
        assert (after[name][0], after[name][2]) == (identity, grad), name
        assert torch.equal(after[name][1], value), name


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_counts(layers):
    _, gm = llada(n_layers=layers)
    normalized(gm, layers)
    before = count(gm, "aten.linear")
    qkv, gate_up = apply(gm, PACK_QKV, PACK_GATE_UP, layers=layers)
    assert qkv.matches == gate_up.matches == layers
    assert (before, count(gm, "aten.linear")) == (7 * layers, 4 * layers)
    assert count(gm, "aten.split_with_sizes") == 2 * layers
    assert [packing.path.split(".")[-2] for packing in plans(gm)] == ["qkv_proj"] * layers + ["gate_up_proj"] * layers
    assert_idempotent(gm, PACK_QKV, layers)
    assert_idempotent(gm, PACK_GATE_UP, layers)
    assert len(plans(gm)) == 2 * layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"bias": "q k v gate up"}, {"kv_heads": 4}],
    ids=["gqa", "qk_norm", "bias", "mha"],
)
def test_values_strides_and_storage(dtype, changes):
    model = Mini(dtype=dtype, **changes)
    captured = capture_mini(model)
    gm = normalized(captured.gm)
    reference = {ids.shape: gm(ids) for ids in _ids()}
    before, bytes_before = snapshot(model), sum(storages(model).values())
    apply(gm, PACK_QKV, PACK_GATE_UP)
    with packed(gm), torch.no_grad():
        assert_untouched(model, before)
        for ids in _ids():
            # One wide product instead of three may sum in another order: allowed to differ by rounding, no more.
            bound = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(gm(ids), reference[ids.shape], rtol=bound, atol=bound)
            torch.testing.assert_close(model(ids), reference[ids.shape], rtol=bound, atol=bound)
        for packing in plans(gm):
            whole, offset = lookup(gm, packing.path), 0
            for source in packing.sources:
                part = lookup(gm, source)
                assert part.data_ptr() == whole.data_ptr() + offset * whole.element_size()
                assert part.is_contiguous()
                offset += part.numel()
            assert offset == whole.numel()
            assert whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
        assert sum(storages(model).values()) == bytes_before
        for node in find(gm, torch.ops.dllm.rope.default):
            recorded = node.args[0].meta["val"]
            assert recorded.stride()[-1] == 1
            assert recorded.dtype == dtype


def _ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 40, shape, generator=generator) for shape in ((1, 1), (2, 9), (3, 32))]


@pytest.mark.parametrize(
    ("changes", "graph_pass", "reason"),
    [
        ({"bias": "q"}, PACK_QKV, "some of the projections have a bias and some have none"),
        ({"bias": "q k"}, PACK_QKV, "some of the projections have a bias and some have none"),
        ({"bias": "up"}, PACK_GATE_UP, "some of the projections have a bias and some have none"),
        ({"shared": "k and v"}, PACK_QKV, "a weight is shared with another projection"),
        ({"shared": "gate and up"}, PACK_GATE_UP, "a weight is shared with another projection"),
    ],
    ids=["bias on q", "bias on q k", "bias on up", "k is v", "gate is up"],
)
def test_refusals(changes, graph_pass, reason):
    model, gm = mini(layers=1, **changes)
    normalized(gm, layers=1)
    assert_refused(gm, graph_pass, 1, reason)
    assert plans(gm) == ()
    assert_same(gm, model)


def test_qk_norm_with_biases_is_packed():
    """Between projection and rotation stand a norm and the addition of its bias."""
    _, gm = llada(attention_layer_norm=True, include_bias=True, weight_tying=True)
    normalized(gm)
    assert [result.matches for result in apply(gm, PACK_QKV, PACK_GATE_UP)] == [2, 2]
    assert count(gm, "aten.linear") == 8


def test_a_weight_that_two_layers_share_is_packed_once():
    model = Mini(shared="q of layers")
    gm = normalized(capture_mini(model).gm)
    (result,) = apply(gm, PACK_QKV)
    assert result.matches == 1
    assert [refusal.reason for refusal in result.refusals] == ["a weight is shared with another projection"]
    with packed(gm), torch.no_grad():
        assert model.blocks[1].q.weight is model.blocks[0].q.weight
        ids = _ids()[1]
        expected = model(ids)
        torch.testing.assert_close(gm(ids), expected, rtol=1e-5, atol=1e-5)
        model.blocks[0].q.weight.mul_(-1)
        changed = model(ids)
        assert not torch.allclose(changed, expected)
        torch.testing.assert_close(gm(ids), changed, rtol=1e-5, atol=1e-5)


def test_a_weight_used_elsewhere_too_stays_one_parameter():
    model = Mini(shared="q and o", layers=1)
    gm = normalized(capture_mini(model).gm, layers=1)
    assert apply(gm, PACK_QKV, layers=1)[0].matches == 1
    with packed(gm), torch.no_grad():
        model.blocks[0].q.weight.mul_(-1)
        ids = _ids()[1]
        torch.testing.assert_close(gm(ids), model(ids), rtol=1e-5, atol=1e-5)


def test_two_attentions_under_one_module_get_names_of_their_own():
    class Twice(Mini):
        """Both attentions' projections are attributes of one module."""

        def __init__(self) -> None:
            super().__init__(layers=1)
            first = self.blocks[0]
            self.blocks[0].second_q = nn.Linear(16, 16, bias=False)
            self.blocks[0].second_k = nn.Linear(16, 8, bias=False)
            self.blocks[0].second_v = nn.Linear(16, 8, bias=False)
            plain = first.attention

            def both(x: Tensor) -> Tensor:
                out = plain(x)
                saved = first.q, first.k, first.v
                first.q, first.k, first.v = first.second_q, first.second_k, first.second_v
                out = out + plain(x)
                first.q, first.k, first.v = saved
                return out

            first.attention = both
            self.eval()

    torch.manual_seed(0)
    model = Twice()
    gm = normalized(capture_mini(model).gm, layers=2, strict=False)
    (result,) = apply(gm, PACK_QKV)
    assert result.matches == 2
    assert len({packing.path for packing in plans(gm)}) == 2
    with packed(gm), torch.no_grad():
        ids = _ids()[1]
        torch.testing.assert_close(gm(ids), model(ids), rtol=1e-5, atol=1e-5)


# --- through optimize -----------------------------------------------------------------------------------------------


def test_a_second_optimize_reuses_the_packing():
    model = tiny_model()
    first = dllm_compile.optimize(model, compile=False)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    bytes_before = sum(storages(model).values())
    second = dllm_compile.optimize(model, compile=False)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert sum(storages(model).values()) == bytes_before
    options = {"max_new_tokens": 6, "block_length": 6}
    tokens = [one.generate([[3, 4, 5], [6]], **options).sequences for one in (first, second)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("packed_before", [False, True], ids=["fresh", "optimized before"])
def test_failing_to_certify_leaves_the_model_as_it_was(monkeypatch, packed_before):
    model = tiny_model()
    earlier = dllm_compile.optimize(model, compile=False) if packed_before else None
    before, places = snapshot(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    keys = list(model.state_dict())

    def fail(*_: object) -> float:
        raise CertificateError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(api, "accept_logits", fail)
        with pytest.raises(CertificateError, match="planted"):
            dllm_compile.optimize(model, compile=False)
    assert_untouched(model, before)
    assert list(model.state_dict()) == keys
    if earlier is None:
        assert len(storages(model)) == len(list(model.parameters())), "each parameter has storage of its own"
    else:
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
        earlier.generate([[3, 4]], max_new_tokens=2)


def test_failing_while_packing_leaves_the_model_as_it_was(monkeypatch):
    """Out of memory in the middle: what was packed so far is taken apart again."""
    model = tiny_model()
    before = snapshot(model)
    real, calls = torch.cat, []

    def cat(tensors, *args, **kwargs):
        # Only the packing concatenates parameters' detached values of this size.
        if all(not t.requires_grad and t.dim() == 2 and t.shape[1] == 64 for t in tensors) and len(tensors) in (2, 3):
            calls.append(len(tensors))
            if len(calls) == 3:
                raise torch.OutOfMemoryError("planted")
        return real(tensors, *args, **kwargs)

    monkeypatch.setattr("dllm_compile.passes.packing.torch.cat", cat)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        dllm_compile.optimize(model, compile=False)
    monkeypatch.undo()
    assert_untouched(model, before)
    assert len(storages(model)) == len(list(model.parameters()))
    dllm_compile.optimize(model, compile=False)


def test_planning_changes_nothing_in_the_model():
    model = Mini(layers=1)
    captured = capture_mini(model)
    before, places = snapshot(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    apply(captured.gm, *NORMALIZE, PACK_QKV, PACK_GATE_UP, layers=1)
    assert_untouched(model, before)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert listing(captured.gm)
