# SPDX-License-Identifier: Apache-2.0
"""Stamped layers: the graph that whole capture gives, and every difference between layers found before or behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import dllm_compile
from dllm_compile import capture as capture_module
from dllm_compile import stamping
from dllm_compile.alike_layers import TRACED, NotAlike, find_repeated
from dllm_compile.capture import Captured, capture
from dllm_compile.errors import CaptureError
from dllm_compile.passes import FUSE, NORMALIZE, run_passes
from dllm_compile.passes.graph import check_metadata, hashable, lookup, operator_counts
from tests.conftest import tiny_model
from tests.passes.pieces import LENGTH, Layer, Mini, assert_same, capture_mini
from tests.real import model_logits, prompts_of

LAYERS = 7


def small(**changes: Any) -> Any:
    sizes = {"n_layers": LAYERS, "d_model": 32, "mlp_hidden_size": 48, "max_sequence_length": LENGTH}
    return tiny_model(**{**sizes, **changes})


def whole(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Captured:
    """The same capture with every layer traced."""

    def refuse(*_: object) -> None:
        raise NotAlike("for comparison")

    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "_stamped", refuse)
        return capture(model, LENGTH, model.config.vocab_size)


def normal_form(gm: GraphModule) -> list[Any]:
    """The graph as data: tensors by identity, modules by name, nodes by number."""
    numbers: dict[Node, int] = {}

    def token(node: Node) -> Any:
        return id(lookup(gm, str(node.target))) if node.op == "get_attr" else numbers[node]

    rows = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            continue
        numbers[node] = len(numbers)
        stack = tuple((node.meta.get("nn_module_stack") or {}).items())
        arguments = (hashable(node.args, token), hashable(node.kwargs, token))
        rows.append((node.op, node.target, *arguments, stack if node.op == "call_function" else ()))
    return rows


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "groups": {"block_group_size": 2, "n_layers": 12},
    "biases, QK-norm, tied head": {"include_bias": True, "attention_layer_norm": True, "weight_tying": True},
}


LONG = ("bf16", "groups")  # a combination each of what the others have


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in VARIANTS]
)
def test_equals_whole_capture(variant, monkeypatch):
    """Node for node, with the same parameters under the same names and the right module behind every node."""
    model = small(**VARIANTS[variant])
    stamped, expected = capture(model, LENGTH, model.config.vocab_size), whole(model, monkeypatch)
    in_one = VARIANTS[variant].get("block_group_size", 1)
    assert (stamped.layers, stamped.traced, stamped.whole, stamped.note) == (
        model.config.n_layers,
        TRACED * in_one,
        "",
        None,
    )
    assert (expected.traced, expected.whole) == (model.config.n_layers, "for comparison")
    assert normal_form(stamped.gm) == normal_form(expected.gm)
    names, expected_names = ({n: id(p) for n, p in c.gm.named_parameters()} for c in (stamped, expected))
    assert names == expected_names
    assert {stamped.prefix + name: at for name, at in names.items()} == {n: id(p) for n, p in model.named_parameters()}
    check_metadata(stamped.gm, "test")
    assert_same(stamped.gm, model)


def test_passes_count_all_layers():
    model = small(n_kv_heads=1)
    captured = capture(model, LENGTH, model.config.vocab_size)
    assert captured.traced == TRACED
    results = run_passes(captured.gm, (*NORMALIZE, *FUSE), layers=captured.layers)
    assert [result.matches for result in results] == [2 * LAYERS + 1, LAYERS, LAYERS, 1, 1, LAYERS, LAYERS]
    paths = [str(node.target) for node in captured.gm.graph.nodes if node.op == "get_attr"]
    assert [f"transformer.blocks.{i}.qkv_proj.weight" in paths for i in range(LAYERS)] == [True] * LAYERS
    fast = dllm_compile.optimize(model, compile=False)
    ids = torch.arange(LENGTH)[None]
    torch.testing.assert_close(fast(ids).logits, model_logits(model, ids), rtol=1e-5, atol=1e-5)
    assert not [note for note in fast.report().notes if "traced" in note]


def test_the_model_is_not_touched():
    """Modules are copied, tensors shared; attributes of the model are the same objects before and after."""
    model = small().model
    before = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    shallow = find_repeated(model).shallow()
    assert not {id(module) for module in shallow.modules()} & {id(module) for module in model.modules()}
    theirs = {id(p) for p in model.parameters()}
    assert {id(p) for p in shallow.parameters()} < theirs
    assert [name for name, _ in shallow.transformer.blocks.named_children()] == [str(i) for i in range(TRACED)]
    assert (shallow.config.n_layers, model.config.n_layers) == (TRACED, LAYERS)
    capture(model, LENGTH, 128)
    for module, attributes, children in before:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert module._modules == children


def test_shallow_models_are_traced_whole():
    captured = capture_mini(Mini(layers=5))
    assert (captured.layers, captured.traced, captured.note) == (5, 5, None)


# --- layers that are not alike --------------------------------------------------------------------------------------


def deep(**changes: Any) -> Mini:
    return Mini(**{"layers": LAYERS, **changes})


class Skips(Layer):
    """Attention without the feed-forward layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


