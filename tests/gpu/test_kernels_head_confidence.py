# SPDX-License-Identifier: Apache-2.0
"""`dllm::head_confidence` on a card: exact inputs for exact tokens, random ones within the roundings made."""

from __future__ import annotations

import pytest
import torch

from dllm_compile._compat import has_triton
from dllm_compile.kernels.head_confidence import head_confidence, head_confidence_reference
from tests.kernels.cases import dense_head, exact_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 16, 17, 33, 64, 129, 300]
# Width 200 ends inside a step, 129 cannot be read by a tensor descriptor.
SIZES = [(1000, 128), (5003, 200), (777, 129)]


def card(*values):
    return tuple(torch.as_tensor(value).cuda() for value in values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "width"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_exact_logits_give_exact_tokens(rows, vocabulary, width, dtype):
    x, weight = card(*exact_head(rows, vocabulary, width, dtype))
    banned = torch.tensor([5, -1, 300], device="cuda")
    for scale in (1.0, 0.3):
        token, confidence = head_confidence(x, weight, scale, 9, banned)
        expected_token, expected, _, _ = dense_head(x, weight, scale, 9, banned)
        assert torch.equal(token, expected_token)
        torch.testing.assert_close(confidence.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_samples(rows, dtype):
    x, weight = card(*exact_head(rows, 5003, 200, dtype))
    seeds, temperature, banned = card(torch.arange(rows) * 7919 - 3, 4.0, [-1])
    arguments = (x, weight, 0.3, 9, banned, seeds, temperature)
    token, confidence = head_confidence(*arguments)
    _, _, candidates, probabilities = dense_head(*arguments)
    chosen = token.unsqueeze(1)
    # The kernel's logarithms differ from torch's in the last places, so that near-ties may fall either way.
    assert (candidates.gather(1, chosen).squeeze(1) >= candidates.amax(1) - 1e-4).all()
    torch.testing.assert_close(confidence.double(), probabilities.gather(1, chosen).squeeze(1), rtol=1e-5, atol=0)
    greedy, _ = head_confidence(*arguments[:5])
    cold, _ = head_confidence(*arguments[:6], torch.tensor(0.0, device="cuda"))
    assert torch.equal(cold, greedy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 257])
def test_random_logits(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1024, generator=generator).to(dtype).cuda()
    weight = (torch.randn(20_011, 1024, generator=generator) / 32).to(dtype).cuda()
    banned = torch.tensor([77], device="cuda")
    token, confidence = head_confidence(x, weight, 1.0, 9, banned)
    z = x.double() @ weight.double().T
    z[:, 77] = -torch.inf
    chosen = z.gather(1, token.unsqueeze(1)).squeeze(1)
    exact = torch.softmax(z, 1).gather(1, token.unsqueeze(1)).squeeze(1)
    z[:, 9] = -torch.inf
    # A logit below 8 in size is rounded by at most half a unit in the last place; fp32 sums add a few 1e-6.
    assert z[z.isfinite()].abs().max() < 8
    error = {torch.float32: 0.0, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype] + 1e-5
    assert (chosen >= z.amax(1) - 2 * error).all()
    assert ((confidence.double() / exact).log().abs() <= 2 * error).all()


def test_full_size_agrees_with_the_library():
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(48, 4096, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(126_464, 4096, generator=generator, device="cuda") / 64).bfloat16()
    banned = torch.tensor([126_348], device="cuda")
    token, confidence = head_confidence(x, weight, 1.0, 126_336, banned)
    logits = torch.nn.functional.linear(x, weight).double()
    logits[:, banned] = -torch.inf
    probabilities = torch.softmax(logits, 1).gather(1, token.unsqueeze(1)).squeeze(1)
    logits[:, 126_336] = -torch.inf
    # Both round fp32 sums of another order to bf16, so that each logit may be one unit (2^-5 below 8) apart.
    chosen = logits.gather(1, token.unsqueeze(1)).squeeze(1)
    assert logits[logits.isfinite()].abs().max() < 8
    assert (chosen >= logits.amax(1) - 2.0**-4).all()
    assert ((confidence.double() / probabilities).log().abs() <= 2.0**-4).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_runs_are_bit_equal(rows, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 256, generator=generator).to(dtype).cuda()
    weight = torch.randn(9001, 256, generator=generator).to(dtype).cuda()
    seeds, temperature, banned = card(torch.arange(rows), 0.7, [-1])
    first = head_confidence(x, weight, 0.1, 9, banned, seeds, temperature)
    for _ in range(3):
        again = head_confidence(x, weight, 0.1, 9, banned, seeds, temperature)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def test_strided_rows_and_weights():
    x, weight = card(*exact_head(20, 500, 64, torch.bfloat16))
    banned = torch.tensor([-1], device="cuda")
    expected = head_confidence(x, weight, 1.0, 9, banned)
    wide = torch.zeros(20, 128, dtype=torch.bfloat16, device="cuda")
    wide[:, 8:72] = x
    transposed = weight.T.contiguous().T
    for token, confidence in (
        head_confidence(wide[:, 8:72], weight, 1.0, 9, banned),
        head_confidence(x, transposed, 1.0, 9, banned),
    ):
        assert torch.equal(token, expected[0])
        assert torch.equal(confidence, expected[1])


def test_noise_has_the_same_bits_as_on_the_cpu():
    from tests.kernels.interpreted import compare_noise

    other_bits, difference = compare_noise("cuda")
    assert other_bits == 0
    assert difference < 1e-5


def test_reference_runs_on_the_card():
    arguments = (*card(*exact_head(5, 9000, 32, torch.bfloat16)), 0.3, 9, torch.tensor([4], device="cuda"))
    token, confidence = head_confidence(*arguments)
    expected_token, expected = head_confidence_reference(*arguments)
    assert torch.equal(token, expected_token)
    torch.testing.assert_close(confidence, expected, rtol=1e-5, atol=0)


def test_captured_graph_reads_temperature_seeds_and_bans_anew():
    x, weight = card(*exact_head(16, 2000, 64, torch.bfloat16))
    seeds, temperature, banned = card(torch.arange(16), 1.0, [-1])
    arguments = (x, weight, 1.0, 9, banned, seeds, temperature)
    for _ in range(3):
        head_confidence(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, confidence = head_confidence(*arguments)
    for step in range(3):
        seeds.add_(1000)
        temperature.fill_(float(step))
        banned.fill_(step)
        graph.replay()
        expected_token, expected = head_confidence(*arguments)
        assert torch.equal(token, expected_token)
        assert torch.equal(confidence, expected)


def test_does_not_wait_for_the_device():
    x, weight = card(*exact_head(16, 2000, 64, torch.bfloat16))
    banned = torch.tensor([-1], device="cuda")
    head_confidence(x, weight, 1.0, 9, banned)
    torch.cuda.set_sync_debug_mode("error")
    try:
        head_confidence(x, weight, 1.0, 9, banned)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck(rows):
    x, weight = card(*exact_head(rows, 100, 32, torch.bfloat16))
    torch.library.opcheck(head_confidence, (x, weight, 0.5, 9, torch.tensor([-1], device="cuda")))
