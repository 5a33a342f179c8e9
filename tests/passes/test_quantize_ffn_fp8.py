# SPDX-License-Identifier: Apache-2.0
"""`quantize_ffn_fp8`: which layers become FP8, what they compute, what is kept of the rest, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from dllm_compile.errors import PassError
from dllm_compile.fp8_weights import GROUPS, fp8_bytes, quantize_weight, quantized_weights, sources_of
from dllm_compile.passes.framework import Level
from dllm_compile.passes.graph import find, lookup
from dllm_compile.passes.pack_gate_up import PACK_GATE_UP
from dllm_compile.passes.packing import packed
from dllm_compile.passes.quantize_ffn_fp8 import SQNR_BOUND, quantize_ffn_fp8_pass
from tests.reference.fp8 import MAGNITUDES, Fp8Rows, nearest, rounded_rows, rounded_weight

from .fp8_pieces import canonical_of, quantize, wide, wide_model
from .pieces import Mini, apply, assert_idempotent, assert_refused, capture_mini, count, listing, logits, normalized

pytest.importorskip("torchao")
OPERATOR = torch.ops.dllm.quantized_linear.default


def weights_of(gm) -> list[str]:
    return [weight.source.removeprefix("transformer.blocks.") for weight in quantized_weights(gm)]


# --- the reference itself -------------------------------------------------------------------------------------------


def test_the_table_holds_every_number():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.double(), MAGNITUDES)


def test_the_nearest_number():
    """Ties to the even code; torch's own conversion agrees within the range."""
    x = torch.cat([MAGNITUDES, (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2, torch.linspace(0, 448, 4001).double()]).float()
    x = torch.cat([x, -x])
    assert torch.equal(nearest(x), x.to(torch.float8_e4m3fn).float())
    assert nearest(torch.tensor([449.0, 1e6, -torch.inf])).tolist() == [448.0, 448.0, -448.0]


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", GROUPS)
def test_weights_by_definition(granularity, dtype, rng):
    """Codes times scales are the rounded weight, zeros included; a block of zeros has scale 1."""
    weight = torch.randn(256, 384, generator=rng)
    weight[:128, 128:256], weight[7] = 0, 0
    weight = weight.to(dtype)
    codes, scales = quantize_weight(weight, GROUPS[granularity])
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == {"group": (2, 3), "row": (256, 1), "tensor": (1, 1)}[granularity]
    block = [size // parts for size, parts in zip(weight.shape, scales.shape, strict=True)]
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(codes.float() * wide, rounded_weight(weight, granularity))
    if granularity == "group":
        assert scales[0, 1] == 1
    if granularity == "row":
        assert scales[7] == 1


@pytest.mark.parametrize("granularity", GROUPS)
def test_codes_and_scales_are_those_of_torchao(granularity, rng):
    from torchao.quantization import Float8Tensor, PerBlock, PerRow, PerTensor

    weight = torch.randn(384, 256, generator=rng)
    theirs = {"group": PerBlock([128, 128]), "row": PerRow(), "tensor": PerTensor()}[granularity]
    expected = Float8Tensor.from_hp(weight, granularity=theirs)
    codes, scales = quantize_weight(weight, GROUPS[granularity])
    assert torch.equal(codes.view(torch.uint8), expected.qdata.view(torch.uint8))
    assert torch.equal(scales, expected.scale)


@pytest.mark.parametrize("granularity", ["group", "row"])
def test_a_group_does_not_reach_into_others(granularity, rng):
    """T6, weights and activations: bytes outside the changed group stay."""
    weight = torch.randn(256, 256, generator=rng)
    other = weight.clone()
    other[128:, 128:] *= 1000  # one block, and the second half of the last 128 rows
    (before, _), (after, _) = (quantize_weight(one, GROUPS[granularity]) for one in (weight, other))
    same = before.view(torch.uint8) == after.view(torch.uint8)
    assert same[:128].all()
    if granularity == "group":
        assert same.all(), "a block that is scaled has the same codes"
        other[130, 140] *= 1000
        same = before.view(torch.uint8) == quantize_weight(other, 128)[0].view(torch.uint8)
        assert same[:, :128].all()
        assert same[:128].all()
        assert not same[128:, 128:].all()
    codes, scales = torch.ops.dllm.quantize(weight, GROUPS[granularity])
    weight[9, 130:] += 5000
    new_codes, new_scales = torch.ops.dllm.quantize(weight, GROUPS[granularity])
    changed = (codes.view(torch.uint8) != new_codes.view(torch.uint8)).nonzero()
    assert set(changed[:, 0].tolist()) == {9}
    assert (granularity == "row") or (changed[:, 1] >= 128).all()
    assert set((scales != new_scales).nonzero()[:, 0].tolist()) == {9}


# --- one product ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GROUPS)
def test_a_product_of_rounded_values(granularity, rng):
    """T5: within 1e-3 of each row's norm of the product of the rounded operands, in fp32; batches of sequences too."""
    x = torch.randn(2, 9, 256, generator=rng) * torch.logspace(-3, 3, 9)[:, None]
    weight = torch.randn(128, 256, generator=rng)
    group = GROUPS[granularity]
    actual = OPERATOR(x, *quantize_weight(weight, group), group)
    expected = rounded_rows(x.flatten(0, 1), granularity) @ rounded_weight(weight, granularity).T
    assert actual.shape == (2, 9, 128)
    # With one scale for all rows, small ones round to zeros.
    assert ((actual.flatten(0, 1) - expected).norm(dim=1) <= 1e-3 * expected.norm(dim=1)).all()


def test_large_values_saturate():
    """T5: a code is at most 448, whatever its group holds; zeros stay zeros."""
    x = torch.zeros(3, 256)
    x[0, 0], x[1, 200] = 3e38, -1e-38
    codes, scales = torch.ops.dllm.quantize(x, 128)
    assert not codes.float().isnan().any()
    assert codes.float().abs().max() == 448
    assert scales[2].tolist() == [1, 1]
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert OPERATOR(x, *quantize_weight(weight, 128), 128).isfinite().all()
    assert (OPERATOR(x, *quantize_weight(weight, 128), 128)[2] == 0).all()


def test_the_operator_is_registered_properly(rng):
    weight = quantize_weight(torch.randn(128, 256, generator=rng), 128)
    # The schema check multiplies tensors of codes, which torch cannot.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATOR, (torch.randn(2, 3, 256, generator=rng), *weight, 128), test_utils=checks)
    with pytest.raises(ValueError, match=r"x must be \[\*, K\]"):
        OPERATOR(torch.zeros(3, 128), *weight, 128)
    with pytest.raises(ValueError, match="not a multiple of the group size 128"):
        OPERATOR(torch.zeros(3, 96), *quantize_weight(torch.randn(128, 96, generator=rng), 0), 128)


# --- the pass -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "unpacked"])
def test_counts_and_what_is_left_alone(pack):
    """T8: layer 0, attention, norms, embedding and head read the weights they read before."""
    gm, layers = wide(pack=pack)[1:]
    before = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    linears = count(gm, "aten.linear")
    result = quantize(gm, layers)
    after = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    assert (result.matches, result.required, result.level) == (2, 2, Level.NUMERIC)
    names = ["gate_up_proj", "ff_out"] if pack else ["ff_proj", "up_proj", "ff_out"]
    assert weights_of(gm) == [f"{layer}.{name}.weight" for layer in (1, 2) for name in names]
    assert count(gm, "dllm.quantized_linear") == 2 * len(names)
    assert count(gm, "aten.linear") == linears - 2 * len(names)
    gone = {f"transformer.blocks.{name}" for name in weights_of(gm)}
    assert before - after == gone
    assert after - before == {f"{name}_{part}" for name in gone for part in ("codes", "scales")}
    assert_idempotent(gm, quantize_ffn_fp8_pass(128, (0,), "ffn", required=False), layers)


@pytest.mark.parametrize("linears", ["ffn", "all"])
@pytest.mark.parametrize("skip", [(), (0,), (0, 2), (1,)], ids=str)
def test_layers_and_linears(skip, linears):
    gm, layers = wide()[1:]
    result = quantize(gm, layers, skip=skip, linears=linears)
    names = ["qkv_proj", "attn_out", "gate_up_proj", "ff_out"] if linears == "all" else ["gate_up_proj", "ff_out"]
    chosen = [layer for layer in range(3) if layer not in skip]
    assert weights_of(gm) == [f"{layer}.{name}.weight" for layer in chosen for name in names]
    assert result.matches == len(chosen) * len(names) // 2


@pytest.mark.parametrize("linears", ["ffn", "all"])
@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 2, "scale_logits": True, "input_emb_norm": True}], ids=str)
def test_logits_are_those_of_the_definition(granularity, linears, changes):
    """A thirtieth of what FP8 itself costs is left for codes that fall on the other side of a tie."""
    model, gm, layers = wide(**changes)
    quantize(gm, layers, granularity=granularity, linears=linears)
    ids = torch.randint(0, 120, (1, 17), generator=torch.Generator().manual_seed(1))
    reference = Fp8Rows(model, granularity, (0,), linears)
    if changes:
        # The reference has no scaled embedding and head: factors on weights that nothing else reads.
        reference.weights["model.transformer.wte.weight"] = model.model.wte.weight.detach() * 128**0.5
        head = model.model.transformer["ff_out"].weight.detach()
        reference.weights["model.transformer.ff_out.weight"] = head / 128**0.5
    expected, exact = reference.forward(ids), logits(model, ids)
    cost = ((expected - exact).norm() / exact.norm()).item()
    assert 0.01 < cost < 0.2
    assert (logits(gm, ids) - expected).norm() / expected.norm() < cost / 30


