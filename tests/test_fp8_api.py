# SPDX-License-Identifier: Apache-2.0
"""`optimize(model, precision="fp8")`: tokens, the model and its memory, updates of weights, refusals."""

from __future__ import annotations

import functools
import gc
import json
import sys

import pytest
import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig, acceptance, precision
from dllm_compile.cli import main
from dllm_compile.costs import program_costs, total
from dllm_compile.errors import (
    CertificateError,
    ConfigError,
    MissingPackageError,
    PassError,
    ReleasedWeightsError,
    StaleWeightsError,
)
from dllm_compile.fp8_weights import quantized_weights
from dllm_compile.passes.graph import lookup
from tests.passes.fp8_pieces import SIZES, wide_model
from tests.passes.pieces import Mini
from tests.real import model_logits, prompts_of
from tests.reference.fp8 import Fp8Rows
from tests.reference.plain_loop import plain_decode
from tests.runtime.policies import POLICIES, REFRESH_ALL
from tests.runtime.tiny import cached, options_of

pytest.importorskip("torchao")
SHORT = DecodingConfig(max_new_tokens=12, block_length=6)
STOPS = tuple(range(0, 126, 7))


def own_fast(release: bool = False, model: torch.nn.Module | None = None, **options):
    options = {"precision": "fp8", "compile": False, **options}
    return dllm_compile.optimize(wide_model() if model is None else model, release=release, **options)


@pytest.fixture(scope="module")
def fast():
    """Shared: tests must not change its weights."""
    return own_fast()


@pytest.fixture(scope="module")
def reference(fast):
    return Fp8Rows(fast.model)


def storages(*modules: torch.nn.Module) -> int:
    """Bytes of all storages behind parameters and buffers."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    tensors = [tensor for tensor in tensors if tensor.device.type != "meta"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def graphs(fast) -> list[torch.nn.Module]:
    return [fast._captured.gm, *(gm for _, gm in fast._snapshots), *(program.gm for program in fast.programs.built)]


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.3},
        {"factor": 1.0},
        {"frechet_margin": 0.2},
        {"temperature": 0.7, "seed": 3},
        {"cfg_scale": 0.6, "threshold": 0.3},
        {"cache": "lacache", "threshold": 0.3},
    ],
    ids=str,
)
def test_tokens_of_the_definition(fast, reference, options):
    """The plain loop over a model whose feed-forward layers round by the definition. LaCache on layer 0 is exact."""
    config = SHORT.replace(eos_token_id=STOPS, **options)
    prompts = prompts_of(5, 9, 1, seed=2)
    output = fast.generate(prompts, config)
    plain = options_of(config, fast.facts)
    for i, prompt in enumerate(prompts):
        expected = plain_decode(reference.forward, prompt.tolist(), plain, i)
        assert output.sequences[i, 9 - len(prompt) :].tolist() == expected.canvas
        assert output.stats.forwards_per_row[i] == expected.forwards


@pytest.mark.parametrize("policy", POLICIES)
def test_caches_and_suffixes(fast, reference, policy):
    """Token for token with the reference of each policy over rounded layers, ragged four and one alone."""
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    eos = "first" if policy.startswith("flash") else "block"
    config = SHORT.replace(threshold=0.2, eos=eos, eos_token_id=STOPS, **POLICIES[policy])
    expected = cached(reference, prompts, config, fast.facts)
    output = fast.generate(prompts, config)
    for row, prompt, one in zip(output.sequences, prompts, expected, strict=True):
        assert row[12 - len(prompt) :].tolist() == one.canvas
    assert fast.generate(prompts[0], config).sequences[0].tolist() == expected[0].canvas


@pytest.mark.parametrize("policy", REFRESH_ALL)
def test_refreshing_everything_equals_no_cache(fast, policy):
    prompts = prompts_of(4, 12, 7, 1, seed=5)
    config = SHORT.replace(threshold=0.2, eos_token_id=STOPS)
    plain, other = fast.generate(prompts, config), fast.generate(prompts, config, **REFRESH_ALL[policy])
    assert torch.equal(plain.sequences, other.sequences)


@pytest.mark.parametrize("names", [("fuse_quantization",), ("fuse_linear_add_norm",), ("pack_gate_up", "pack_qkv")])
def test_optional_passes_change_no_tokens(fast, names):
    without = own_fast(disable=names)
    without.generate([[3]], SHORT)
    used = {result.name for program in without.report().programs for result in program.passes}
    assert not used & set(names)
    prompts = prompts_of(5, 1, 8)
    for options in ({}, {"cache": "dual", "threshold": 0.3}):
        expected = fast.generate(prompts, SHORT, **options).sequences
        assert torch.equal(without.generate(prompts, SHORT, **options).sequences, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, pytest.param(8, marks=pytest.mark.long)])
def test_compiled(layers):
    """One program for all sizes, layers compiled once or each; as near as codes on the other side of a tie allow."""
    compiled, plain = (own_fast(model=wide_model(n_layers=layers), compile=choice) for choice in (True, False))
    for rows in (1, 2, 17, 40):
        ids = torch.randint(0, 120, (1, rows), generator=torch.Generator().manual_seed(rows))
        expected, actual = (fast(ids).logits for fast in (plain, compiled))
        assert (actual - expected).norm() / expected.norm() < 0.03, "FP8 itself is 0.07 to 0.2 away from the model"
    config = SHORT.replace(cache="dual", threshold=0.3)
    first, again = (compiled.generate(prompts_of(1, 9, 4), config).sequences for _ in range(2))
    assert torch.equal(first, again)
    assert all(program.compiled for program in compiled.programs.built)


def test_where_an_attention_was_refused():
    """No row programs: the same layers, sample by sample through the rectangular graph."""
    model = Mini(width=128, ffn=256, attend="causal")
    fast = own_fast(model=model, strict=False)
    assert fast.report().fp8.weights == 2
    ids = torch.arange(9)[None]
    error = (fast(ids).logits - model_logits(model, ids)).norm() / model_logits(model, ids).norm()
    assert 1e-3 < error < 0.1


# --- the user's model -----------------------------------------------------------------------------------------------


def test_the_model_is_not_modified():
    """Copies by default: parameters keep identity, values and the bytes they take."""
    model = wide_model()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    ids = torch.arange(12)[None]
    logits, size = model_logits(model, ids), storages(model)
    fast = own_fast(model=model)
    fast.generate([[3, 4, 5]], SHORT)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: one[0] for name, one in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert torch.equal(model_logits(model, ids), logits)
    assert storages(model) == size
    assert storages(model, *graphs(fast)) == unquantized_bytes() + fast.report().fp8.fp8_bytes


@functools.cache
def unquantized_bytes() -> int:
    """The model and its graphs (with their rotary tables) in the checkpoint's precision."""
    plain = dllm_compile.optimize(wide_model(), compile=False)
    plain.generate([[3, 4, 5]], SHORT)
    return storages(plain.model, *graphs(plain))


