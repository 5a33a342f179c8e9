# SPDX-License-Identifier: Apache-2.0
"""Layers compiled once, on a card: graph counts, captured calls, and the model traced from four layers."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile.runtime.compiling import LayerByLayer
from tests.conftest import tiny_model
from tests.real import model_logits

pytestmark = pytest.mark.gpu
LAYERS = 7


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def fast(request):
    model = tiny_model(n_layers=LAYERS, d_model=128, n_heads=2, n_kv_heads=2, init_std=0.05, dtype=request.param)
    return dllm_compile.optimize(model.cuda())


def test_four_layers_are_traced(fast):
    assert (fast._captured.traced, fast._captured.layers) == (4, LAYERS)


def test_logits_of_layers_that_share_their_code(fast):
    bound = 1e-4 if next(fast.model.parameters()).dtype is torch.float32 else 0.1
    for size in ((1, 1), (3, 40), (1, 128)):
        ids = torch.randint(0, 120, size, generator=torch.Generator().manual_seed(size[1])).cuda()
        expected, actual = model_logits(fast.model, ids), fast(ids).logits
        assert (actual - expected).abs().max() <= bound * expected.abs().max()
    program = fast.programs.forward_program()
    assert isinstance(program.run, LayerByLayer)
    assert program.graphs == 3


def test_a_call_is_captured_without_a_look_of_the_host(fast):
    """One CUDA graph over all segments; replays read new ids and give what a plain call gives."""
    program, rows = fast.programs.forward_program(), 48
    ids = torch.arange(rows, device="cuda")
    height = fast.programs.tile_rows
    tiles = torch.tensor([[a, min(a + height, rows), 0, rows] for a in range(0, rows, height)], dtype=torch.int32)
    inputs = {"ids": ids.clone(), "positions": ids.clone(), "tiles": tiles.repeat(2, 1)[: max(2, len(tiles))].cuda()}
    if len(tiles) == 1:
        inputs["tiles"][1] = torch.tensor([rows, rows, 0, 0], dtype=torch.int32)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                program(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                captured = program(**inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for seed in range(3):
            inputs["ids"].copy_(torch.randint(0, 120, (rows,), generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            replayed = captured.clone()
            assert torch.equal(replayed, program(**inputs))


@pytest.mark.parametrize("cache", ["none", "dual", "flash", "lacache"])
def test_tokens(fast, cache):
    """Compiled layers decode what the uncompiled programs decode (fp32)."""
    if next(fast.model.parameters()).dtype is not torch.float32:
        pytest.skip("tokens are compared in fp32")
    plain = dllm_compile.optimize(fast.model, compile=False)
    prompts = [torch.arange(3, 14), torch.arange(40, 45)]
    options = {"max_new_tokens": 16, "block_length": 8, "cache": cache}
    outputs = [one.generate(prompts, **options).sequences for one in (fast, plain)]
    assert torch.equal(*outputs)