def test_errors_are_kept():
    """Each product's error on random ids, and the worst one of a pass as its certificate."""
    gm, layers = wide()[1:]
    result = quantize(gm, layers)
    assert [region.where.removeprefix("transformer.blocks.") for region in result.regions] == [
        name.removesuffix(".weight") for name in weights_of(gm)
    ]
    assert result.error == max(region.error for region in result.regions)
    for region in result.regions:
        assert math.isclose(region.sqnr, -20 * math.log10(region.error))
        assert 27 < region.sqnr < 30.5, "FP8's own error is 28.7 dB"


def test_biases_of_the_feed_forward_part():
    """Added behind the product, packed or not."""
    model = Mini(width=128, ffn=256, bias="gate up")
    for pack in (True, False):
        gm = normalized(capture_mini(model).gm)
        if pack:
            apply(gm, PACK_GATE_UP)
        with packed(gm):
            result = quantize(gm, 2)
            assert result.matches == 1
            assert result.regions[0].sqnr > 25
            ids = torch.arange(9)[None]
            expected = logits(model, ids)
            assert (logits(gm, ids) - expected).norm() / expected.norm() < 0.1


def test_bytes():
    gm, layers = wide()[1:]
    quantize(gm, layers)
    # Two layers of 3 x [256, 128]: a byte a value; scales of gate and up [4, 1], of down [1, 2], in rows of 4 numbers.
    assert sum(lookup(gm, weight.codes).nbytes for weight in quantized_weights(gm)) == 2 * 3 * 256 * 128
    assert fp8_bytes(gm) == 2 * (3 * 256 * 128 + 4 * (4 * 4 + 1 * 4))
    assert set(sources_of(gm)["transformer.blocks.1.gate_up_proj.weight"]) == {
        f"transformer.blocks.1.{name}.weight" for name in ("ff_proj", "up_proj")
    }


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "granularity", "reason"),
    [
        ({"mlp_hidden_size": 192}, "group", "a weight of 128 x 192 does not divide into groups of 128"),
        ({"d_model": 192, "n_heads": 3}, "group", "a weight of 512 x 192 does not divide into groups of 128"),
        ({"mlp_hidden_size": 200}, "row", "a weight of 128 x 200 does not divide into groups of 16"),
        ({"mlp_hidden_size": 200}, "tensor", "a weight of 128 x 200 does not divide into groups of 16"),
    ],
    ids=str,
)
def test_widths_that_do_not_divide(changes, granularity, reason):
    gm, layers = wide(**changes)[1:]
    step = quantize_ffn_fp8_pass(GROUPS[granularity], (0,), "ffn", required=True)
    result = assert_refused(gm, step, layers, reason)
    assert len(result.refusals) == 2
    assert quantized_weights(gm) == ()
    with pytest.raises(PassError, match=r"quantize_ffn_fp8 rewrote 0 of 2 regions(.|\n)*does not divide"):
        quantize(gm, layers, granularity=granularity)