def test_layer_zero_and_the_rest_are_untouched(fast):
    """T8: what layers 1 and 2 multiply by are FP8 codes; every other weight is the user's own."""
    gm = fast._captured.gm
    for weight in quantized_weights(gm):
        assert weight.source.split(".")[2] in ("1", "2")
    own = {p.untyped_storage().data_ptr() for p in fast.model.parameters()}
    used = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    others = [path for path in used if lookup(gm, path).untyped_storage().data_ptr() not in own]
    # Codes and scales of two weights a layer, and two rotary tables.
    assert len(others) == 2 * 2 * 2 + 2


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disable", [(), ("pack_gate_up",)], ids=["packed", "unpacked"])
def test_release_frees_what_copies_replace(disable):
    """By formula: 3 C F values a layer leave, a byte for each and the scales come."""
    model = wide_model()
    width, inner, layers = SIZES["d_model"], SIZES["mlp_hidden_size"], SIZES["n_layers"]
    before = storages(model)
    fast = own_fast(release=True, model=model, disable=disable)
    fast.generate(prompts_of(4, 9), SHORT)
    gc.collect()
    values = (layers - 1) * 3 * width * inner
    report = fast.report().fp8
    assert report.replaced_bytes == 4 * values
    assert report.released_bytes == 4 * values
    assert storages(model) == before - 4 * values
    assert storages(model, *graphs(fast)) == unquantized_bytes() - 4 * values + report.fp8_bytes
    assert "released" in str(fast.report())


def test_every_reference_to_released_storage_is_emptied():
    """The parameter objects, whoever holds them, and the packed tensors in every graph that was kept for dumping."""
    model = wide_model()
    parameter = model.model.transformer["blocks"][1].up_proj.weight
    fast = own_fast(release=True, model=model)
    assert parameter.untyped_storage().nbytes() == 0
    packed = [
        buffer
        for gm in graphs(fast)
        for name, buffer in gm.named_buffers()
        # Graphs of before the packing hold stand-ins on the meta device.
        if name.endswith("1.gate_up_proj.weight") and buffer.device.type == "cpu"
    ]
    assert packed
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in packed)


