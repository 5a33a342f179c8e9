# SPDX-License-Identifier: Apache-2.0
"""The whole path on a card: compiled programs, Triton kernels, LaCache, cached steps, graph capture."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig
from dllm_compile.acceptance import NOISE_FACTOR, rounding_noise
from dllm_compile.certify import relative_deviation
from dllm_compile.models import LLaDAForMaskedDiffusion
from dllm_compile.passes import flatten_rows_pass, run_passes
from dllm_compile.passes.graph import share
from dllm_compile.passes.insert_kv_cache import cache_names
from dllm_compile.runtime.layout import tile_table
from dllm_compile.runtime.row_programs import CacheInputs, StepInputs
from tests.conftest import tiny_config, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], list(range(20, 90)), [5] * 33]


@pytest.fixture(scope="module")
def pair():
    """The same tiny fp32 model, uncompiled on the CPU and compiled on the card (heads of 64)."""
    sizes = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
    on_cpu = dllm_compile.optimize(tiny_model(**sizes), compile=False)
    on_card = dllm_compile.optimize(tiny_model(**sizes).cuda(), compile=True)
    return on_cpu, on_card


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.3, "block_length": 16},
        {"factor": 1.0},
        {"temperature": 1.0, "seed": 5},
        {"cfg_scale": 0.5, "block_length": 8},
        {"cache": "lacache"},
        {"cache": "lacache", "block_length": 7, "threshold": 0.3},
        {"cache": "lacache", "lacache_layers": (0, 1), "lacache_interval": 1},
        {"cache": "prefix", "block_length": 8},
        {"cache": "dual", "block_length": 8, "threshold": 0.3},
        {"cache": "vicinity", "block_length": 8, "prefix_look": 4, "after_look": 4},
        {"cache": "dkv", "block_length": 8},
        {"cache": "flash", "threshold": 0.3},
        {"cache": "flash", "threshold": 0.3, "slots": 2},
        {"cache": "flash", "track": -1, "threshold": 0.3},
        {"cache": "dual", "suffix": "dpad", "block_length": 8, "suffix_window": 24},
        {"cache": "lacache", "suffix": "window", "block_length": 8, "suffix_window": 12},
    ],
)
def test_tokens_equal_those_of_the_cpu(pair, options):
    config = DecodingConfig(**{"max_new_tokens": 40, "block_length": 32, **options})
    expected, actual = (fast.generate(PROMPTS, config) for fast in pair)
    assert torch.equal(expected.sequences, actual.sequences.cpu())
    assert expected.stats.forwards_per_row == actual.stats.forwards_per_row


def uncompiled(fast):
    """The forward program's graph, before references are inlined."""
    gm = share(fast._captured.gm)
    run_passes(gm, (flatten_rows_pass(fast.programs.tile_rows),), layers=fast._captured.layers)
    return gm


def test_forward_with_padding_equals_the_model(pair):
    _, fast = pair
    ids = torch.randint(0, 60, (3, 77), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :30], mask[1, 50:] = 0, 0
    logits = fast(ids, mask).logits
    with torch.no_grad():
        for row in range(3):
            kept = mask[row].bool()
            expected = fast.model(ids[row][kept][None]).logits[0]
            # Two correct fp32 programs differ by the model's own rounding, which is measured, not guessed.
            own = {"ids": ids[row][kept], "positions": torch.arange(len(expected), device="cuda")}
            own["tiles"] = tile_table(torch.tensor([len(expected)]), fast.programs.tile_rows).cuda()
            noise = rounding_noise(uncompiled(fast), own)
            assert relative_deviation(expected, logits[row][kept]) <= max(1e-5, NOISE_FACTOR * noise)


def test_cached_step_equals_a_dense_forward_and_writes_its_rows_only(pair):
    _, fast = pair
    shape, n = fast.programs.shape, 120
    caches = {
        name: torch.full((n + 10, shape.kv_heads, shape.head_dim), float("nan"), device="cuda")
        for name in cache_names(shape.layers)
    }
    ids = torch.randint(0, 60, (n,), device="cuda")
    rows = torch.arange(n, device="cuda")
    banned = torch.tensor([-1], device="cuda")
    edges = torch.arange(0, n + 63, 64, device="cuda").clamp(max=n)
    tiles = torch.stack((edges[:-1], edges[1:], torch.zeros_like(edges[1:]), torch.full_like(edges[1:], n)), 1).int()
    token, _ = fast.programs.cached_step(StepInputs(ids, rows, tiles, rows, banned), CacheInputs(caches, rows))
    with torch.no_grad():
        logits = fast.model(ids[None]).logits[0]
    logits[:, fast.facts.mask_token_id] = -torch.inf
    assert torch.equal(token, logits.argmax(-1))
    before = {name: cache.clone() for name, cache in caches.items()}
    some = torch.tensor([3, 77, 110], device="cuda")
    ids[77] = 9
    tile = torch.tensor([[0, 3, 0, n]], dtype=torch.int32, device="cuda")
    wanted = torch.arange(3, device="cuda")
    fast.programs.cached_step(StepInputs(ids[some], some, tile, wanted, banned), CacheInputs(caches, some))
    for name, cache in caches.items():
        same = (cache == before[name]) | (cache.isnan() & before[name].isnan())
        changed = (~same).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {3, 77, 110}, name


def test_a_step_reads_nothing_on_the_host_and_replays_from_a_graph(pair):
    _, fast = pair
    n, device = 100, "cuda"
    ids, rows = torch.randint(0, 60, (n,), device=device), torch.arange(n, device=device)
    tiles = torch.tensor([[0, 64, 0, n], [64, n, 0, n]], dtype=torch.int32, device=device)
    inputs = StepInputs(ids, rows, tiles, torch.arange(40, 72, device=device), torch.tensor([-1, -1], device=device))
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
    for seed in range(20):
        torch.manual_seed(seed)
        ids.copy_(torch.randint(0, 60, (n,), device=device))
        graph.replay()
        expected = fast.programs.step(inputs)
        assert torch.equal(token, expected[0])
        assert torch.equal(confidence, expected[1])


def test_bf16_is_reproducible_and_close_to_fp32():
    sizes = {"d_model": 256, "n_heads": 2, "n_kv_heads": 1, "n_layers": 2, "max_sequence_length": 256}
    model = tiny_model(**sizes).cuda()
    exact = dllm_compile.optimize(model, compile=False)
    rough = dllm_compile.optimize(tiny_model(**sizes).cuda().bfloat16())
    ids = torch.randint(0, 60, (2, 200), device="cuda")
    first, again = (rough(ids).logits for _ in range(2))
    assert torch.equal(first, again)
    expected, own = exact(ids).logits, rough.model(ids).logits
    # This random model amplifies bf16's rounding by far more than a real one: its own forward is 0.08 off.
    errors = [(logits.float() - expected).norm() / expected.norm() for logits in (first, own)]
    assert errors[0] < 1.2 * errors[1] < 0.15
    runs = [rough.generate(PROMPTS, max_new_tokens=32, threshold=0.5).sequences for _ in range(2)]
    assert torch.equal(*runs)


def test_tables_left_on_the_cpu_are_moved():
    """A model made under a CUDA device has rotary tables made on the CPU; its first forward moves copies only."""
    with torch.device("cuda"):
        model = LLaDAForMaskedDiffusion(tiny_config()).eval()
    fast = dllm_compile.optimize(model, compile=False)
    assert fast._captured.gm.rope_cos.device.type == "cuda"
    fast.generate(PROMPTS[:2], max_new_tokens=8)
