# SPDX-License-Identifier: Apache-2.0
"""`dllm::facache_first` and `dllm::facache_step` on a card against the fp64 definition."""

from __future__ import annotations

import pytest
import torch

from dllm_compile._compat import has_triton
from dllm_compile.kernels.facache import facache_first, facache_step
from tests.kernels.cache_cases import block_tiles, dense_state, empty_state, outside_rows
from tests.kernels.cases import dense_attention, packed_heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]

# samples as (rows, first and end row of the block)
LAYOUTS = {
    "1": [(1, 0, 1)],
    "17": [(17, 5, 6)],
    "129": [(100, 68, 100), (29, 0, 29)],
    "1280": [(1280, 1000, 1032)],
    "4096": [(1280, 0, 32), (1, 0, 1), (1000, 968, 1000), (767, 333, 461), (1024, 512, 513), (24, 0, 24)],
}
UNIT = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def inputs(layout, heads, kv_heads, head_dim, dtype, tile_rows=64, seed=0):
    """q, k, v as column slices of one packed matrix, a state of NaN, tiles; all on the card."""
    samples = LAYOUTS[layout]
    rows = sum(sample[0] for sample in samples)
    views = packed_heads(rows, rows, heads, kv_heads, head_dim, dtype, seed)
    packed = views[0]._base.cuda()
    q, k, v = (packed.as_strided(x.shape, x.stride(), x.storage_offset()) for x in views)
    state = (x.cuda() for x in empty_state(rows, heads, head_dim))
    return q, k, v, *state, block_tiles(samples, tile_rows).cuda(), tile_rows


def change_block(arguments, layout, seed=1):
    """Fresh q, k and v in the block's rows, as a later step of the block has them."""
    q, k, v = arguments[:3]
    inside = ~outside_rows(LAYOUTS[layout]).cuda()
    fresh = packed_heads(q.shape[0], q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.dtype, seed)
    for old, new in zip((q, k, v), fresh, strict=True):
        old[inside] = new.cuda()[inside]


def assert_within_rounding(out, arguments):
    q, k, v, *_, tiles, _ = arguments
    expected = dense_attention(q, k, v, tiles[:, :4])
    # Each weight and each result is rounded to the dtype once: two relative errors of half a unit in the last place,
    # the first weighted by |v|. The rest (fp32 scores, exp2, sums, the stored maximum) is a few 1e-6.
    magnitude = dense_attention(q, k, v.abs(), tiles[:, :4])
    excess = ((out.double() - expected).abs() - (UNIT[out.dtype] + 1e-5) * magnitude - 1e-6).max().item()
    assert out.is_contiguous()
    assert out.dtype == q.dtype
    assert excess <= 0, f"{excess} above the bound"


def assert_state(arguments, layout):
    q, k, v, m, den, num, *_ = arguments
    outside = outside_rows(LAYOUTS[layout]).cuda()
    expected_m, expected_den, expected_num = (x[outside] for x in dense_state(q, k, v, LAYOUTS[layout]))
    # Tensor cores drop bits below 2^-22 or so of the largest term, in each of hd / 16 steps: about 2e-5 at the sums of
    # |q k| / sqrt(hd) that occur here (up to 12). An exponent that is off by that moves a weight by as much.
    torch.testing.assert_close(m[outside].double(), expected_m, rtol=0, atol=2e-5)
    torch.testing.assert_close(den[outside].double(), expected_den, rtol=5e-5, atol=0)
    # Weights are rounded to the dtype before they meet v: half a unit of sum |w v|, here sum(w) * max |v|.
    bound = (UNIT[q.dtype] / 2 + 5e-5) * expected_den[..., None] * v.double().abs().max() + 1e-6
    assert ((num[outside].double() - expected_num).abs() <= bound).all()
    for x in (m, den, num):
        assert x[~outside].isnan().all()  # rows inside the block are left alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 128), (8, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_definition(layout, heads, kv_heads, head_dim, dtype):
    arguments = inputs(layout, heads, kv_heads, head_dim, dtype)
    assert_within_rounding(facache_first(*arguments), arguments)
    assert_state(arguments, layout)
    state = [x.clone() for x in arguments[3:6]]
    change_block(arguments, layout)
    assert_within_rounding(facache_step(*arguments), arguments)
    for before, after in zip(state, arguments[3:6], strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 256])