def _other_class(model: Mini) -> None:
    model.blocks[5] = Skips(model.options, 5).eval()
    model.blocks[5].rotate = model.blocks[0].rotate


def _other_head_size(model: Mini) -> None:
    model.blocks[4].size = model.blocks[4].size // 2


def _extra_bias(model: Mini) -> None:
    model.blocks[5].q.bias = nn.Parameter(torch.ones(16))


def _other_options(model: Mini) -> None:
    model.blocks[6].options = {**model.options, "attend": "scaled"}


def _hook(model: Mini) -> None:
    model.blocks[5].register_forward_hook(lambda module, inputs, output: output * 2)


def _patched(model: Mini) -> None:
    original = model.blocks[5].forward
    model.blocks[5].forward = lambda x: original(x) * 2


def _shared(model: Mini) -> None:
    model.blocks[5].q.weight = model.blocks[4].q.weight


def _frozen(model: Mini) -> None:
    model.blocks[5].q.weight.requires_grad_(False)


DIFFERENCES: dict[str, tuple[Callable[[Mini], None], str]] = {
    "class": (_other_class, "blocks.5 is Skips and not Layer"),
    "number": (_other_head_size, "blocks.4.size differs"),
    "bias": (_extra_bias, "blocks.5.q.bias has another shape, dtype or kind"),
    "option": (_other_options, "blocks.6.options differs"),
    "hook": (_hook, "blocks.5 has a hook"),
    "forward": (_patched, "the forward of blocks.5 was replaced"),
    "sharing": (_shared, "q.weight is shared between some of blocks"),
    "frozen": (_frozen, "blocks.5.q.weight has another shape, dtype or kind"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_modules_that_differ(name):
    change, reason = DIFFERENCES[name]
    model = deep()
    change(model)
    with pytest.raises(NotAlike, match=reason):
        find_repeated(model)


@pytest.mark.parametrize("name", ["class", "hook"])
def test_models_that_differ_are_captured_whole(name):
    change, reason = DIFFERENCES[name]
    model = deep()
    change(model)
    captured = capture_mini(model)
    assert captured.traced == captured.layers == LAYERS
    assert reason in captured.whole
    assert captured.note == f"all {LAYERS} layers were traced, which takes longer: {captured.whole}"
    assert_same(captured.gm, model)


def test_another_eps_in_one_layer():
    """A number that the logits hardly show."""
    model = small().model
    model.transformer.blocks[5].ff_norm.eps = 1.1e-5
    captured = capture(model, LENGTH, 128)
    assert "blocks.5.ff_norm.eps differs from the first layer's" in captured.whole
    eps = [node.args[1] for node in captured.gm.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert eps.count(1.1e-5) == 1


def test_tables_of_each_layer():
    """Tensors that are no buffers cannot be told by name."""
    with pytest.raises(NotAlike, match=r"blocks.1.rotate.cos differs"):
        find_repeated(deep(tables="own"))


def test_exchanged_layers_are_stamped_in_their_places():
    model = deep()
    model.blocks[5], model.blocks[2] = model.blocks[2], model.blocks[5]
    captured = capture_mini(model)
    assert captured.traced == TRACED
    assert_same(captured.gm, model)


# --- what modules do not show ---------------------------------------------------------------------------------------


class OneOther(Mini):
    """Treats one layer in another way."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for i, block in enumerate(self.blocks):
            x = block(x) * (1.5 if i == 5 else 1.0)
        return self.head(x)


class Alternates(Mini):
    """Every other layer is another function."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for i, block in enumerate(self.blocks):
            x = block(x) if i % 2 else block(x).tanh()
        return self.head(x)


class Depth(Mini):
    """The number of layers is a factor."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * len(self.blocks)


class Dense(Mini):
    """The last value meets the first layer's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        seen = [x := block(x) for block in self.blocks]
        return self.head(x + seen[0])


class Before(Mini):
    """Each layer is given what the one before the last gave, too."""

    def forward(self, input_ids: Tensor) -> Tensor:
        older = x = self.wte(input_ids)
        for block in self.blocks:
            older, x = x, block(x) + older
        return self.head(x)


class Prepared(Mini):
    """Each layer has something of its own made in front of all of them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        extra = [torch.roll(x, 1, -1) for _ in self.blocks]
        for block, other in zip(self.blocks, extra, strict=True):
            x = block(x + other)
        return self.head(x)


class Twice(Mini):
    """The layers run two times over."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


HIDDEN: dict[type[Mini], str] = {
    OneOther: "look alike do not compute alike",
    Alternates: "gave different nodes",
    Depth: "look alike do not compute alike",
    Dense: "is read behind the last layer",
    Before: "reaches beyond the next layer",
    Prepared: "reaches beyond the next layer",
    Twice: "do not run one after the other",
}


@pytest.mark.parametrize("kind", HIDDEN, ids=lambda kind: kind.__name__)
def test_what_only_the_graph_shows(kind):
    model = kind(layers=LAYERS)
    ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        expected = model(ids)
    with pytest.raises(NotAlike, match=HIDDEN[kind]):
        capture_module._stamped(model, ids, LENGTH, expected)


@pytest.mark.parametrize("kind", [OneOther, Dense])
def test_what_the_graph_shows_is_captured_whole(kind):
    model = kind(layers=LAYERS)
    captured = capture_mini(model)
    assert HIDDEN[kind] in captured.whole
    assert captured.traced == captured.layers == LAYERS
    assert_same(captured.gm, model)


@dataclasses.dataclass
class CountingConfig:
    """Sizes as a configuration of a real model has them."""

    vocab_size: int = 40
    max_sequence_length: int = LENGTH
    mask_token_id: int = 39
    num_hidden_layers: int = LAYERS


class Counts(Mini):
    """Finds the number of its layers in its configuration."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)
        self.config = CountingConfig()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for i in range(self.config.num_hidden_layers):
            x = self.blocks[i](x)
        return self.head(x)


def test_a_configuration_that_counts_layers():
    model = Counts()
    captured = capture_mini(model)
    assert (captured.traced, captured.layers) == (TRACED, LAYERS)
    assert model.config.num_hidden_layers == LAYERS
    assert_same(captured.gm, model)


class Fixed(Mini):
    """Knows the number of its layers by heart."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for i in range(LAYERS):
            x = self.blocks[i](x)
        return self.head(x)


def test_a_shallow_copy_that_does_not_run():
    model = Fixed(layers=LAYERS)
    captured = capture_mini(model)
    assert captured.whole == "a copy with fewer layers does not run (CaptureError)"
    assert_same(captured.gm, model)


def test_a_wrong_stamp_does_not_pass(monkeypatch):
    """All layers given the weights of the traced one: the comparison with the model finds it."""
    monkeypatch.setattr(stamping._Stamper, "_of_model", lambda self, name, like: like)
    model = deep()
    captured = capture_mini(model)
    assert captured.whole == "layers that look alike do not compute alike"
    assert_same(captured.gm, model)


def test_a_model_that_is_never_the_same_is_refused_as_before():
    class Random(Mini):
        def forward(self, input_ids: Tensor) -> Tensor:
            logits = super().forward(input_ids)
            return logits + torch.randn_like(logits)

    with pytest.raises(CaptureError, match="depends on something outside"):
        capture_mini(Random(layers=LAYERS))


def test_optimize_says_why_it_traced_all():
    model = deep()
    _frozen(model)
    fast = dllm_compile.optimize(model, compile=False)
    (note,) = (note for note in fast.report().notes if "traced" in note)
    assert note.startswith(f"all {LAYERS} layers were traced, which takes longer: blocks.5.q.weight has another")


def test_generate_of_a_stamped_model(monkeypatch):
    """Tokens of a cached and of a plain run equal those after whole capture."""
    model = small(init_std=0.4)
    stamped = dllm_compile.optimize(model, compile=False)
    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "find_repeated", lambda source: (_ for _ in ()).throw(NotAlike("off")))
        expected = dllm_compile.optimize(model, compile=False)
    assert stamped._captured.traced == TRACED
    assert expected._captured.traced == LAYERS
    for options in ({}, {"cache": "flash"}, {"cache": "lacache"}):
        config = {"max_new_tokens": 8, "block_length": 4, **options}
        outputs = [fast.generate(prompts_of(5, 3), **config).sequences for fast in (stamped, expected)]
        assert torch.equal(*outputs)


@pytest.mark.remote
@pytest.mark.parametrize("group", [1, 2], ids=["blocks", "groups"])
def test_remote_code(remote_path, tmp_path, monkeypatch, group):
    """LLaDA's own modelling code, deep enough: the same graph as whole capture."""
    from dllm_compile.remote_code import load_remote
    from tests.remote import make_checkpoint

    changes = {"n_layers": LAYERS * group, "block_group_size": group}
    model = load_remote(make_checkpoint(remote_path, tmp_path / remote_path.name, **changes), dtype=torch.float32)
    captured = capture(model, model.config.max_sequence_length, model.config.embedding_size)
    assert (captured.traced, captured.whole) == (TRACED * group, "")
    assert captured.layers == LAYERS * group
    assert operator_counts(captured.gm)["aten.linear"] == 7 * captured.layers + 1
    model.model.config.vocab_size = model.config.vocab_size
    assert normal_form(captured.gm) == normal_form(whole(model.model, monkeypatch).gm)