def test_tokens_after_release(fast, tmp_path):
    released = own_fast(release=True)
    prompts = prompts_of(5, 1, 8)
    for options in ({}, {"cache": "lacache"}, {"cache": "flash", "threshold": 0.3}):
        expected = fast.generate(prompts, SHORT, **options).sequences
        assert torch.equal(released.generate(prompts, SHORT, **options).sequences, expected)
    assert len(released.dump_graphs(tmp_path)) > 10


def test_a_released_model_says_so():
    fast = own_fast(release=True)
    model = fast.model
    for call in (
        lambda: model(torch.arange(5)[None]),
        lambda: model.model.transformer["blocks"][1].ff_proj(torch.zeros(1, 128)),
        model.state_dict,
        lambda: model.load_state_dict({}, strict=False),
        lambda: dllm_compile.optimize(model),
    ):
        with pytest.raises(
            ReleasedWeightsError, match=r"blocks\.1\.ff_proj were freed by optimize.*Load the model again"
        ):
            call()
    with pytest.raises(ReleasedWeightsError, match="nothing to quantize again: load the updated model"):
        fast.refresh_weights()
    block = model.model.transformer["blocks"][1]
    assert block.ff_proj.weight.device.type == "meta"
    assert block.ff_proj.weight.shape == (256, 128)
    assert block.q_proj(torch.zeros(1, 128)).shape == (1, 128), "what was not quantized still runs"


def test_a_weight_that_is_read_elsewhere_is_not_released():
    """Layers 0 and 1 share a down projection, and layer 0 is not quantized."""
    model = wide_model()
    blocks = model.model.transformer["blocks"]
    blocks[1].ff_out.weight = blocks[0].ff_out.weight
    fast = own_fast(release=True, model=model)
    assert blocks[1].ff_out.weight is blocks[0].ff_out.weight
    assert blocks[0].ff_out.weight.device.type == "cpu"
    assert any("ff_out.weight is not released" in note for note in fast.report().notes)
    assert fast.report().fp8.released_bytes == 4 * (2 * 2 + 1) * 128 * 256
    fast.generate([[3, 4]], SHORT)
    with torch.no_grad():
        blocks[0].ff_out.weight.mul_(2)
    with pytest.raises(StaleWeightsError, match="FP8 copies are older"):
        fast.generate([[3, 4]], SHORT)


def test_release_needs_fp8():
    with pytest.raises(ConfigError, match="release=True frees what FP8 copies replace, and precision='checkpoint'"):
        dllm_compile.optimize(wide_model(), release=True, compile=False)
    with pytest.raises(ConfigError, match="release must be True or False"):
        own_fast(release="yes")
    fast = own_fast(release=True, precision="auto")
    assert any("freed nothing" in note for note in fast.report().notes)
    assert model_logits(fast.model, torch.arange(5)[None]).isfinite().all()


def test_a_refusal_comes_before_anything_is_freed(monkeypatch):
    model = wide_model()
    before = storages(model)
    monkeypatch.setattr(acceptance, "FP8_LOGITS_BOUND", 60.0)
    with pytest.raises(CertificateError, match=r"in FP8 the logits of LLaDAModel keep \d\d\.\d dB.*fp8_skip_layers"):
        own_fast(release=True, model=model)
    assert storages(model) == before
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    dllm_compile.optimize(model, compile=False)


# --- updates --------------------------------------------------------------------------------------------------------


def test_updates_in_place_need_a_refresh():
    fast = own_fast()
    prompts, ids = prompts_of(4, 7), torch.arange(11)[None]
    first = fast.generate(prompts, SHORT).sequences
    buffers = {w.codes: lookup(fast._captured.gm, w.codes).data_ptr() for w in quantized_weights(fast._captured.gm)}
    other = wide_model(seed=9)
    fast.model.load_state_dict(other.state_dict())
    for call in (lambda: fast.generate(prompts, SHORT), lambda: fast(ids)):
        with pytest.raises(StaleWeightsError, match=r"6 parameters were updated in place.*call refresh_weights\(\)"):
            call()
    fast.refresh_weights()
    expected = own_fast(model=other)
    assert torch.equal(fast.generate(prompts, SHORT).sequences, expected.generate(prompts, SHORT).sequences)
    assert torch.equal(fast(ids).logits, expected(ids).logits)
    assert not torch.equal(fast.generate(prompts, SHORT).sequences, first)
    after = {w.codes: lookup(fast._captured.gm, w.codes).data_ptr() for w in quantized_weights(fast._captured.gm)}
    assert after == buffers, "captured graphs read these addresses"
    fast.refresh_weights()
    assert torch.equal(fast(ids).logits, expected(ids).logits)


