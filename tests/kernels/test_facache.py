# SPDX-License-Identifier: Apache-2.0
"""`dllm::facache_first` and `dllm::facache_step` on the CPU: definition, algebra of states, registration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_compile.kernels.facache import facache_first, facache_step, merge_partials, normalised, partial_attention

from .cache_cases import block_tiles, dense_state, empty_state, outside_rows
from .cases import dense_attention, packed_heads

# samples as (rows, first and end row of the block), tile rows, heads, key heads, head dim
CASES = [
    ([(1, 0, 1)], 64, 1, 1, 16),
    ([(9, 4, 5)], 4, 4, 2, 16),
    ([(12, 0, 12)], 8, 2, 2, 8),
    ([(20, 0, 7), (33, 21, 33), (5, 0, 5), (18, 3, 11)], 8, 4, 1, 24),
    ([(40, 17, 36), (1, 0, 1)], None, 6, 3, 32),
]


def inputs(case, seed=0, dtype=torch.float32):
    samples, tile_rows, heads, kv_heads, head_dim = case
    rows = sum(sample[0] for sample in samples)
    q, k, v = packed_heads(rows, rows, heads, kv_heads, head_dim, dtype, seed)
    return q, k, v, *empty_state(rows, heads, head_dim), block_tiles(samples, tile_rows), tile_rows or 64


def change_block(arguments, case, seed=1):
    """Fresh q, k and v in the block's rows, as a later step of the block has them."""
    inside = ~outside_rows(case[0])
    for old, new in zip(arguments[:3], inputs(case, seed), strict=False):
        old[inside] = new[inside]


def assert_is_dense(out, arguments):
    q, k, v, *_, tiles, _ = arguments
    assert out.shape == (q.shape[0], q.shape[1] * q.shape[2])
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles[:, :4]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_first_is_dense_attention_and_keeps_the_state(case):
    arguments = inputs(case)
    assert_is_dense(facache_first(*arguments), arguments)
    outside = outside_rows(case[0])
    for got, expected in zip(arguments[3:6], dense_state(*arguments[:3], case[0]), strict=True):
        torch.testing.assert_close(got[outside].double(), expected[outside], rtol=1e-5, atol=1e-5)
        assert got[~outside].isnan().all()  # rows inside the block are left alone


@pytest.mark.parametrize("case", CASES)
def test_steps_after_first_are_dense_attention(case):
    arguments = inputs(case)
    facache_first(*arguments)
    state = [x.clone() for x in arguments[3:6]]
    for step in range(1, 3):
        change_block(arguments, case, seed=step)
        assert_is_dense(facache_step(*arguments), arguments)
    for before, after in zip(state, arguments[3:6], strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)


@st.composite
def cases(draw):
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 24))
        begin = draw(st.integers(0, rows - 1))
        samples.append((rows, begin, draw(st.integers(begin + 1, rows))))
    kv_heads = draw(st.integers(1, 3))
    tile_rows = draw(st.sampled_from([None, 1, 3, 8, 64]))
    return samples, tile_rows, kv_heads * draw(st.integers(1, 3)), kv_heads, draw(st.sampled_from([2, 7, 16]))


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_any_block_of_any_sample(case, seed):
    arguments = inputs(case, seed)
    assert_is_dense(facache_first(*arguments), arguments)
    change_block(arguments, case, seed + 1)
    assert_is_dense(facache_step(*arguments), arguments)


