# SPDX-License-Identifier: Apache-2.0
"""`dllm::head_confidence` on the CPU: the specification and the registration."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_compile.kernels.head_confidence import head_confidence, head_confidence_reference

from .cases import dense_head, exact_head

NONE = torch.tensor([-1])


def random_head(rows, vocabulary, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(rows + vocabulary, width, generator=generator).to(dtype)
    return draw[:rows], draw[rows:]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("banned", [[], [-1], [3, 8191, -1, 8192]])
@pytest.mark.parametrize("sampled", [False, True])
def test_matches_the_dense_definition(scale, banned, sampled):
    x, weight = random_head(9, 20_000, 24)  # three chunks
    seeds = torch.arange(9) * 7919 - 3 if sampled else None
    temperature = torch.tensor(0.8) if sampled else None
    arguments = (x, weight, scale, 5, torch.tensor(banned, dtype=torch.int64), seeds, temperature)
    token, confidence = head_confidence(*arguments)
    expected_token, expected_confidence, _, _ = dense_head(*arguments)
    assert (token.dtype, confidence.dtype) == (torch.int64, torch.float32)
    assert torch.equal(token, expected_token)
    torch.testing.assert_close(confidence.double(), expected_confidence, rtol=2e-5, atol=0)


def test_ties_go_to_the_lowest_id_within_and_across_chunks():
    x, weight = exact_head(6, 20_000, 12, torch.float32)
    token, confidence = head_confidence(x, weight, 1.0, -1, NONE)
    logits = x @ weight.T
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(token, first)
    assert (token < 10_000).all()  # the same weights follow again in the upper half
    torch.testing.assert_close(confidence, torch.softmax(logits, 1).amax(1), rtol=1e-5, atol=0)


def test_mask_is_never_chosen_and_keeps_its_share():
    x, weight = random_head(4, 50, 16)
    token, _ = head_confidence(x, weight, 1.0, -1, NONE)
    for row, best in enumerate(token.tolist()):
        second, confidence = head_confidence(x[row : row + 1], weight, 1.0, best, NONE)
        logits = x[row] @ weight.T
        assert second.item() == logits.topk(2).indices[1]
        torch.testing.assert_close(confidence[0], torch.softmax(logits, 0)[second.item()], rtol=1e-5, atol=0)


def test_banned_ids_leave_the_softmax():
    x, weight = random_head(4, 50, 16)
    token, _ = head_confidence(x, weight, 1.0, -1, NONE)
    for row, best in enumerate(token.tolist()):
        second, confidence = head_confidence(x[row : row + 1], weight, 1.0, -1, torch.tensor([best, -1]))
        logits = (x[row] @ weight.T).index_fill(0, torch.tensor(best), -torch.inf)
        assert second.item() == logits.argmax()
        torch.testing.assert_close(confidence[0], torch.softmax(logits, 0).max(), rtol=1e-5, atol=0)


def test_a_whole_chunk_can_be_banned():
    x, weight = random_head(3, 8192 + 5, 8)
    token, confidence = head_confidence(x, weight, 1.0, -1, torch.arange(8192))
    assert (token >= 8192).all()
    torch.testing.assert_close(confidence, torch.softmax(x @ weight[8192:].T, 1).amax(1), rtol=1e-5, atol=0)


def test_logits_are_rounded_to_the_dtype_before_the_softmax():
    x, weight = random_head(16, 300, 64, torch.bfloat16)
    token, confidence = head_confidence(x, weight, 0.3, 7, NONE)
    logits = (torch.nn.functional.linear(x, weight) * 0.3).float()
    probabilities = torch.softmax(logits, 1).gather(1, token.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(confidence, probabilities, rtol=1e-5, atol=0)
    unrounded = torch.softmax(x.float() @ weight.float().T * 0.3, 1).gather(1, token.unsqueeze(1)).squeeze(1)
    assert not torch.allclose(confidence, unrounded, rtol=1e-5, atol=0)


def test_extreme_logits_stay_finite():
    x = torch.tensor([[1.0], [-1.0]])
    weight = torch.tensor([[3e38], [-3e38], [2.9e38]])
    token, confidence = head_confidence(x, weight, 1.0, -1, NONE)
    assert token.tolist() == [0, 1]
    assert confidence.tolist() == [1.0, 1.0]


def test_temperature_zero_is_greedy_and_confidence_is_of_unperturbed_logits():
    x, weight = random_head(32, 500, 16)
    greedy, _ = head_confidence(x, weight, 1.0, -1, NONE)
    seeds = torch.arange(32)
    assert torch.equal(head_confidence(x, weight, 1.0, -1, NONE, seeds, torch.tensor(0.0))[0], greedy)
    token, confidence = head_confidence(x, weight, 1.0, -1, NONE, seeds, torch.tensor(3.0))
    assert (token != greedy).any()
    probabilities = torch.softmax(x @ weight.T, 1).gather(1, token.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(confidence, probabilities, rtol=1e-5, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(temperature):
    draws, vocabulary = 20_000, 12
    _, weight = random_head(0, vocabulary, 4, seed=3)
    x = torch.ones(draws, 4)
    token, _ = head_confidence(x, weight, 1.0, -1, NONE, torch.arange(draws), torch.tensor(temperature))
    expected = torch.softmax((weight.sum(1) / temperature).double(), 0) * draws
    keep = expected > 5
    observed = torch.bincount(token, minlength=vocabulary).double()
    chi_square = ((observed - expected) ** 2 / expected)[keep].sum().item()
    freedom = int(keep.sum()) - 1
    assert freedom >= 4
    assert chi_square < freedom + 4.5 * (2 * freedom) ** 0.5


def test_a_row_does_not_depend_on_its_neighbours():
    x, weight = random_head(8, 300, 16)
    seeds, temperature = torch.arange(8) + 40, torch.tensor(1.0)
    together, _ = head_confidence(x, weight, 1.0, 3, NONE, seeds, temperature)
    alone = [head_confidence(x[i : i + 1], weight, 1.0, 3, NONE, seeds[i : i + 1], temperature)[0] for i in range(8)]
    assert torch.equal(together, torch.cat(alone))


def test_no_array_of_all_logits_is_kept():
    rows, vocabulary = 4, 30_000
    x, weight = random_head(rows, vocabulary, 8)
    inputs = {x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            storages = [t.untyped_storage() for t in torch.utils._pytree.tree_leaves(out)]
            sizes.extend(s.nbytes() for s in storages if s.data_ptr() not in inputs)
            return out

    with Watch():
        head_confidence_reference(x, weight, 0.5, 3, NONE, torch.arange(rows), torch.tensor(1.0))
    assert max(sizes) == rows * 8192 * 8  # the noise's integers of one chunk; all logits would be 480,000 bytes


@pytest.mark.parametrize(("rows", "vocabulary", "width"), [(1, 17, 5), (7, 33, 12), (0, 9, 4)])
@pytest.mark.parametrize("sampled", [False, True])
def test_opcheck(rows, vocabulary, width, sampled):
    x, weight = random_head(rows, vocabulary, width)
    noise = (torch.arange(rows), torch.tensor(0.5)) if sampled else (None, None)
    torch.library.opcheck(head_confidence, (x, weight, 0.7, 3, NONE, *noise))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_outputs_have_the_real_layout(dtype):
    x, weight = random_head(5, 40, 8, dtype)
    real = head_confidence(x, weight, 1.0, 3, NONE)
    with FakeTensorMode() as mode:
        fake = head_confidence(*(mode.from_tensor(t) for t in (x, weight)), 1.0, 3, mode.from_tensor(NONE))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.zeros(2, 3), torch.zeros(5, 4), 1.0, 0, NONE), "must be"),
        ((torch.zeros(2, 3), torch.zeros(5, 3, dtype=torch.bfloat16), 1.0, 0, NONE), "share a dtype"),
        ((torch.zeros(2, 3), torch.zeros(5, 3), 1.0, 0, NONE, torch.zeros(2, dtype=torch.int64)), "together"),
        ((torch.zeros(2, 3), torch.zeros(5, 3), 1.0, 0, NONE, torch.arange(3), torch.tensor(1.0)), "seeds must be"),
        ((torch.zeros(2, 3), torch.zeros(5, 3), 1.0, 0, NONE.unsqueeze(0)), "banned"),
    ],
)
def test_wrong_arguments_are_named(arguments, error):
    with pytest.raises((ValueError, TypeError), match=error):
        head_confidence(*arguments)
