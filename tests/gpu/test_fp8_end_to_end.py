# SPDX-License-Identifier: Apache-2.0
"""FP8 layers on a card: programs, tokens, memory, graphs, and the fused projections of 16-bit models."""

from __future__ import annotations

import gc

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile._compat import has_fp8
from dllm_compile.certify import decibels, relative_error
from dllm_compile.fp8_weights import quantized_weights
from dllm_compile.passes.graph import lookup
from dllm_compile.runtime.programs import CUDA_TILE_ROWS
from dllm_compile.runtime.row_programs import StepInputs
from tests.conftest import tiny_model
from tests.gpu.op_by_op import OpByOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not has_fp8(torch.device("cuda")), reason="needs compute capability 8.9"
    ),
]
pytest.importorskip("torchao")

SIZES = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "mlp_hidden_size": 512, "init_std": 0.06}
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], list(range(20, 90)), [5] * 33]


def model_of(device: str, dtype: torch.dtype = torch.bfloat16, **changes):
    return tiny_model(**{**SIZES, **changes}).to(device=device, dtype=dtype)


def ids_of(rows: int) -> torch.Tensor:
    return torch.randint(0, 60, (1, rows), generator=torch.Generator().manual_seed(rows))


@pytest.fixture(scope="module")
def pair():
    """The same bf16 model in FP8, uncompiled on the CPU and compiled on the card."""
    on_cpu = dllm_compile.optimize(model_of("cpu"), precision="fp8", compile=False)
    return on_cpu, dllm_compile.optimize(model_of("cuda"), precision="fp8", compile=True)


@pytest.mark.parametrize("linears", ["ffn", "all"])
@pytest.mark.parametrize(
    ("granularity", "dtype"),
    # Products in groups alone return fp32.
    [("group", torch.bfloat16), ("row", torch.bfloat16), ("tensor", torch.bfloat16), ("group", torch.float32)],
    ids=str,
)
def test_logits_are_those_of_the_cpu(granularity, dtype, linears):
    """Nearer to the CPU's FP8 than FP8 is to the model, at every size a kernel is chosen by."""
    options = {"precision": "fp8", "fp8_granularity": granularity, "fp8_linears": linears, "compile": False}
    cpu, card = (dllm_compile.optimize(model_of(device, dtype), **options) for device in ("cpu", "cuda"))
    plain = model_of("cpu", torch.float32)
    for rows in (1, 5, 16, 33, 64, 100, 128):
        ids = ids_of(rows)
        with torch.no_grad():
            exact = plain(ids).logits
        expected, actual = cpu(ids).logits.float(), card(ids.cuda()).logits.float().cpu()
        cost = relative_error(exact, expected)
        assert decibels(relative_error(exact, actual)) > 15
        assert relative_error(expected, actual) < cost


def test_codes_are_those_of_the_definition(pair):
    """torch multiplies by 1/448 on a card where it divides on a CPU: scales differ by one bit, codes follow theirs."""
    cpu, card = pair
    for weight in quantized_weights(cpu._captured.gm):
        (codes, scales), (expected_codes, expected_scales) = (
            (lookup(fast._captured.gm, weight.codes), lookup(fast._captured.gm, weight.scales)) for fast in (card, cpu)
        )
        assert (codes.stride(), scales.stride()) == (expected_codes.stride(), expected_scales.stride())
        codes, scales = codes.cpu(), scales.cpu()
        steps = scales.contiguous().view(torch.int32) - expected_scales.contiguous().view(torch.int32)
        assert steps.abs().max() <= 1, weight.scales
        values = lookup(cpu._captured.gm, weight.source).detach().float()
        lines, columns = scales.shape
        blocks = values.view(lines, len(values) // lines, columns, values.shape[1] // columns)
        own = (blocks / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(values.shape)
        assert torch.equal(own.view(torch.uint8), codes.view(torch.uint8)), weight.codes


@pytest.mark.parametrize("rows", [3, 64, 128])
def test_fp32_model_in_groups(rows):
    """Within what products 1e-4 of a row's norm apart make of the logits with the same codes and scales: such noise in
    the products of the CPU makes 0.005 to 0.014 of them (48 draws for each of these row counts)."""
    cpu, card = (
        dllm_compile.optimize(model_of(device, torch.float32), precision="fp8", compile=False)
        for device in ("cpu", "cuda")
    )
    for weight in quantized_weights(cpu._captured.gm):
        for name in (weight.codes, weight.scales):
            lookup(card._captured.gm, name).copy_(lookup(cpu._captured.gm, name))
    ids = ids_of(rows)
    assert relative_error(cpu(ids).logits, card(ids.cuda()).logits.cpu()) < 0.015


@pytest.mark.parametrize("rows", [3, 64, 128])
def test_every_operator_gives_what_it_gives_on_the_cpu(rows):
    """Of an fp32 model in groups, each from the CPU's operands, so that no error grows: in the logits a product that is
    1e-4 of a row's norm off, as those of FP8 tensor cores are, changes codes behind it, some 6 % each."""
    fast = dllm_compile.optimize(model_of("cpu", torch.float32), precision="fp8", compile=False)
    fast.programs.tile_rows = CUDA_TILE_ROWS  # tables and programs as on a card
    ids = ids_of(rows)
    fast(ids)  # builds the program
    with OpByOp("cuda", products=2e-4, numbers=1e-5) as mode:
        fast(ids)
    assert mode.calls["dllm.fp8_linear.default"] == mode.calls["dllm.fp8_linear_add_rms_norm.default"] == 2, mode.calls
    assert mode.calls["dllm.linear_add_rms_norm_quant.default"] == mode.calls["dllm.swiglu_quant.default"] == 2


def test_what_a_step_calls(pair):
    _, fast = pair
    fast.generate(PROMPTS, max_new_tokens=8, block_length=8, cache="dual")
    step = next(program for program in fast.report().programs if program.name == "cached_step")
    assert step.operators["dllm.linear_add_rms_norm"] == 2
    assert step.operators["dllm.linear_add_rms_norm_quant"] == 2
    assert step.operators["dllm.fp8_linear_add_rms_norm"] == 2, "the last layer's takes the final norm with it"
    assert step.operators["dllm.fp8_linear"] == 2
    assert step.operators["dllm.swiglu_quant"] == 2
    assert "dllm.quantized_linear" not in step.operators


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.3, "block_length": 16},
        {"temperature": 1.0, "seed": 5},
        {"cfg_scale": 0.5, "block_length": 8},
        {"cache": "lacache"},
        {"cache": "prefix", "block_length": 8},
        {"cache": "dual", "block_length": 8, "threshold": 0.3},
        {"cache": "vicinity", "block_length": 8, "prefix_look": 4, "after_look": 4},
        {"cache": "dkv", "block_length": 8},
        {"cache": "flash", "threshold": 0.3, "slots": 2},
        {"cache": "dual", "suffix": "dpad", "block_length": 8, "suffix_window": 24},
    ],
    ids=str,
)
def test_every_way_of_decoding_runs_and_repeats(pair, options):
    config = DecodingConfig(**{"max_new_tokens": 40, "block_length": 32, **options})
    first, again = (pair[1].generate(PROMPTS, config).sequences for _ in range(2))
    assert torch.equal(first, again)
    assert not (first == pair[1].facts.mask_token_id).any()


