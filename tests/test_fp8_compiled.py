# SPDX-License-Identifier: Apache-2.0
"""Compiled programs with FP8 layers: weights and scales are read where they lie, one program serves all sizes."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile._compat import can_compile
from dllm_compile.fp8_weights import quantized_weights
from dllm_compile.passes.graph import lookup
from tests.passes.fp8_pieces import wide_model
from tests.real import prompts_of

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler"),
]
OPERATORS = ("fp8_linear", "fp8_linear_add_rms_norm")
STEP = DecodingConfig(max_new_tokens=8, block_length=4, cache="dual", threshold=0.3)


def weights_of(fast) -> set[tuple[int, tuple[int, ...], int, tuple[int, ...]]]:
    """Address and strides of codes and scales of every quantized weight."""
    found = set()
    for weight in quantized_weights(fast._captured.gm):
        codes, scales = lookup(fast._captured.gm, weight.codes), lookup(fast._captured.gm, weight.scales)
        found.add((codes.data_ptr(), codes.stride(), scales.data_ptr(), scales.stride()))
    return found


@pytest.fixture
def multiplied(monkeypatch):
    """Address and strides of what the products are called with; padding of the scales shows in the strides."""
    seen: list[tuple[int, tuple[int, ...], int, tuple[int, ...]]] = []
    for name in OPERATORS:
        module = importlib.import_module(f"dllm_compile.kernels.{name}")
        original = getattr(module, f"{name}_reference")

        def watched(codes, scales, weight_codes, weight_scales, *rest, original=original):
            seen.append(
                (weight_codes.data_ptr(), weight_codes.stride(), weight_scales.data_ptr(), weight_scales.stride())
            )
            return original(codes, scales, weight_codes, weight_scales, *rest)

        monkeypatch.setattr(module, f"{name}_reference", watched)
    return seen


@pytest.mark.parametrize(
    ("layers", "granularity"),
    [
        (3, "group"),
        (6, "group"),
        (3, "row"),
        pytest.param(6, "row", marks=pytest.mark.long),
        pytest.param(3, "tensor", marks=pytest.mark.long),
        pytest.param(6, "tensor", marks=pytest.mark.long),
    ],
)
def test_no_copy_of_weights_or_scales(multiplied, layers, granularity):
    """Every product gets the very buffers of the graph, in one graph and where a layer is compiled once for many."""
    fast = dllm_compile.optimize(
        wide_model(n_layers=layers), precision="fp8", fp8_granularity=granularity, compile=True
    )
    own = weights_of(fast)
    assert len(own) == 2 * (layers - 1)
    fast.generate(prompts_of(4, 9), STEP)
    (program,) = fast.programs.built
    assert program.compiled
    assert set(multiplied) == own
    for code in program.sources:
        assert not re.search(r"empty_strided.*float8", code), "codes are made by the operators alone"
        assert not re.search(r"arg\d+_1\.(clone|contiguous|to)\(|\.copy_\(", code)
    if granularity == "group":
        assert any(strides[0] % 4 == 0 for *_, strides in own), "rows of scales lie as the block product reads them"


def test_nothing_is_compiled_again_after_the_first_sizes():
    """Other prompts, batches and updated weights; the same tokens each time they are asked for."""
    fast = dllm_compile.optimize(wide_model(), precision="fp8", compile=True)
    fast.warm_up([9, 4], STEP)
    with torch.compiler.set_stance("fail_on_recompile"):
        for i, lengths in enumerate(((4, 9), (1,), (3, 30, 7, 8))):
            first, again = (fast.generate(prompts_of(*lengths, seed=i), STEP).sequences for _ in range(2))
            assert torch.equal(first, again)
        with torch.no_grad():
            for p in fast.model.parameters():
                p.mul_(0.9)
        fast.refresh_weights()
        fast.generate(prompts_of(4, 9), STEP)