def test_other_head_sizes(head_dim, dtype):
    arguments = inputs("129", 4, 2, head_dim, dtype)
    assert_within_rounding(facache_first(*arguments), arguments)
    assert_state(arguments, "129")
    change_block(arguments, "129")
    assert_within_rounding(facache_step(*arguments), arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_rows", [1, 16, 32, 48, 128, 300])
def test_other_tile_sizes(tile_rows, dtype):
    arguments = inputs("129", 4, 2, 128, dtype, tile_rows)
    assert_within_rounding(facache_first(*arguments), arguments)
    assert_state(arguments, "129")
    change_block(arguments, "129")
    assert_within_rounding(facache_step(*arguments), arguments)


def test_large_scores():
    arguments = inputs("129", 4, 2, 128, torch.float32)
    arguments[0].mul_(30)
    for seed in range(2):
        out = facache_step(*arguments) if seed else facache_first(*arguments)
        expected = dense_attention(*arguments[:3], arguments[6][:, :4])
        # Scores of a few hundred carry fp32 errors of up to 1e-4 into the weights' exponents.
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-4)
        change_block(arguments, "129")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_a_descriptor_cannot_read(dtype):
    q, k, v, *rest = inputs("129", 4, 2, 64, dtype)
    heads_outside = k.transpose(0, 1).contiguous().transpose(0, 1)
    odd_rows = torch.nn.functional.pad(v.flatten(1), (0, 3))[:, :128].unflatten(1, (2, 64))
    for operator in (facache_first, facache_step):
        assert_within_rounding(operator(q, heads_outside, odd_rows, *rest), (q, k, v, *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_stays_in_its_sample(dtype):
    arguments = inputs("129", 4, 2, 128, dtype)
    clean = facache_first(*arguments), facache_step(*arguments)
    for x in arguments[:3]:
        x[100:] = torch.nan
    for out, expected in zip((facache_first(*arguments), facache_step(*arguments)), clean, strict=True):
        assert torch.equal(out[:100], expected[:100])
        assert out[100:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_bit_equal(dtype):
    arguments = inputs("4096", 8, 2, 128, dtype)
    out, state = facache_first(*arguments), [x.clone() for x in arguments[3:6]]
    step = facache_step(*arguments)
    for _ in range(3):
        assert torch.equal(facache_first(*arguments), out)
        for before, after in zip(state, arguments[3:6], strict=True):
            torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(facache_step(*arguments), step)


def test_captured_graph_reads_the_tile_table_anew():
    arguments = inputs("129", 4, 2, 128, torch.bfloat16)
    tiles = arguments[6]
    for _ in range(3):
        facache_first(*arguments)
        facache_step(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = facache_first(*arguments)
        step = facache_step(*arguments)
    for samples in ([(100, 3, 60), (29, 4, 5)], [(60, 0, 60), (69, 40, 69)], [(129, 65, 97)]):
        fresh = block_tiles(samples, 64)
        tiles.zero_()
        tiles[: len(fresh)] = fresh.cuda()
        graph.replay()
        torch.cuda.synchronize()
        assert_within_rounding(first, arguments)
        assert_within_rounding(step, arguments)


def test_does_not_wait_for_the_device():
    arguments = inputs("129", 4, 2, 128, torch.bfloat16)
    for operator in (facache_first, facache_step):
        operator(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            operator(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("head_dim", "dtype"), [(24, torch.bfloat16), (64, torch.float64)])
def test_shapes_the_kernel_does_not_take(head_dim, dtype):
    arguments = inputs("17", 4, 2, head_dim, dtype)
    expected = dense_attention(*arguments[:3], arguments[6][:, :4])
    for operator in (facache_first, facache_step):
        # The reference keeps its state in fp32 whatever q is; bf16 results are rounded.
        atol = {torch.bfloat16: 3e-2, torch.float64: 1e-5}[dtype]
        torch.testing.assert_close(operator(*arguments).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("operator", [facache_first, facache_step])
def test_opcheck(operator):
    arguments = inputs("17", 4, 2, 64, torch.bfloat16)
    for x in arguments[3:6]:
        x.zero_()  # opcheck compares states, and NaN is unequal to itself
    torch.library.opcheck(operator, arguments)


def test_under_inductor():
    def attend(packed, m, den, num, tiles):
        q, k, v = (x.unflatten(1, (-1, 128)) for x in packed.split([512, 256, 256], dim=1))
        first = facache_first(q, k, v, m, den, num, tiles, 64)
        return first, facache_step(q, k, v, m, den, num, tiles, 64)

    *_, m, den, num, tiles, _ = inputs("129", 4, 2, 128, torch.bfloat16)
    packed = torch.randn(129, 1024, device="cuda", dtype=torch.bfloat16)
    expected = attend(packed, m, den, num, tiles)
    state = [x.clone() for x in (m, den, num)]
    for x in (m, den, num):
        x.fill_(torch.nan)
    got = torch.compile(attend, fullgraph=True)(packed, m, den, num, tiles)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    for before, after in zip(state, (m, den, num), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)
