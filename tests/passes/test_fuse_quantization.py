# SPDX-License-Identifier: Apache-2.0
"""`fuse_quantization`: the same bytes as without it, in the places where inputs are made."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.fp8_weights import GROUPS
from dllm_compile.passes.fuse_quantization import FUSE_QUANTIZATION
from dllm_compile.passes.graph import find, share

from .fp8_pieces import flatten, quantize, rows, wide
from .pieces import apply, assert_idempotent, assert_refused, count

pytest.importorskip("torchao")
OPS = torch.ops.dllm


def program(*, pack: bool = True, changes: dict | None = None, **options):
    """A forward program with quantized layers, before and after the pass."""
    _, gm, layers = wide(pack=pack, **(changes or {}))
    quantize(gm, layers, **options)
    flatten(gm, layers)
    fused = share(gm)
    (result,) = apply(fused, FUSE_QUANTIZATION, layers=layers)
    return gm, fused, result


@pytest.mark.parametrize("linears", ["ffn", "all"])
@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "unpacked"])
def test_bit_equal(pack, granularity, linears):
    """T7, through whole programs: logits to the last bit."""
    changes = {"n_kv_heads": 2}  # each of q, k and v is a whole block, packed or not
    gm, fused, result = program(pack=pack, changes=changes, granularity=granularity, linears=linears)
    assert result.matches == count(gm, "dllm.quantized_linear") > 0
    assert count(fused, "dllm.quantized_linear") == 0
    for lengths in ((7,), (1, 19, 4)):
        assert torch.equal(gm(**rows(*lengths)), fused(**rows(*lengths)))


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "unpacked"])
def test_where_the_codes_are_made(pack):
    gm, fused, _ = program(pack=pack)
    # Layers 1 and 2: the norm in front of gate and up, and the gated activation.
    assert count(fused, "dllm.add_rms_norm_quant") == 2
    assert count(fused, "dllm.swiglu_quant") == 2
    assert count(fused, "dllm.quantize") == 0
    assert count(fused, "dllm.fp8_linear") == (4 if pack else 6)
    assert count(gm, "dllm.rms_norm") - count(fused, "dllm.rms_norm") == 2
    assert count(gm, "aten.add") - count(fused, "aten.add") == 2
    assert count(fused, "dllm.swiglu") == 1
    for node in find(fused, OPS.fp8_linear.default):
        codes, scales, weight, weight_scales, dtype = node.args
        assert codes.meta["val"].dtype == weight.meta["val"].dtype == torch.float8_e4m3fn
        assert scales.meta["val"].stride(0) == 1, "one row after the other, as the product reads them"
        assert weight_scales.meta["val"].dtype == torch.float32
        assert dtype == torch.float32
    assert_idempotent(fused, FUSE_QUANTIZATION, 3)


def test_all_linears():
    """QKV reads a norm behind an add as well; attention's output is quantized by itself."""
    _, fused, _ = program(linears="all", skip=())
    assert count(fused, "dllm.fp8_linear") == 12
    assert count(fused, "dllm.swiglu_quant") == 3
    # Three norms of feed-forward parts, two of attentions; the first one reads the embedding, which no add precedes.
    assert count(fused, "dllm.add_rms_norm_quant") == 5
    assert count(fused, "dllm.rms_norm") == 2
    assert count(fused, "dllm.quantize") == 4


def test_a_value_that_is_read_elsewhere_is_kept():
    """A norm or activation in full precision that something else needs stays, and is quantized by itself."""
    _, gm, layers = wide()
    quantize(gm, layers)
    flatten(gm, layers)
    norm, swiglu = find(gm, OPS.quantized_linear.default)[0].args[0], find(gm, OPS.swiglu.default)[-1]
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    output.args = ((output.args[0], norm, swiglu),)
    gm.recompile()
    fused = share(gm)
    apply(fused, FUSE_QUANTIZATION, layers=layers)
    assert count(fused, "dllm.quantize") == 2
    assert count(fused, "dllm.add_rms_norm_quant") == count(fused, "dllm.swiglu_quant") == 1
    for expected, actual in zip(gm(**rows(5, 9)), fused(**rows(5, 9)), strict=True):
        assert torch.equal(expected, actual)


def test_a_norm_with_a_bias():
    """Its bias stands between norm and product."""
    gm, fused, _ = program(changes={"include_bias": True, "weight_tying": True})
    assert count(fused, "dllm.add_rms_norm_quant") == 0
    assert count(fused, "dllm.quantize") == 2
    assert count(fused, "dllm.swiglu_quant") == 2
    assert torch.equal(gm(**rows(5, 9)), fused(**rows(5, 9)))


def test_a_batch_of_sequences_is_refused():
    _, gm, layers = wide()
    quantize(gm, layers)
    assert_refused(gm, FUSE_QUANTIZATION, layers, "its input is a batch of sequences, not rows")