@pytest.mark.parametrize("disable", [(), ("pack_gate_up", "pack_qkv")], ids=["packed", "unpacked"])
def test_release_frees_memory(disable):
    """By formula, as the allocator counts: 3 C F values a layer of two bytes leave, a byte and the scales come."""
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model = model_of("cuda", d_model=1024, n_heads=8, mlp_hidden_size=3072)
    loaded = torch.cuda.memory_allocated() - base
    fast = dllm_compile.optimize(model, precision="fp8", release=True, compile=False, disable=disable)
    gc.collect()
    left = torch.cuda.memory_allocated() - base
    values = 2 * 3 * 1024 * 3072
    report = fast.report().fp8
    assert report.released_bytes == 2 * values
    # Rotary tables and rounding of the allocator: less than 2 MiB.
    assert abs((loaded - left) - (2 * values - report.fp8_bytes)) < 2 << 20
    fast.generate(PROMPTS, max_new_tokens=8)


def _step_inputs(n: int = 100) -> StepInputs:
    rows = torch.arange(n, device="cuda")
    tiles = torch.tensor([[0, 64, 0, n], [64, n, 0, n]], dtype=torch.int32, device="cuda")
    banned = torch.tensor([-1, -1], device="cuda")
    ids = torch.randint(0, 60, (n,), device="cuda")
    return StepInputs(ids, rows, tiles, torch.arange(40, 72, device="cuda"), banned)


def test_a_step_replays_from_a_graph_and_follows_a_refresh():
    """No host read; the graph reads the buffers that `refresh_weights` writes."""
    fast = dllm_compile.optimize(model_of("cuda"), precision="fp8", compile=True)
    inputs = _step_inputs()
    for _ in range(3):
        fast.programs.step(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast.programs.step(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, confidence = fast.programs.step(inputs)
    graph.replay()
    expected = fast.programs.step(inputs)
    assert torch.equal(token, expected[0])
    assert torch.equal(confidence, expected[1])
    before = confidence.clone()
    with torch.no_grad():
        for block in fast.model.model.layers():
            block.ff_out.weight.mul_(2)
    fast.refresh_weights()
    graph.replay()
    expected = fast.programs.step(inputs)
    assert torch.equal(confidence, expected[1])
    assert not torch.equal(confidence, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_projections_of_a_sixteen_bit_model(dtype):
    """`fuse_linear_add_norm` without FP8: as near to fp32 as the unfused program is, to a quarter."""
    model = model_of("cuda", dtype)
    fused = dllm_compile.optimize(model, compile=True)
    plain = dllm_compile.optimize(model, compile=True, disable="fuse_linear_add_norm")
    exact = model_of("cuda", torch.float32)
    exact.load_state_dict(model.state_dict())
    for rows in (1, 16, 100, 128):
        ids = ids_of(rows).cuda()
        with torch.no_grad():
            expected = exact(ids).logits
        ours, theirs = (relative_error(expected, fast(ids).logits) for fast in (fused, plain))
        assert ours < 1.25 * theirs + 1e-3
    fused.generate(PROMPTS, max_new_tokens=8)
    step = next(program for program in fused.report().programs if program.name == "step")
    assert step.operators["dllm.linear_add_rms_norm"] == 6
    assert torch.equal(*(fused.generate(PROMPTS, max_new_tokens=32, threshold=0.5).sequences for _ in range(2)))


def test_auto_takes_fp8():
    fast = dllm_compile.optimize(model_of("cuda"), precision="auto", compile=False)
    assert fast.report().fp8 is not None
    fast = dllm_compile.optimize(model_of("cuda", mlp_hidden_size=320), precision="auto", compile=False)
    assert fast.report().fp8 is None
    assert "does not divide into groups of 128" in str(fast.report())


def test_rows_need_bf16():
    with pytest.raises(dllm_compile.errors.ConfigError, match="fp8_granularity='row' needs bf16"):
        dllm_compile.optimize(model_of("cuda", torch.float16), precision="fp8", fp8_granularity="row")
