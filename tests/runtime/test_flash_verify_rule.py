# SPDX-License-Identifier: Apache-2.0
"""Flash-Verify's choice and acceptance of drafts, and the rows of a verify pass (section 11)."""

from __future__ import annotations

import math

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.runtime.cache.verify_rows import Drafts, verify_rows
from dllm_compile.runtime.commit import FlashVerifyRule, commit_rule
from dllm_compile.runtime.layout import Layout, Sample
from tests.reference.verify_loop import Row, count_accepted, sees

from .tiny import MASK

DRAFT = torch.tensor([[3, 4, 5, 6, 7]])


def rule_of(rule: str, gamma: float, candidates: int = 8) -> FlashVerifyRule:
    return FlashVerifyRule(0.9, gamma, rule == "product", candidates)


def accepted(rule, gamma, draft, token, confidence, probability, real=None):
    real = torch.ones_like(draft, dtype=torch.bool) if real is None else real
    return rule_of(rule, gamma).accept(draft, token, confidence, probability, real)


def test_the_rule_of_a_configuration():
    config = DecodingConfig(cache="flash", commit="flash_verify", threshold=0.7, gamma=0.6, verify_rule="per_token")
    assert commit_rule(config) == FlashVerifyRule(0.7, 0.6, product=False, candidates=8)


def test_hand_made_probabilities():
    """T6: 0.95, 0.95, 0.95, 0.9, 0.9 and gamma 0.8: three by the product, five by themselves."""
    p = torch.tensor([[0.95, 0.95, 0.95, 0.9, 0.9]])
    assert accepted("product", 0.8, DRAFT, DRAFT, p, p).sum() == 3
    assert accepted("per_token", 0.8, DRAFT, DRAFT, p, p).sum() == 5
    other = torch.tensor([[3, 4, 9, 6, 7]])
    assert accepted("per_token", 0.8, DRAFT, other, p, p).sum() == 2, "stops where they disagree"
    unsure = torch.tensor([[0.95, 0.79, 0.95, 0.9, 0.9]])
    assert accepted("per_token", 0.8, DRAFT, DRAFT, unsure, unsure).sum() == 1


def random_verdicts(samples=400, columns=8, seed=0):
    """Draft, best token, its probability, the draft's; the best is at least the draft and they add up to at most 1."""
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randint(0, 30, (samples, columns), generator=generator)
    agree = torch.rand(samples, columns, generator=generator) < 0.8
    q = torch.rand(samples, columns, generator=generator) ** 0.15
    p = torch.where(agree, q, torch.minimum(q, 1 - q) * torch.rand(samples, columns, generator=generator))
    token = torch.where(agree, draft, draft + 1)
    real = torch.arange(columns) < torch.randint(0, columns + 1, (samples, 1), generator=generator)
    return draft, token, q, p, real


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.51, 0.8, 0.95, 1.0, 1.1])
@pytest.mark.parametrize("rule", ["product", "per_token"])
def test_equals_the_loop(rule, gamma):
    """The contract: a prefix of the real candidates, each sample by itself."""
    draft, token, q, p, real = random_verdicts()
    take = accepted(rule, gamma, draft, token, q, p, real)
    for i, row in enumerate(take.tolist()):
        n = int(real[i].sum())
        best = list(zip(token[i, :n].tolist(), q[i, :n].tolist(), strict=True))
        count = count_accepted(rule, gamma, draft[i, :n].tolist(), best, p[i, :n].tolist())
        assert row == [True] * count + [False] * (8 - count)
    alone = torch.cat([accepted(rule, gamma, *(x[i : i + 1] for x in (draft, token, q, p, real))) for i in range(50)])
    assert torch.equal(alone, take[:50])


@pytest.mark.parametrize("gamma", [0.51, 0.6, 0.8, 0.9, 0.99])
def test_product_accepts_a_prefix_of_per_token(gamma):
    """T5, above one half; some drafts are accepted by both, and some by one only."""
    verdicts = random_verdicts(4000)
    by_product, by_token = (accepted(rule, gamma, *verdicts) for rule in ("product", "per_token"))
    assert (by_product <= by_token).all()
    assert by_product.any()
    assert (by_product != by_token).any()


def test_ends_of_gamma():
    """T4: above 1 none; at 0 all, or all that agree."""
    draft, token, q, p, real = random_verdicts()
    for rule in ("product", "per_token"):
        assert not accepted(rule, 1.1, draft, token, torch.ones_like(q), torch.ones_like(p), real).any()
    assert torch.equal(accepted("product", 0.0, draft, token, q, p, real), real)
    zero = torch.zeros_like(p)
    assert torch.equal(accepted("product", 0.0, draft, token, q, zero, real), real)
    agreeing = real & ((token == draft).long().cumprod(1) > 0)
    assert torch.equal(accepted("per_token", 0.0, draft, token, q, p, real), agreeing)


def test_no_number_accepts_nothing():
    p = torch.tensor([[0.99, math.nan, 0.99]])
    draft = torch.tensor([[1, 2, 3]])
    for rule in ("product", "per_token"):
        assert accepted(rule, 0.5, draft, draft, p, p).tolist() == [[True, False, False]]