@pytest.mark.parametrize("kind", ["chunked", "gelu", "one projection"])
def test_a_layer_without_such_a_part_is_said(kind):
    """Never silently left in the checkpoint's precision."""
    gm = normalized(capture_mini(Mini(width=128, ffn=256, ffn_kind=kind)).gm, strict=False)
    step = quantize_ffn_fp8_pass(128, (0,), "ffn", required=True)
    assert_refused(gm, step, 2, "the layer has 0 gated feed-forward parts in canonical form, not one")


def test_attention_that_was_refused():
    gm = normalized(capture_mini(Mini(width=128, ffn=256, attend="causal")).gm, strict=False)
    result = quantize(gm, 2, linears="all", strict=False)
    assert [refusal.reason for refusal in result.refusals] == ["the attention is not in canonical form"]
    assert result.matches == 1, "the feed-forward part is quantized all the same"


def test_an_output_projection_with_a_bias():
    gm, layers = wide(include_bias=True, weight_tying=True)[1:]
    result = quantize(gm, layers, linears="all", strict=False)
    assert {refusal.reason for refusal in result.refusals} == {"the output projection has a bias"}
    assert result.matches == 2


def test_a_product_that_loses_too_much():
    """One huge weight in a tensor with one scale: what is small beside it rounds to nothing."""
    model = wide_model(n_layers=2)
    with torch.no_grad():
        model.model.transformer["blocks"][1].ff_out.weight[3, 5] = 3e4
        # What that weight reads is zero, so that the model's own output does not drown in it.
        model.model.transformer["blocks"][1].up_proj.weight[5] = 0
    gm, layers = canonical_of(model)
    before = listing(gm)
    result = quantize(gm, layers, granularity="tensor", strict=False)
    assert result.matches == 0
    assert listing(gm) == before
    (refusal,) = result.refusals
    assert f"less than {SQNR_BOUND:.0f}" in refusal.reason
    assert "ff_out keeps" in refusal.reason
    assert quantize(gm, layers, granularity="row").matches == 1, "with a scale a row only that row suffers"


def test_find_is_ordered():
    """Layers are counted by attention: a refused feed-forward part does not shift the numbers."""
    gm, layers = wide()[1:]
    quantize(gm, layers, skip=(0, 1))
    paths = {str(node.args[1].target) for node in find(gm, OPERATOR)}
    assert all(path.startswith("transformer.blocks.2.") for path in paths)
