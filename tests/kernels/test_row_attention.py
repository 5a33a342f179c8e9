# SPDX-License-Identifier: Apache-2.0
"""`dllm::row_attention` on the CPU: the specification, the dense fallback, the registration."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_compile.kernels.row_attention import row_attention, row_attention_masked, row_attention_reference

from .cases import dense_attention, packed_heads, tiles_of

# (samples as (rows, keys), pad rows, tile rows, heads, key heads, head dim)
CASES = [
    ([(1, 1)], 0, 64, 1, 1, 16),
    ([(7, 7)], 0, 64, 4, 2, 16),
    ([(5, 5), (1, 1), (13, 13)], 3, 64, 4, 4, 8),
    ([(70, 70), (9, 9)], 0, 16, 6, 2, 24),
    ([(3, 40), (1, 17), (20, 5)], 2, 8, 4, 1, 32),
    ([(33, 64)], 31, 32, 8, 8, 64),
]


def inputs(case):
    samples, pad, tile_rows, heads, kv_heads, head_dim = case
    rows, keys = sum(s[0] for s in samples) + pad, sum(s[1] for s in samples)
    tiles = tiles_of(samples, tile_rows, pad)
    keys = rows if keys + pad == rows else keys
    return *packed_heads(rows, keys, heads, kv_heads, head_dim), tiles, tile_rows


@pytest.mark.parametrize("implementation", [row_attention, row_attention_reference, row_attention_masked])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_dense_definition(case, implementation):
    q, k, v, tiles, tile_rows = inputs(case)
    out = implementation(q, k, v, tiles, tile_rows)
    assert out.shape == (q.shape[0], q.shape[1] * q.shape[2])
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, tiles), rtol=0, atol=2e-6)
    pad = case[1]
    assert pad == 0 or out[-pad:].count_nonzero() == 0


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (4, 2, 16), (8, 1, 64)])
def test_a_sample_is_bit_equal_to_dense_attention_on_it_alone(heads, kv_heads, head_dim):
    lengths = [33, 1, 130, 7]
    q, k, v = packed_heads(sum(lengths), sum(lengths), heads, kv_heads, head_dim)
    out = row_attention(q, k, v, tiles_of([(n, n) for n in lengths], 4096), 4096)
    begin = 0
    for length in lengths:
        # As a model alone with this sample computes it: its own projection, [1, heads, T, hd] views of it.
        query, key, value = (x[begin : begin + length].contiguous().transpose(0, 1)[None] for x in (q, k, v))
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
        alone = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(length, -1)
        assert torch.equal(out[begin : begin + length], alone)
        begin += length


@pytest.mark.parametrize("implementation", [row_attention_reference, row_attention_masked])
def test_empty_tiles_and_their_order_do_nothing(implementation):
    q, k, v = packed_heads(12, 12, 2, 2, 16)
    plain = torch.tensor([[0, 5, 0, 5], [5, 12, 5, 12]], dtype=torch.int32)
    noisy = torch.tensor([[5, 12, 5, 12], [7, 7, 0, 12], [0, 0, 0, 0], [0, 5, 0, 5], [12, 12, 3, 9]], dtype=torch.int32)
    out = implementation(q, k, v, plain, 8)
    torch.testing.assert_close(implementation(q, k, v, noisy, 8), out, rtol=0, atol=0)


def test_a_nan_stays_in_its_sample():
    q, k, v = packed_heads(12, 12, 2, 2, 16)
    for x in (q, k, v):
        x[5:] = torch.nan
    out = row_attention(q, k, v, tiles_of([(5, 5), (7, 7)], 8), 8)
    assert torch.isfinite(out[:5]).all()
    assert out[5:].isnan().all()


def test_fallback_never_reads_the_device():
    # A fake tensor has no data: whatever looks at a value raises.
    with FakeTensorMode():
        q, k = torch.empty(20, 4, 16), torch.empty(30, 2, 16)
        out = row_attention_masked(q, k, k, torch.empty(3, 4, dtype=torch.int32), 16)
    assert out.shape == (20, 64)


@pytest.mark.parametrize("case", CASES[:4])
def test_opcheck(case):
    torch.library.opcheck(row_attention, inputs(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_output_has_the_real_layout(dtype):
    q, k, v = packed_heads(11, 11, 4, 2, 16, dtype)
    tiles = tiles_of([(6, 6), (5, 5)], 64)
    real = row_attention(q, k, v, tiles, 64)
    assert real.is_contiguous()
    with FakeTensorMode() as mode:
        fake = row_attention(*(mode.from_tensor(x) for x in (q, k, v, tiles)), 64)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_one_graph_under_torch_compile():
    def attend(packed, tiles):
        q, k, v = packed[:, :64].view(-1, 4, 16), packed[:, 64:96].view(-1, 2, 16), packed[:, 96:].view(-1, 2, 16)
        return row_attention(q, k, v, tiles, 64) * 2

    packed, tiles = torch.randn(9, 128), tiles_of([(4, 4), (5, 5)], 64)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(packed, tiles), attend(packed, tiles))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"k": torch.zeros(5, 3, 16), "v": torch.zeros(5, 3, 16)}, "no multiple"),
        ({"k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 8)}, "must be"),
        ({"v": torch.zeros(4, 2, 16)}, "must be"),
        ({"v": torch.zeros(5, 2, 16, dtype=torch.float64)}, "share a dtype"),
        ({"tiles": torch.zeros(1, 4, dtype=torch.int64)}, "int32"),
    ],
)
def test_wrong_arguments_are_named(change, error):
    arguments = {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(5, 2, 16),
        "v": torch.zeros(5, 2, 16),
        "tiles": torch.zeros(1, 4, dtype=torch.int32),
        "tile_rows": 64,
    }
    with pytest.raises((ValueError, TypeError), match=error):
        row_attention(**{**arguments, **change})
