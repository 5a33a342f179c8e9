# SPDX-License-Identifier: Apache-2.0
"""`fuse_linear_add_norm`: which chains become one operator, and that the numbers stay."""

from __future__ import annotations

from operator import getitem

import pytest
import torch

from dllm_compile.passes import flatten_rows_pass, head_passes, insert_kv_cache_pass, insert_lacache_pass
from dllm_compile.passes.fuse_linear_add_norm import FUSE_LINEAR_ADD_NORM
from dllm_compile.passes.fuse_quantization import FUSE_QUANTIZATION
from dllm_compile.passes.graph import aten, find, share

from .fp8_pieces import flatten, quantize, rows, wide
from .pieces import apply, assert_idempotent, count

OPS = torch.ops.dllm
FLAT = flatten_rows_pass(0)


@pytest.fixture
def plain():
    """A forward program in the checkpoint's precision."""
    _, gm, layers = wide()
    flatten(gm, layers)
    return gm


def test_every_projection_back_to_the_stream(plain):
    """Three output projections and three down projections, the last with the final norm."""
    fused = share(plain)
    (result,) = apply(fused, FUSE_LINEAR_ADD_NORM, layers=3)
    assert result.matches == count(fused, "dllm.linear_add_rms_norm") == 6
    assert count(fused, "aten.add") == 0
    assert count(fused, "dllm.rms_norm") == 1, "the first norm reads the embedding"
    assert count(fused, "aten.linear") == 6
    for lengths in ((7,), (1, 19, 4)):
        assert torch.equal(plain(**rows(*lengths)), fused(**rows(*lengths))), "in fp32 the reference is the same sums"
    assert_idempotent(fused, FUSE_LINEAR_ADD_NORM, 3)


@pytest.mark.parametrize("granularity", ["group", "row", "tensor"])
def test_quantized_layers(granularity):
    pytest.importorskip("torchao")
    _, gm, layers = wide()
    quantize(gm, layers, granularity=granularity)
    flatten(gm, layers)
    fused = share(gm)
    apply(fused, FUSE_QUANTIZATION, FUSE_LINEAR_ADD_NORM, layers=layers)
    # Layer 0: out and down in full precision. Layers 1 and 2: out before the quantizing norm, FP8 down before a norm.
    assert count(fused, "dllm.linear_add_rms_norm") == 2
    assert count(fused, "dllm.linear_add_rms_norm_quant") == 2
    assert count(fused, "dllm.fp8_linear_add_rms_norm") == 2
    assert count(fused, "dllm.fp8_linear") == 2
    assert count(fused, "dllm.add_rms_norm_quant") == count(fused, "aten.add") == 0
    for lengths in ((7,), (1, 19, 4)):
        assert torch.equal(gm(**rows(*lengths)), fused(**rows(*lengths)))
    assert_idempotent(fused, FUSE_LINEAR_ADD_NORM, layers)


def test_all_linears_in_fp8():
    """No operator takes an FP8 product into a quantizing norm: those stay two."""
    pytest.importorskip("torchao")
    _, gm, layers = wide()
    quantize(gm, layers, linears="all")
    flatten(gm, layers)
    fused = share(gm)
    apply(fused, FUSE_QUANTIZATION, FUSE_LINEAR_ADD_NORM, layers=layers)
    assert count(fused, "dllm.add_rms_norm_quant") == 3
    assert count(fused, "dllm.linear_add_rms_norm_quant") == 1, "layer 0's down projection into layer 1's QKV"
    assert count(fused, "dllm.linear_add_rms_norm") == 1
    assert count(fused, "dllm.fp8_linear_add_rms_norm") == 1, "the last layer's, with the final norm"
    assert torch.equal(gm(**rows(5, 9)), fused(**rows(5, 9)))


@pytest.mark.parametrize("guided", [False, True], ids=["", "guided"])
def test_the_last_layer_of_a_step(guided):
    """Its rows are selected before: the output projection reads them, the down projection takes the final norm."""
    _, gm, layers = wide()
    apply(gm, FLAT, *head_passes(127, sampled=False, guided=guided), FUSE_LINEAR_ADD_NORM, layers=layers)
    assert count(gm, "dllm.linear_add_rms_norm") == 6
    assert count(gm, "aten.linear") == 6, "packed projections"
    *_, out, down = find(gm, OPS.linear_add_rms_norm.default)
    assert [node.target for node in (out.args[0], out.args[2])] == [aten.index_select.default] * 2
    assert down.args[3].target == "transformer.ln_f.weight"
    assert down.args[2].args == (out, 0)