@pytest.mark.parametrize("operator", [facache_first, facache_step])
def test_empty_tiles_and_their_order_do_nothing(operator):
    arguments = [*inputs(CASES[3])]
    facache_first(*arguments)
    out = operator(*arguments)
    tiles = arguments[6]
    nothing = torch.tensor([[3, 3, 0, 20, 0, 7], [9, 2, 0, 20, 0, 7], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    arguments[6] = torch.cat([nothing, tiles.flip(0), nothing])
    assert torch.equal(operator(*arguments), out)


def test_rows_that_see_nothing_are_zero():
    q, k, v, *state, _, tile_rows = inputs(([(6, 2, 4)], 8, 2, 2, 16))
    rest = torch.tensor([[0, 6, 3, 3, 3, 3]], dtype=torch.int32)
    assert facache_first(q, k, v, *state, rest, tile_rows).count_nonzero() == 0
    assert (state[0] == -math.inf).all()
    assert facache_step(q, k, v, *state, rest, tile_rows).count_nonzero() == 0


def test_a_nan_stays_in_its_sample():
    arguments = inputs(([(5, 1, 3), (7, 2, 7)], 8, 2, 2, 16))
    for x in arguments[:3]:
        x[5:] = torch.nan
    for out in (facache_first(*arguments), facache_step(*arguments)):
        assert torch.isfinite(out[:5]).all()
        assert out[5:].isnan().all()


# --- the algebra of states


def spread_scores(seed, keys=24, heads=2, rows=5, head_dim=8, shift=0.0):
    """q, k, v whose scores reach about +-80, then moved by `shift`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, heads, head_dim, generator=generator) for n in (rows, keys, keys))
    # One dimension carries the score: 30 * N(0, 1) clipped at 80, times sqrt(hd) for the scale; another the shift.
    k[:, :, 0] = (30 * torch.randn(keys, heads, generator=generator)).clamp(-80, 80) * math.sqrt(head_dim)
    q[:, :, 0] = torch.where(torch.rand(rows, heads, generator=generator) < 0.5, -1.0, 1.0)
    k[:, :, 1], q[:, :, 1] = shift * math.sqrt(head_dim), 1.0
    return q, k, v


def whole(q, k, v):
    tiles = torch.tensor([[0, q.shape[0], 0, k.shape[0]]], dtype=torch.int32)
    return dense_attention(q, k, v, tiles).view(q.shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_of_the_keys_merges_to_the_whole(data):
    q, k, v = spread_scores(data.draw(st.integers(0, 2**31)), shift=data.draw(st.sampled_from([0.0, -500.0, 300.0])))
    parts = data.draw(st.integers(1, 6))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, parts - 1), min_size=len(k), max_size=len(k))))
    order = data.draw(st.permutations(range(parts)))
    state = partial_attention(q, k[:0], v[:0])
    for part in order:  # some are empty
        state = merge_partials(state, partial_attention(q, k[owner == part], v[owner == part]))
    # Scores of up to 600 in magnitude carry fp32 errors of up to a few 1e-5 into the weights' exponents.
    torch.testing.assert_close(normalised(state).double(), whole(q, k, v), rtol=0, atol=5e-4)


def random_partial(seed, empty=False):
    generator = torch.Generator().manual_seed(seed)
    m = torch.rand(2, 7, generator=generator) * 160 - 80
    den, num = 1 + torch.rand(2, 7, generator=generator), torch.randn(2, 7, 4, generator=generator)
    return (torch.full_like(m, -math.inf), torch.zeros_like(den), torch.zeros_like(num)) if empty else (m, den, num)


seeds = st.integers(0, 2**31)


@settings(max_examples=60, deadline=None)
@given(seeds, seeds, st.booleans(), st.booleans())
def test_merging_is_commutative_and_the_empty_state_neutral(a, b, a_empty, b_empty):
    left, right = random_partial(a, a_empty), random_partial(b, b_empty)
    for x, y in zip(merge_partials(left, right), merge_partials(right, left), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(merge_partials(left, random_partial(b, True)), left, strict=True):
        assert torch.equal(x, y)


@settings(max_examples=60, deadline=None)
@given(seeds, seeds, seeds)
def test_merging_is_associative(a, b, c):
    x, y, z = random_partial(a), random_partial(b), random_partial(c)
    left, right = merge_partials(merge_partials(x, y), z), merge_partials(x, merge_partials(y, z))
    assert torch.equal(left[0], right[0])
    # exp of a difference up to 160, in one step or in two: each rounds its exponent by up to 160 * 2^-24.
    for part in (1, 2):
        torch.testing.assert_close(left[part], right[part], rtol=5e-5, atol=1e-6)


# --- registration


@pytest.mark.parametrize("case", [([(7, 2, 5)], 3, 3, 1, 6), ([(1, 0, 1), (11, 10, 11)], 8, 4, 2, 16)])
@pytest.mark.parametrize("operator", [facache_first, facache_step])
def test_opcheck(case, operator):
    arguments = inputs(case)
    for x in arguments[3:6]:
        x.zero_()  # opcheck compares states, and NaN is unequal to itself
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", [facache_first, facache_step])
def test_fake_output_has_the_real_layout(operator, dtype):
    arguments = inputs(CASES[3], dtype=dtype)
    facache_first(*arguments)
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(x) for x in arguments[:7]), arguments[7])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_first_then_step_in_one_compiled_graph():
    """The state's write must stay before its read."""

    def attend(q, k, v, m, den, num, tiles):
        first = facache_first(q, k, v, m, den, num, tiles, 64)
        return first, facache_step(q, k, v, m, den, num, tiles, 64)

    arguments = inputs(CASES[3])[:7]
    again = inputs(CASES[3])[:7]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*arguments)
    for got, expected in zip(compiled, attend(*again), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(arguments[3:6], again[3:6], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("k", torch.zeros(5, 3, 16), "must be"),
        ("v", torch.zeros(5, 2, 16, dtype=torch.float64), "share a dtype"),
        ("q", torch.zeros(5, 3, 16), "no multiple"),
        ("m", torch.zeros(5, 2), "cannot be"),
        ("num", torch.zeros(5, 4, 16, dtype=torch.bfloat16), "fp32"),
        ("den", torch.zeros(4, 5).T, "contiguous"),
        ("tiles", torch.zeros(1, 4, dtype=torch.int32), r"\(n, 6\)"),
        ("tiles", torch.zeros(1, 6, dtype=torch.int64), "int32"),
    ],
)
@pytest.mark.parametrize("operator", [facache_first, facache_step])
def test_wrong_arguments_are_named(operator, name, value, error):
    arguments = {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(5, 2, 16),
        "v": torch.zeros(5, 2, 16),
        "m": torch.zeros(5, 4),
        "den": torch.zeros(5, 4),
        "num": torch.zeros(5, 4, 16),
        "tiles": torch.zeros(1, 6, dtype=torch.int32),
        "tile_rows": 64,
    }
    with pytest.raises((ValueError, TypeError), match=error):
        operator(**{**arguments, name: value})
