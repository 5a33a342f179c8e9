# SPDX-License-Identifier: Apache-2.0
"""Checkouts by path: their own files are imported and taken out again, and what is no checkout is refused.

The checkout here is a small stand-in of our own with the interface that is relied on: absolute imports of `model`, a
model class that takes keyword sizes and our parameter names, three loops that return a canvas and a count.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dllm_compile
from benchmarks import peers
from benchmarks.models import random_llada
from benchmarks.peer_calls import against_peer, check_peers
from dllm_compile import CompileConfig

MODELLING = """
    from transformers import PretrainedConfig, PreTrainedModel
    from dllm_compile.models.llada import LLaDAConfig as Sizes, LLaDAForMaskedDiffusion

    class LLaDAConfig(PretrainedConfig):
        model_type = "llada"

        def __init__(self, **sizes):
            self.sizes = sizes
            super().__init__()

    class LLaDAModelLM(PreTrainedModel):
        config_class = LLaDAConfig

        def __init__(self, config):
            super().__init__(config)
            self.model = LLaDAForMaskedDiffusion(Sizes(**config.sizes)).model

        def tie_weights(self):
            pass

        def forward(self, ids):
            return self.model(ids)
"""
LOOPS = """
    import torch
    from model.modeling_llada import LLaDAModelLM

    def generate(model, prompt, steps=128, gen_length=128, block_length=128, mask_id=0):
        assert isinstance(model, LLaDAModelLM)
        masks = torch.full((1, gen_length), mask_id)
        canvas, count = torch.cat([prompt, masks], dim=1), 0
        start, blocks = prompt.shape[1], gen_length // block_length
        for block in range(blocks):
            here = slice(start + block * block_length, start + (block + 1) * block_length)
            for _ in range(steps // blocks):
                out = model(canvas)
                logits = (out if isinstance(out, torch.Tensor) else out.logits)[0, here].float()
                probability = logits.softmax(-1)
                logits[:, mask_id] = -torch.inf
                token = logits.argmax(-1)
                confidence = probability.gather(-1, token[:, None])[:, 0]
                confidence[canvas[0, here] != mask_id] = -1
                take = confidence.topk(block_length * blocks // steps).indices
                canvas[0, here][take] = token[take]
                count += 1
        return canvas, count

    generate_with_prefix_cache = generate_with_dual_cache = generate
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "llada"
    (folder / "model").mkdir(parents=True)
    (folder / "generate.py").write_text(textwrap.dedent(LOOPS))
    (folder / "model" / "__init__.py").write_text("")
    (folder / "model" / "configuration_llada.py").write_text("")
    (folder / "model" / "modeling_llada.py").write_text(textwrap.dedent(MODELLING))
    return tmp_path


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llada("tiny", 1, "cpu")


def test_a_checkout_runs_beside_ours_on_the_same_weights(checkout: Path, model: Any, monkeypatch: pytest.MonkeyPatch):
    mine = ModuleType("model")
    monkeypatch.setitem(sys.modules, "model", mine)
    path = list(sys.path)
    peer = peers.load(f"fast-dllm={checkout}", model)
    assert sys.modules["model"] is mine  # a module of the user's own stays what it was
    assert "model.modeling_llada" not in sys.modules
    assert sys.path == path
    fast = dllm_compile.optimize(model, CompileConfig(compile=False))
    rows = list(against_peer(fast, peer, prompt=6, answer=64))
    assert [row["name"] for row in rows] == [f"beside fast-dllm, {kind} cache" for kind in ("no", "prefix", "dual")]
    uncached = rows[0]
    assert uncached["tokens_agree"] == 1.0
    assert uncached["forwards"] == uncached["peer_forwards"] == 32
    assert uncached["ratio"] > 0
    assert uncached["peer_canvas_tokens_per_second"] == pytest.approx(64e3 / uncached["peer_ms"], rel=1e-2)


def test_the_checkout_computes_with_our_weights(checkout: Path, model: Any):
    peer = peers.load(f"fast-dllm={checkout}", model)
    prompt = torch.arange(3, 9)[None]
    canvas, forwards = peer.loops["no cache"][1](prompt, 8, 4, 4)
    output = dllm_compile.optimize(model, CompileConfig(compile=False)).generate(
        prompt, max_new_tokens=8, block_length=4, steps=4, eos="none"
    )
    assert torch.equal(canvas, output.sequences)
    assert forwards == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fast-dllm", "write NAME=PATH"),
        ("vllm=/tmp", "a name of fast-dllm, llada"),
        ("fast-dllm=/nowhere", "generate.py, model/modeling_llada.py, model/configuration_llada.py not found there"),
        ("llada=/nowhere", "a checkout of ML-GSAI/LLaDA"),
    ],
)
def test_what_is_no_checkout_is_refused(given: str, said: str):
    with pytest.raises(SystemExit, match=said):
        check_peers([given])


def break_import(folder: Path) -> None:
    (folder / "generate.py").write_text("import a_package_that_nobody_has\n")


def drop_loop(folder: Path) -> None:
    (folder / "generate.py").write_text("from model.modeling_llada import LLaDAModelLM\ndef generate(): ...\n")


def rename_weights(folder: Path) -> None:
    file = folder / "model" / "modeling_llada.py"
    file.write_text(file.read_text().replace("self.model =", "self.other ="))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (break_import, "a_package_that_nobody_has"),
        (drop_loop, "has no generate_with_prefix_cache, generate_with_dual_cache"),
        (rename_weights, "does not take this model's sizes and weights"),
    ],
)
def test_a_checkout_that_cannot_be_used(checkout: Path, model: Any, spoil: Any, said: str):
    spoil(checkout / "llada")
    with pytest.raises(peers.PeerError, match=said):
        peers.load(f"fast-dllm={checkout}", model)


def test_the_reference_loop_runs_on_the_model_itself(tmp_path: Path, model: Any):
    code = "def generate(model, prompt, steps, gen_length, block_length, mask_id):\n    return model, steps, mask_id\n"
    (tmp_path / "generate.py").write_text(code)
    peer = peers.load(f"llada={tmp_path}", model)
    (given, steps, mask), forwards = peer.loops["no cache"][1](torch.zeros(1, 2), 8, 4, 4)
    assert given is model
    assert (steps, mask, forwards) == (4, model.config.mask_token_id, 4)
