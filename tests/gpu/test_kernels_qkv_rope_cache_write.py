# SPDX-License-Identifier: Apache-2.0
"""`dllm::qkv_rope_cache_write` on a card: bit-equal to the torch composition."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.kernels.qkv_rope_cache_write import qkv_rope_cache_write, qkv_rope_cache_write_reference
from tests.kernels.cache_cases import rope_write_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_card(arguments):
    """Move to the card; qkv stays a slice of a wider matrix, with its row stride."""
    qkv, *rest = (x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments)
    return torch.nn.functional.pad(qkv, (8, 8))[:, 8:-8], *rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32, 128), (32, 8, 128), (6, 3, 64), (4, 1, 16), (4, 2, 24), (2, 2, 256)])
@pytest.mark.parametrize("rows", [1, 32, 129, 1024, 4096])
def test_is_bit_equal_to_the_reference(rows, shape, dtype):
    arguments = on_card(rope_write_inputs(rows, *shape, dtype))
    qkv, *_ = arguments
    assert not qkv.is_contiguous() or rows == 1
    expected = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    q = qkv_rope_cache_write(*arguments)
    assert torch.equal(q, qkv_rope_cache_write_reference(*expected))
    assert q.is_contiguous()
    assert torch.equal(arguments[5], expected[5])  # rows nobody named hold 7 in both
    assert torch.equal(arguments[6], expected[6])


def test_caches_may_be_slices():
    arguments = list(on_card(rope_write_inputs(33, 8, 2, 128, torch.bfloat16)))
    expected = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    both = torch.full((arguments[5].shape[0], 2, 2, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    arguments[5], arguments[6] = both[:, 0], both[:, 1]
    q = qkv_rope_cache_write(*arguments)
    assert torch.equal(q, qkv_rope_cache_write_reference(*expected))
    assert torch.equal(both[:, 0], expected[5])
    assert torch.equal(both[:, 1], expected[6])


def test_padding_rows_may_share_a_spare_row():
    arguments = on_card(rope_write_inputs(64, 8, 2, 128, torch.bfloat16))
    cache_rows, k_cache = arguments[4], arguments[5]
    cache_rows[40:] = spare = int(set(range(len(k_cache))).difference(cache_rows.tolist()).pop())
    expected = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    q = qkv_rope_cache_write(*arguments)
    assert torch.equal(q, qkv_rope_cache_write_reference(*expected))
    for cache, other in zip(arguments[5:7], expected[5:7], strict=True):
        cache[spare] = other[spare] = 0
        assert torch.equal(cache, other)


def test_captured_graph_reads_rows_and_positions_anew():
    arguments = on_card(rope_write_inputs(40, 8, 2, 128, torch.bfloat16))
    for _ in range(3):
        qkv_rope_cache_write(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = qkv_rope_cache_write(*arguments)
    fresh = on_card(rope_write_inputs(40, 8, 2, 128, torch.bfloat16, seed=5))
    for index in (0, 3, 4, 5, 6):
        arguments[index].copy_(fresh[index])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(q, qkv_rope_cache_write_reference(*fresh))
    assert torch.equal(arguments[5], fresh[5])
    assert torch.equal(arguments[6], fresh[6])


def test_does_not_wait_for_the_device():
    arguments = on_card(rope_write_inputs(40, 8, 2, 128, torch.bfloat16))
    qkv_rope_cache_write(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        qkv_rope_cache_write(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    torch.library.opcheck(qkv_rope_cache_write, on_card(rope_write_inputs(7, 6, 3, 64, torch.bfloat16)))


def test_under_inductor():
    def write(qkv, cos, sin, positions, cache_rows, k_cache, v_cache):
        q = qkv_rope_cache_write(qkv * 2, cos, sin, positions, cache_rows, k_cache, v_cache, 8, 2)
        return q * 2, k_cache * 2

    arguments = on_card(rope_write_inputs(40, 8, 2, 128, torch.bfloat16))[:7]
    expected = [x.clone() for x in arguments]
    got = torch.compile(write, fullgraph=True)(*arguments)
    for x, y in zip((*got, *arguments[5:]), (*write(*expected), *expected[5:]), strict=True):
        assert torch.equal(x, y)
