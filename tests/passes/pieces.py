# SPDX-License-Identifier: Apache-2.0
"""A miniature model whose parts can be exchanged for ones that a pass must refuse, and how passes are run on it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from dllm_compile.capture import Captured, capture
from dllm_compile.passes import NORMALIZE, GraphPass, PassResult, run_passes
from dllm_compile.passes.graph import lookup, operator_counts, share
from tests.conftest import tiny_model

LENGTH = 32


def norm(kind: str, x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm, or something that looks like one."""
    if kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), weight)
    wide = x.to(torch.float32)
    if kind == "centred":
        wide = wide - wide.mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    if kind == "other axis":
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-5)).to(x.dtype)
    if kind == "cube":
        return weight * (wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    if kind == "late cast":
        return (weight * (wide * root)).to(x.dtype)
    if kind == "root used twice":
        return weight * (wide * root).to(x.dtype) + root.to(x.dtype)
    if kind == "no weight":
        return (wide * root).to(x.dtype)
    if kind == "computed weight":
        return x[:, :1] * (wide * root).to(x.dtype)
    return weight * (wide * root).to(x.dtype)


class Rotation(nn.Module):
    """Rotary positions from stored tables."""

    def __init__(self, kind: str, size: int, theta: float) -> None:
        super().__init__()
        self.kind = kind
        angle = torch.arange(LENGTH + 1)[:, None] * theta ** -(torch.arange(0, size, 2) / size)
        angle = torch.cat((angle, angle), -1)
        dtype = torch.float64 if kind == "double tables" else torch.float32
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            return x
        start = 1 if self.kind == "offset" else 0
        wide = x if self.kind == "low precision" else x.float()
        cos, sin = (t[start : start + x.shape[2]].type_as(wide) for t in (self.cos, self.sin))
        first, second = wide.unflatten(-1, (2, -1)).unbind(-2)
        if self.kind == "other way":
            first, second = -first, -second
        return (wide * cos + torch.cat((-second, first), -1) * sin).type_as(x)


class Layer(nn.Module):
    """Attention and a gated feed-forward layer, with the parts that the options name."""

    def __init__(self, options: dict[str, Any], index: int) -> None:
        super().__init__()
        width, heads, kv_heads, ffn = (options[name] for name in ("width", "heads", "kv_heads", "ffn"))
        self.options, self.heads, self.kv_heads, self.size = options, heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = (nn.Parameter(torch.randn(width) * 0.2 + 1) for _ in range(2))
        bias = options["bias"]
        self.q = nn.Linear(width, width, bias="q" in bias)
        self.k = nn.Linear(width, kv_heads * self.size, bias="k" in bias)
        self.v = nn.Linear(width, kv_heads * self.size, bias="v" in bias)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * ffn if options["ffn_kind"] == "chunked" else ffn, bias="gate" in bias)
        self.up = nn.Linear(width, ffn, bias="up" in bias)
        self.down = nn.Linear(ffn, width, bias=False)
        if options["qk_norm"]:
            self.q_norm = nn.Parameter(torch.randn(width) * 0.2 + 1)
            self.k_norm = nn.Parameter(torch.randn(kv_heads * self.size) * 0.2 + 1)
        theta = 100.0 + (10.0 * index if options["tables"] == "own" else 0.0)
        self.rotate = Rotation(options["rope"], self.size, theta)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = self.options["attend"]
        if kind == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if kind == "masked":
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if kind == "scaled":
            return F.scaled_dot_product_attention(q, k, v, scale=0.5)
        if kind == "by hand":
            return ((q @ k.transpose(-1, -2)) * self.size**-0.5).softmax(-1) @ v
        if kind == "doubled query":
            return F.scaled_dot_product_attention(q * 2, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.options["qk_norm"]:
            q, k = norm("rms", q, self.q_norm), norm("rms", k, self.k_norm)
        if self.options["attend"] == "mixed projections":
            k = k + v
        q, k, v = (t.view(batch, length, -1, self.size).transpose(1, 2) for t in (q, k, v))
        q, k = self.rotate(q), self.rotate(k)
        if self.kv_heads < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.o(self.attend(q, k, v).transpose(1, 2).contiguous().view(batch, length, width))

    def feed_forward(self, x: Tensor, stream: Tensor) -> Tensor:
        kind = self.options["ffn_kind"]
        if kind == "chunked":
            value, gate = self.gate(x).chunk(2, -1)
            return self.down(F.silu(gate) * value)
        if kind == "gelu":
            return self.down(F.gelu(self.gate(x)) * self.up(x))
        if kind == "swapped":
            return self.down(self.up(x) * F.silu(self.gate(x)))
        if kind == "two inputs":
            return self.down(F.silu(self.gate(x)) * self.up(stream))
        if kind == "one projection":
            return self.down(F.silu(self.gate(x)))
        if kind == "used twice":
            product = F.silu(self.gate(x)) * self.up(x)
            return self.down(product) + product.mean(-1, keepdim=True)
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        kind = self.options["norm"]
        x = x + self.attention(norm(kind, x, self.norm_1))
        return x + self.feed_forward(norm(kind, x, self.norm_2), x)


DEFAULTS: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 40,
    "norm": "rms",
    "ffn_kind": "silu",
    "attend": "plain",
    "rope": "full",
    "tables": "shared",
    "qk_norm": False,
    "bias": "",
    "head": "plain",
    "embedding": "plain",
    "shared": "",
    "dtype": torch.float32,
    "seed": 0,
}


