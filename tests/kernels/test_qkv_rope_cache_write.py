# SPDX-License-Identifier: Apache-2.0
"""`dllm::qkv_rope_cache_write` and `dllm::write_rows` on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_compile.kernels.qkv_rope_cache_write import qkv_rope_cache_write
from dllm_compile.kernels.rope import rope
from dllm_compile.kernels.write_rows import write_rows

from .cache_cases import rope_write_inputs

# rows, heads, key heads, head dim
CASES = [(1, 1, 1, 2), (5, 4, 4, 16), (9, 6, 2, 24), (33, 8, 1, 64)]


def complex_rotation(x, positions):
    """The rotation in fp64 as a multiplication of complex numbers: (first half) + i (second half)."""
    first, second = x.double().chunk(2, -1)
    half = first.shape[-1]
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("case", CASES)
def test_matches_a_complex_rotation(case):
    rows, heads, kv_heads, head_dim = case
    arguments = rope_write_inputs(*case)
    qkv, _, _, positions, cache_rows, k_cache, v_cache, *_ = arguments
    q = qkv_rope_cache_write(*arguments)
    assert q.shape == (rows, heads, head_dim)
    assert q.is_contiguous()
    split = qkv.unflatten(1, (-1, head_dim))
    # fp32 angles up to 100 are off by up to 100 * 2^-24, on values up to 5.
    close = {"rtol": 0, "atol": 5e-5}
    torch.testing.assert_close(q.double(), complex_rotation(split[:, :heads], positions), **close)
    expected = complex_rotation(split[:, heads : heads + kv_heads], positions)
    torch.testing.assert_close(k_cache[cache_rows].double(), expected, **close)
    assert torch.equal(v_cache[cache_rows], split[:, heads + kv_heads :])
    others = torch.ones(len(k_cache), dtype=torch.bool)
    others[cache_rows] = False
    assert (k_cache[others] == 7).all()
    assert (v_cache[others] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_the_separate_operators_bit_for_bit(dtype):
    rows, heads, kv_heads, head_dim = 9, 6, 2, 32
    arguments = rope_write_inputs(rows, heads, kv_heads, head_dim, dtype)
    qkv, cos, sin, positions, cache_rows, k_cache, v_cache, *_ = arguments
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    q = qkv_rope_cache_write(*arguments)
    packed_q, packed_k, packed_v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
    assert torch.equal(q, rope(packed_q, cos, sin, positions, heads))
    write_rows(k_expected, cache_rows, rope(packed_k, cos, sin, positions, kv_heads))
    write_rows(v_expected, cache_rows, packed_v.unflatten(1, (kv_heads, head_dim)))
    assert torch.equal(k_cache, k_expected)
    assert torch.equal(v_cache, v_expected)


def test_padding_rows_may_share_a_spare_row():
    arguments = list(rope_write_inputs(6, 4, 2, 16))
    alone = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    spare = len(arguments[5]) - 1
    rows = torch.tensor([3, 0, 5])
    arguments[4] = torch.tensor([3, spare, 0, spare, 5, spare])
    q = qkv_rope_cache_write(*arguments)
    alone[4] = torch.tensor([3, 9, 0, 10, 5, 11])
    assert torch.equal(q, qkv_rope_cache_write(*alone))
    for cache, expected in zip(arguments[5:7], alone[5:7], strict=True):
        assert torch.equal(cache[rows], expected[rows])
        assert (cache[[1, 2, 4, 6, 7, 8]] == 7).all()


@pytest.mark.parametrize("case", CASES[:3])
def test_opcheck(case):
    torch.library.opcheck(qkv_rope_cache_write, rope_write_inputs(*case))


def test_fake_output_has_the_real_layout():
    arguments = rope_write_inputs(7, 6, 2, 16, torch.bfloat16)
    real = qkv_rope_cache_write(*arguments)
    with FakeTensorMode() as mode:
        fake = qkv_rope_cache_write(*(mode.from_tensor(x) for x in arguments[:7]), *arguments[7:])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_write_then_read_in_one_compiled_graph():
    def write_and_read(*arguments):
        q = qkv_rope_cache_write(*arguments)
        return q.sum() + arguments[5].sum() + arguments[6].sum()

    arguments, again = rope_write_inputs(7, 4, 2, 16), rope_write_inputs(7, 4, 2, 16)
    compiled = torch.compile(write_and_read, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), write_and_read(*again))
    assert torch.equal(arguments[5], again[5])


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (0, torch.zeros(5, 130), "heads of an even size"),
        (0, torch.zeros(5, 128, dtype=torch.float64), "share a dtype"),
        (1, torch.zeros(20, 8), r"must be \[T, 16\] fp32"),
        (3, torch.zeros(5, dtype=torch.int32), "int64"),
        (4, torch.zeros(4, dtype=torch.int64), r"\(5,\) int64"),
        (5, torch.zeros(13, 3, 16), r"caches must be \[K, 2, 16\]"),
        (6, torch.zeros(13, 16, 2).transpose(1, 2), "stride 1"),
    ],
)
def test_wrong_arguments_are_named(index, value, error):
    arguments = list(rope_write_inputs(5, 4, 2, 16))
    arguments[index] = value
    with pytest.raises((ValueError, TypeError), match=error):
        qkv_rope_cache_write(*arguments)


def test_write_rows_writes_the_named_rows_only():
    state = torch.full((11, 3, 5), 7.0)
    packed = torch.randn(4, 2, 3, 5)
    rows = torch.tensor([9, 0, 4, 10])
    write_rows(state, rows, packed[:, 1])
    assert torch.equal(state[rows], packed[:, 1])
    others = [row for row in range(11) if row not in rows]
    assert (state[others] == 7).all()


def test_write_rows_takes_a_row_twice_when_both_agree():
    state, value = torch.zeros(5, 3), torch.randn(2, 3)
    write_rows(state, torch.tensor([3, 1, 3]), value[[0, 1, 0]])
    assert torch.equal(state[[3, 1]], value)
    assert state[[0, 2, 4]].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(7, 3), (5, 3, 9), (1, 1)])
def test_write_rows_opcheck(shape):
    rows = torch.randperm(shape[0])[: max(1, shape[0] // 2)]
    value = torch.randn(len(rows), 2, *shape[1:])[:, 1]
    torch.library.opcheck(write_rows, (torch.randn(shape), rows, value))