def test_the_last_layer_of_a_quantized_step():
    """Out projection into the quantizing norm, FP8 down projection into the final norm, both of wanted rows."""
    pytest.importorskip("torchao")
    _, gm, layers = wide()
    quantize(gm, layers)
    passes = (FLAT, insert_kv_cache_pass(), *head_passes(127), FUSE_QUANTIZATION, FUSE_LINEAR_ADD_NORM)
    apply(gm, *passes, layers=layers)
    (wanted,) = (node for node in gm.graph.nodes if node.op == "placeholder" and node.target == "wanted")
    size = wanted.meta["val"].shape[0]
    out = find(gm, OPS.linear_add_rms_norm_quant.default)[-1]
    down = find(gm, OPS.fp8_linear_add_rms_norm.default)[-1]
    for node in (out, find(gm, OPS.swiglu_quant.default)[-1], down):
        assert node.meta["val"][0].shape[0] == size
    # Layer 0: out and down. Layers 1 and 2: out before the quantizing norm, FP8 down before a norm, gate and up.
    assert count(gm, "dllm.linear_add_rms_norm") == 2
    assert count(gm, "dllm.linear_add_rms_norm_quant") == 2
    assert count(gm, "dllm.fp8_linear_add_rms_norm") == 2
    assert count(gm, "dllm.fp8_linear") == 2


@pytest.mark.parametrize("kind", ["first", "step"])
def test_lacache(kind):
    _, gm, layers = wide()
    apply(gm, FLAT, insert_lacache_pass((0, 1), kind), *head_passes(127), FUSE_LINEAR_ADD_NORM, layers=layers)
    # In a step, layer 1's norm reads selected rows of the stream.
    assert count(gm, "dllm.linear_add_rms_norm") == (6 if kind == "first" else 5)


def test_cached_steps():
    _, gm, layers = wide()
    apply(gm, FLAT, insert_kv_cache_pass(), *head_passes(127), FUSE_LINEAR_ADD_NORM, layers=layers)
    assert count(gm, "dllm.linear_add_rms_norm") == 6
    assert count(gm, "dllm.qkv_rope_cache_write") == 3


def test_biases_are_left_alone():
    _, gm, layers = wide(include_bias=True, weight_tying=True)
    flatten(gm, layers)
    (result,) = apply(gm, FUSE_LINEAR_ADD_NORM, layers=layers)
    assert result.matches == 0


def test_a_product_that_is_read_elsewhere_is_left_alone(plain):
    first = next(node for node in find(plain, aten.linear.default) if "attn_out" in str(node.args[1].target))
    output = next(node for node in reversed(plain.graph.nodes) if node.op == "output")
    output.args = ((output.args[0], first),)
    plain.recompile()
    fused = share(plain)
    assert apply(fused, FUSE_LINEAR_ADD_NORM, layers=3)[0].matches == 5
    for expected, actual in zip(plain(**rows(5, 9)), fused(**rows(5, 9)), strict=True):
        assert torch.equal(expected, actual)


def test_the_product_may_stand_on_either_side(plain):
    """`linear + stream` as well as `stream + linear`."""
    for add in find(plain, aten.add.Tensor):
        add.args = add.args[::-1]
    plain.recompile()
    fused = share(plain)
    assert apply(fused, FUSE_LINEAR_ADD_NORM, layers=3)[0].matches == 6
    assert torch.equal(plain(**rows(5, 9)), fused(**rows(5, 9)))


def test_a_sum_under_two_norms(plain):
    """The first norm takes the product with it, the second reads the sum."""
    norm = find(plain, OPS.rms_norm.default)[1]
    with plain.graph.inserting_after(norm):
        again = plain.graph.call_function(OPS.rms_norm.default, norm.args)
    again.meta = dict(norm.meta)
    output = next(node for node in reversed(plain.graph.nodes) if node.op == "output")
    output.args = ((output.args[0], again),)
    plain.recompile()
    fused = share(plain)
    assert apply(fused, FUSE_LINEAR_ADD_NORM, layers=3)[0].matches == 6
    second = next(node for node in find(fused, OPS.rms_norm.default) if node.args[0].target is getitem)
    assert second.args[0].args[0].target is OPS.linear_add_rms_norm.default
    for expected, actual in zip(plain(**rows(5, 9)), fused(**rows(5, 9)), strict=True):
        assert torch.equal(expected, actual)


def test_a_batch_of_sequences_is_left_alone():
    _, gm, layers = wide()
    assert apply(gm, FUSE_LINEAR_ADD_NORM, layers=layers)[0].matches == 0