def test_search_takes_the_most_confident_first_and_ties_by_position():
    confidence = torch.tensor([[0.3, 0.7, 0.7, 0.9, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
    valid = torch.tensor([[True, True, True, False, True], [False, False, True, False, False]])
    search = rule_of("product", 0.8, 3).search(confidence, valid)
    assert search.columns[0].tolist() == [1, 2, 0]
    assert search.real.tolist() == [[True, True, True], [True, False, False]]
    assert search.columns[1, 0] == 2
    wide = rule_of("product", 0.8, 9).search(confidence, valid)
    assert wide.columns.shape == (2, 5), "no more than there are"


# --- rows of a pass ---------------------------------------------------------------------------------------------------


def lay_out(lengths, candidates, committed, *, size=32, context=None, seed=0):
    """A pass over samples whose decoded rows rank by a random order, checked row by row; the context of each."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        Sample(i, torch.zeros(1, dtype=torch.int64), n, (torch.arange(1),), False) for i, n in enumerate(lengths)
    ]
    layout = Layout.of(samples, mask_token_id=MASK, tile_rows=None, guided=False, device=torch.device("cpu"))
    tokens, from_end = torch.randint(0, 30, (layout.rows,), generator=generator), torch.zeros(layout.rows).long()
    rows, drafts = torch.zeros(len(lengths), 8).long(), torch.randint(0, 30, (len(lengths), 8), generator=generator)
    flags = torch.zeros(layout.rows, dtype=torch.bool)
    ranked = []
    for i, (length, count) in enumerate(zip(lengths, candidates, strict=True)):
        order = layout.offsets[i] + torch.randperm(length, generator=generator)
        rows[i, :count] = order[:count]  # the masks
        tokens[order[:count]] = MASK
        from_end[order[count:]] = torch.arange(1, length - count + 1)
        from_end[order[:count]] = torch.arange(length - count + 1, length + 1)
        flags[order[count : count + committed[i]]] = True
        ranked.append(order[count:].tolist())
    real = torch.arange(8) < torch.tensor(candidates)[:, None]
    backwards = torch.argsort(from_end, descending=True)
    plan = verify_rows(
        Drafts(rows, drafts, real, flags, torch.tensor([-1])),
        backwards[torch.sort(layout.sample_of_row[backwards], stable=True).indices],
        tokens,
        layout,
        size=size,
        context=context,
        mask_token_id=MASK,
    )
    assert plan.rows.shape == (len(lengths) * size,)
    found = []
    for i, count in enumerate(candidates):
        first = i * size
        here = range(first, first + size)
        kinds = {}
        for row in here:
            depth, begin, end = plan.views[row].tolist()
            if depth < 0:
                assert not plan.real[row]
                continue
            at, token = int(plan.rows[row]), int(plan.ids[row])
            if at not in rows[i, :count]:
                assert (depth, begin) == (0, 0)
                assert token == tokens[at] != MASK
                kinds[row] = Row(at, token, "context", 0)
            else:
                rank = rows[i, :count].tolist().index(at)
                kinds[row] = Row(at, token, "mask" if token == MASK else "draft", rank)
        for row, one in kinds.items():
            seen = {key for key in here if plan.views[key, 1] <= plan.views[row, 0] < plan.views[key, 2]}
            assert seen == {key for key, other in kinds.items() if sees(one, other)}
        for rank in range(count):
            (draft,) = (one for one in kinds.values() if one.kind == "draft" and one.rank == rank)
            assert draft.token == drafts[i, rank]
            assert kinds[int(plan.masks[i, rank])] == Row(draft.position, MASK, "mask", rank)
        context_rows = [one.position for one in kinds.values() if one.kind == "context"]
        assert context_rows == ranked[i][: len(context_rows)], "the best ranks, in order"
        begin, end = layout.offsets[i], layout.offsets[i] + lengths[i]
        expected = [first, first + size, begin, end if count else begin]
        assert plan.tiles[i].tolist() == expected
        found.append(len(context_rows))
    return found


def test_rows_for_every_number_of_candidates():
    """T9: 2m rows whatever S is; two for each candidate, the rest context; none where there is nothing to check."""
    assert lay_out([60] * 9, list(range(9)), [1] * 9) == [0, *(32 - 2 * s for s in range(1, 9))]


def test_short_decoded_parts_are_padded():
    """T8: fewer decoded rows than there is room for."""
    assert lay_out([9, 2, 12, 40], [8, 1, 4, 8], [1, 1, 2, 8]) == [1, 1, 8, 16]


@pytest.mark.parametrize(
    ("context", "expected"), [(0, [3, 8, 1]), (5, [5, 8, 5]), (20, [20, 16, 20]), (99, [26, 16, 24])]
)
def test_context_is_limited_but_for_tokens_of_the_step(context, expected):
    assert lay_out([60, 60, 60], [3, 8, 4], [3, 8, 1], context=context) == expected


def test_the_smallest_pass_has_room_for_all_commits():
    """verify_rows = window + candidates: k committed and 2 (m - k) rows for the rest fit for every k."""
    for left in range(1, 9):
        assert lay_out([40], [left], [16 - left], size=24) == [24 - 2 * left]
        assert 24 - 2 * left >= 16 - left