def test_other_weights_are_followed_without_a_refresh():
    fast = own_fast()
    blocks, ids = fast.model.model.transformer["blocks"], torch.arange(11)[None]
    first = fast(ids).logits
    with torch.no_grad():
        blocks[0].ff_out.weight.mul_(1.5)
        blocks[1].q_proj.weight.mul_(0.5)
        blocks[2].ff_norm.weight.add_(0.1)
    assert not torch.equal(fast(ids).logits, first)
    expected = Fp8Rows(fast.model).forward(ids)
    assert (fast(ids).logits - expected).norm() / expected.norm() < 3e-3


def test_optimizer_steps_are_noticed():
    fast = own_fast()
    parameters = [p for p in fast.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    model_out = fast.model(torch.arange(6)[None]).logits
    model_out.square().mean().backward()
    optimizer.step()
    with pytest.raises(StaleWeightsError, match="refresh_weights"):
        fast.generate([[3]], SHORT)
    fast.refresh_weights()
    fast.generate([[3]], SHORT)


def test_replaced_parameters_are_refused_as_ever():
    fast = own_fast()
    fast.model.double()
    for call in (lambda: fast.generate([[3]], SHORT), fast.refresh_weights):
        with pytest.raises(StaleWeightsError, match="replaced, moved or converted"):
            call()


def test_refresh_without_fp8_does_nothing():
    fast = dllm_compile.optimize(wide_model(), compile=False)
    fast.refresh_weights()
    assert fast.report().fp8 is None


# --- what was asked for and what is there ---------------------------------------------------------------------------


def test_auto_on_a_cpu():
    fast = own_fast(precision="auto")
    assert fast.report().fp8 is None
    assert any("precision='auto' stays with the checkpoint's: a CPU gains nothing" in n for n in fast.report().notes)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_cards(monkeypatch, capability):
    """Decided from the compute capability, before anything is quantized."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    device, config = torch.device("cuda"), CompileConfig(precision="fp8")
    auto = config.replace(precision="auto")
    if capability >= (8, 9):
        assert precision.decide(config, device, torch.bfloat16, 3) == (True, None)
        assert precision.decide(auto, device, torch.bfloat16, 3) == (True, None)
    else:
        with pytest.raises(
            ConfigError, match=r"compute capability 8\.9 or more, and cuda has 8\.0.*'checkpoint' or 'auto'"
        ):
            precision.decide(config, device, torch.bfloat16, 3)
        fp8, note = precision.decide(auto, device, torch.bfloat16, 3)
        assert not fp8
        assert "8.9 or more" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8_skip_layers": (0, 3)}, "names layers of a model that has 3"),
        ({"fp8_skip_layers": (0, 1, 2)}, "leaves none of 3 layers"),
        ({"precision": "checkpoint", "fp8_granularity": "row"}, "fp8_granularity belongs to precision='fp8' or 'auto'"),
        ({"precision": "checkpoint", "fp8_linears": "all"}, "fp8_linears belongs to precision"),
        ({"precision": "checkpoint", "fp8_skip_layers": ()}, "fp8_skip_layers belongs to precision"),
        ({"fp8_skip_layers": "first"}, "must be layer numbers"),
        ({"fp8_skip_layers": (-1,)}, "must name layers from 0 on"),
        ({"fp8_granularity": "block"}, "choose one of 'group', 'row', 'tensor'"),
        ({"precision": "int8"}, "choose one of 'checkpoint', 'fp8', 'auto'"),
        ({"precision": True}, "choose one of"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        own_fast(**options)


def test_a_dtype_that_is_not_quantized():
    with pytest.raises(ConfigError, match="float64 weights are not quantized"):
        own_fast(model=wide_model(dtype=torch.float64))


def test_widths_that_do_not_divide():
    model = wide_model(mlp_hidden_size=192)
    with pytest.raises(PassError, match=r"quantize_ffn_fp8 rewrote 0 of 2 regions(.|\n)*128 x 192 does not divide"):
        own_fast(model=model)
    fast = own_fast(model=model, strict=False)
    assert fast.report().fp8 is None
    assert "left as it was - quantize_ffn_fp8: " in str(fast.report())
    row = own_fast(model=model, fp8_granularity="row")
    assert row.report().fp8.weights == 4


def test_without_torchao(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingPackageError, match=r"pip install -e .\.\[fp8\]"):
        own_fast()


# Each dtype and each granularity; the other pairs with `-m long`.
SIXTEEN = {("group", torch.bfloat16): (), ("row", torch.float16): (), ("tensor", torch.bfloat16): ()}


@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [
        pytest.param(granularity, dtype, marks=SIXTEEN.get((granularity, dtype), pytest.mark.long))
        for granularity in ("group", "row", "tensor")
        for dtype in (torch.bfloat16, torch.float16)
    ],
    ids=str,
)
def test_sixteen_bit_models(dtype, granularity):
    fast = own_fast(model=wide_model(dtype=dtype), fp8_granularity=granularity)
    assert fast(torch.arange(9)[None]).logits.dtype == dtype
    assert fast.report().fp8.worst_sqnr > 25
    assert torch.equal(*(fast.generate(prompts_of(4, 7), SHORT).sequences for _ in range(2)))


# --- report, costs, command line ------------------------------------------------------------------------------------


def test_report(fast):
    fast.generate([[3]], SHORT)
    report = fast.report()
    assert report.logits_error <= 1e-5, "the exact part is certified by itself"
    (result,) = (result for result in report.passes if result.name == "quantize_ffn_fp8")
    assert (result.matches, result.required, result.level.value) == (2, 2, "numeric")
    assert result.error == max(region.error for region in result.regions)
    fp8 = report.fp8
    assert (fp8.granularity, fp8.linears, fp8.skipped, fp8.weights) == ("group", "ffn", (0,), 4)
    assert fp8.replaced_bytes == 4 * 2 * 3 * 256 * 128
    assert fp8.released_bytes == 0
    assert fp8.worst_sqnr == min(region.sqnr for region in result.regions)
    assert 15 < fp8.logits_sqnr < 35
    text = str(report)
    assert (
        "FP8 (feed-forward, a scale a group, layers left out: 0): 4 weights, 0.2 MiB for 0.8 MiB, kept with the" in text
    )
    assert f"FP8 keeps {fp8.worst_sqnr:.1f} dB of the worst product" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["fp8"]["logits_sqnr"] == fp8.logits_sqnr
    assert data["passes"][-1]["regions"][0]["where"] == "transformer.blocks.1.gate_up_proj"


def test_costs(fast):
    """FP8 products by formula: twice C F 3 multiply-adds a row and layer, a byte a weight."""
    plain = dllm_compile.optimize(wide_model(), compile=False)
    n = 10
    rows = torch.zeros(n, dtype=torch.int64)
    inputs = {"ids": rows, "positions": rows, "tiles": torch.tensor([[0, n, 0, n]], dtype=torch.int32)}
    ours, theirs = (total(program_costs(one.programs.forward_program().gm, inputs)) for one in (fast, plain))
    products = 2 * 2 * n * 3 * 128 * 256
    assert (ours.fp8_flops, theirs.fp8_flops) == (products, 0)
    assert ours.flops == theirs.flops
    # Each quantized weight: three bytes of four saved; what activations save comes on top.
    assert theirs.bytes - ours.bytes > 3 * 2 * 3 * 256 * 128
    calls = program_costs(fast.programs.forward_program().gm, inputs)
    gate_up = [call for call in calls if call.operator == "dllm.fp8_linear"]
    # Codes and scales of the rows, of the weight [512, 128], and the fp32 result.
    assert {call.bytes for call in gate_up} == {n * 128 + 4 * n + 512 * 128 + 4 * 4 + 4 * n * 512}
    assert {call.flops for call in gate_up} == {2 * n * 512 * 128}


def test_command_line(monkeypatch, capsys):
    from dllm_compile import _checkpoints

    monkeypatch.setattr(_checkpoints, "load", lambda *_, **__: _checkpoints.Checkpoint(wide_model(), None, "tiny"))
    assert main(["report", "--precision", "fp8", "--no-compile"]) == 0
    assert "FP8 keeps" in capsys.readouterr().out
    assert main(["report", "--precision", "auto", "--no-compile"]) == 0
    assert "precision='auto' stays with the checkpoint's" in capsys.readouterr().out