class Mini(nn.Module):
    """Embedding, layers, last norm and head; every option of `DEFAULTS` can be changed."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        options = {**DEFAULTS, **changes}
        assert set(options) == set(DEFAULTS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options["seed"])
            self.options = options
            self.wte = nn.Embedding(options["vocab"], options["width"])
            self.wpe = nn.Embedding(LENGTH, options["width"])
            self.blocks = nn.ModuleList(Layer(options, index) for index in range(options["layers"]))
            if options["tables"] == "shared":
                for block in self.blocks:
                    block.rotate = self.blocks[0].rotate
            self.last = nn.Parameter(torch.randn(options["width"]) * 0.2 + 1)
            self.head = nn.Linear(options["width"], options["vocab"], bias=options["head"] == "bias")
        self._share(options["shared"])
        if options["head"] == "tied":
            self.head.weight = self.wte.weight
        self.config = SimpleNamespace(
            vocab_size=options["vocab"], max_sequence_length=LENGTH, mask_token_id=options["vocab"] - 1
        )
        self.to(options["dtype"]).eval()

    def _share(self, what: str) -> None:
        first = self.blocks[0]
        if what == "q of layers":
            self.blocks[1].q.weight = first.q.weight
        elif what == "q and o":
            first.o.weight = first.q.weight
        elif what == "k and v":
            first.v.weight = first.k.weight
        elif what == "gate and up":
            first.up.weight = first.gate.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        if self.options["embedding"] == "scaled":
            x = x * 4.0
        elif self.options["embedding"] == "positions":
            x = x + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        kind = self.options["head"]
        logits = self.head(norm(self.options["norm"], x, self.last))
        if kind == "scaled":
            return logits * 0.25
        return torch.tanh(logits) if kind == "capped" else logits


def capture_mini(model: nn.Module) -> Captured:
    return capture(model, LENGTH, model.config.vocab_size)


@functools.cache
def _mini(options: tuple[tuple[str, Any], ...]) -> tuple[Mini, Captured]:
    model = Mini(**dict(options))
    return model, capture_mini(model)


def mini(**changes: Any) -> tuple[Mini, GraphModule]:
    """A captured miniature and its graph; the model is shared between tests, which may plan packings, not make them."""
    model, captured = _mini(tuple(sorted(changes.items(), key=lambda item: item[0])))
    return model, share(captured.gm)


@functools.cache
def _llada(options: tuple[tuple[str, Any], ...]) -> tuple[nn.Module, Captured]:
    model = tiny_model(**{"max_sequence_length": LENGTH, **dict(options)})
    return model, capture(model, LENGTH, model.config.vocab_size)


def llada(**changes: Any) -> tuple[nn.Module, GraphModule]:
    """The tiny LLaDA and its graph; shared like `mini`."""
    model, captured = _llada(tuple(sorted(changes.items(), key=lambda item: item[0])))
    return model, share(captured.gm)


def apply(gm: GraphModule, *passes: GraphPass, layers: int = 2, strict: bool = True) -> tuple[PassResult, ...]:
    return run_passes(gm, passes, layers=layers, strict=strict)


def normalized(gm: GraphModule, layers: int = 2, strict: bool = True) -> GraphModule:
    run_passes(gm, NORMALIZE, layers=layers, strict=strict)
    return gm


def count(gm: GraphModule, name: str) -> int:
    return operator_counts(gm)[name]


def listing(gm: GraphModule) -> list[tuple[str, str, str]]:
    """The graph as data, for "nothing changed"."""
    return [(node.op, str(node.target), str((node.args, node.kwargs))) for node in gm.graph.nodes]


def samples(vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, size, generator=generator) for size in ((1, 1), (1, 9), (3, 17), (2, LENGTH))]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


def assert_same(gm: GraphModule, model: nn.Module) -> None:
    """Bit-equal to the model at several batch sizes and lengths, strides included."""
    for ids in samples(model.config.vocab_size):
        expected, actual = logits(model, ids), logits(gm, ids)
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
        assert actual.dtype == expected.dtype


def assert_refused(gm: GraphModule, graph_pass: GraphPass, layers: int, *reasons: str) -> PassResult:
    """The pass changes nothing and says why."""
    before = listing(gm)
    (result,) = apply(gm, graph_pass, layers=layers, strict=False)
    assert result.matches == 0
    assert listing(gm) == before
    text = "\n".join(map(str, result.refusals))
    for reason in reasons:
        assert reason in text, text
    return result


def assert_idempotent(gm: GraphModule, graph_pass: GraphPass, layers: int = 2) -> None:
    before = listing(gm)
    (again,) = apply(gm, graph_pass, layers=layers, strict=False)
    assert again.matches == 0
    assert listing(gm) == before


def tensor(gm: GraphModule, path: str) -> Tensor:
    return lookup(gm, path)
