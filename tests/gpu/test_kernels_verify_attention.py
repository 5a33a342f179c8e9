# SPDX-License-Identifier: Apache-2.0
"""`dllm::verify_attention` and `dllm::head_verify` on a card, within the roundings that are made."""

from __future__ import annotations

import pytest
import torch

from dllm_compile._compat import has_triton
from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.kernels.head_confidence import head_confidence
from dllm_compile.kernels.head_verify import head_verify
from dllm_compile.kernels.verify_attention import verify_attention, verify_attention_masked
from tests.kernels.cases import dense_head, exact_head
from tests.kernels.verify_cases import dense_verify, verify_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Samples as (context, candidates, padding, keys, hidden).
LAYOUTS = {
    "one sample": [(16, 8, 0, 1280, 24)],
    "one key": [(0, 1, 30, 1, 1)],
    "short": [(1, 8, 15, 25, 9), (2, 1, 28, 20, 3)],
    "nothing to verify": [(0, 0, 32, 700, 0), (16, 8, 0, 700, 24)],
    "every key is hidden": [(16, 8, 0, 300, 300)],
    "32 samples": [(32 - 2 * (i % 9), i % 9, 0, 1280 - 31 * i, 32 - i % 9) for i in range(32)],
}


def on_card(case):
    """Move to the card and keep the strides (`.cuda()` of a slice makes it contiguous)."""

    def move(x):
        base = x._base if x._base is not None else x
        return base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())

    return case._replace(**{name: move(value) for name, value in case._asdict().items() if torch.is_tensor(value)})


def run(case, tile_rows=32):
    """With counters of its own, which must be zeros again afterwards."""
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")
    out = verify_attention(*case.arguments, tile_rows, arrived)
    assert arrived.count_nonzero() == 0
    return out


def assert_within_rounding(out, case):
    expected = dense_verify(case)
    # Each weight and each result is rounded to the dtype once: two relative errors of half a unit in the last place,
    # the first weighted by |v|. The rest (fp32 scores, exp2, sums) is a few 1e-6.
    magnitude = dense_verify(case._replace(v=case.v.abs(), v_cache=case.v_cache.abs()))
    unit = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[out.dtype]
    excess = ((out.double() - expected).abs() - (unit + 1e-5) * magnitude - 1e-6).max().item()
    assert excess <= 0, f"{excess} above the bound"


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 128), (8, 2, 64), (3, 1, 128), (4, 2, 16), (2, 1, 256)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_definition(layout, heads, kv_heads, head_dim, dtype):
    case = on_card(verify_case(LAYOUTS[layout], heads, kv_heads, head_dim, dtype))
    out = run(case)
    assert out.dtype == dtype
    assert_within_rounding(out, case)
    padding = [i for i, (kind, _) in enumerate(case.kinds) if kind == "padding"]
    assert out[padding].count_nonzero() == 0


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sample", "tile_rows"), [((4, 2, 0, 300, 6), 8), ((24, 12, 0, 300, 36), 48), ((60, 30, 8, 500, 90), 128)]
)
def test_other_tile_heights(sample, tile_rows, dtype):
    case = on_card(verify_case([sample, sample], 4, 2, 128, dtype))
    assert_within_rounding(run(case, tile_rows), case)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_nobody_may_read(dtype):
    """Hidden rows of any finite content, and no number at all between the samples' keys."""
    case = on_card(verify_case(LAYOUTS["32 samples"], 4, 2, 128, dtype))
    expected = run(case)
    other = case._replace(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    named = torch.zeros_like(case.hidden)
    for _, _, begin, end in case.tiles.tolist():
        named[begin:end] = True
    for cache in (other.k_cache, other.v_cache):
        cache[case.hidden] = 1e4
        cache[~named] = torch.nan
    assert torch.equal(run(other), expected)
    assert torch.equal(run(case), expected), "runs are bit-equal"


@needs_triton
@pytest.mark.parametrize("samples", [1, 2])
def test_a_replay_reads_tables_anew(samples):
    """Also where several programs share the keys of a head, whose counters must be ready for the next replay."""
    case = on_card(verify_case(LAYOUTS["one sample"] * samples, 8, 8, 128, torch.bfloat16))
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")
    for _ in range(3):
        verify_attention(*case.arguments, 32, arrived)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = verify_attention(*case.arguments, 32, arrived)
    for seed, layout in enumerate(
        [(16, 8, 0, 1280, 24), (10, 3, 16, 1280, 5), (0, 0, 32, 1280, 0), (16, 8, 0, 1280, 24)]
    ):
        other = verify_case([layout] * samples, 8, 8, 128, torch.bfloat16, seed=seed)
        for mine, fresh in zip(case.arguments, other.arguments, strict=True):
            mine.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert_within_rounding(out, case._replace(kinds=other.kinds))


@pytest.mark.parametrize(("head_dim", "dtype"), [(24, torch.bfloat16), (128, torch.float32), (64, torch.float64)])
def test_fallback_and_no_synchronization(head_dim, dtype):
    case = on_card(verify_case(LAYOUTS["short"], 4, 2, head_dim, dtype))
    expected = dense_verify(case)
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-9}[dtype]
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")
    for implementation, more in ((verify_attention_masked, ()), (verify_attention, (arrived,))):
        out = implementation(*case.arguments, 32, *more)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
        torch.cuda.set_sync_debug_mode("error")
        try:
            implementation(*case.arguments, 32, *more)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    case = on_card(verify_case(LAYOUTS["short"], 4, 2, 64, torch.bfloat16))
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")
    torch.library.opcheck(verify_attention, (*case.arguments, 32, arrived))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 256])
def test_probability_of_a_given_token(rows, dtype):
    """Exact logits: the arg-max and its probability are those of the plain head, the other one is the softmax's."""
    x, weight = (one.cuda() for one in exact_head(rows, 5003, 200, dtype))
    banned = torch.tensor([5, -1, 300], device="cuda")
    given = torch.arange(rows, device="cuda") * 911 % 5003
    given[0] = 5002
    for scale in (1.0, 0.3):
        token, confidence, probability = head_verify(x, weight, scale, 9, banned, given)
        assert torch.equal(token, head_confidence(x, weight, scale, 9, banned)[0])
        assert torch.equal(confidence, head_confidence(x, weight, scale, 9, banned)[1])
        *_, expected = dense_head(x, weight, scale, 9, banned)
        expected = expected.gather(1, given[:, None]).squeeze(1)
        torch.testing.assert_close(probability.double(), expected, rtol=1e-5, atol=0)
