# SPDX-License-Identifier: Apache-2.0
"""The bounds of Flash-Verify's appendix on the bundled model: every pair of tokens of real verify passes."""

from __future__ import annotations

import math

import pytest
import torch

from dllm_compile.config import DecodingConfig
from dllm_compile.models.small.problem import held_out
from dllm_compile.runtime.commit import FlashVerifyRule
from tests.reference import verify_loop
from tests.reference.llada_rows import LladaRows

from .tiny import cached

GAMMAS = [0.05 * i for i in range(1, 20)]


def enumerated(stale, rows, length) -> tuple[torch.Tensor, list[int], list[int]]:
    """(V, V) fp64: probability of every pair at the two candidates, drawn one after the other from the pass's own
    conditionals; the drafts, and the best token of each mask given the drafts."""
    drafts = [row.token for row in sorted(rows, key=lambda row: row.rank) if row.kind == "draft"]

    def conditionals(first: int) -> list[torch.Tensor]:
        changed = [row._replace(token=first) if row.kind == "draft" and row.rank == 0 else row for row in rows]
        logits = verify_loop_logits(stale, changed, length)
        return [logits[rank].double().softmax(-1) for rank in (0, 1)]

    first, second = conditionals(drafts[0])
    joint = torch.zeros(len(first), len(first), dtype=torch.float64)
    ascending, tokens = first.sort()
    for token in tokens[ascending.cumsum(0) > 5e-7].tolist():  # those left out weigh less than the tolerance together
        joint[token] = first[token] * conditionals(token)[1]
    return joint, drafts, [int(first.argmax()), int(second.argmax())]


verify_loop_logits = verify_loop.verify_logits


@pytest.fixture(scope="module")
def passes(small_model, small_fast, small_tokenizer):
    """A pass with two candidates of each of three held-out problems: any, then such as are likely to be accepted."""
    found = []
    config = DecodingConfig(
        max_new_tokens=24, cache="flash", commit="flash_verify", window_length=3, verify_candidates=2, lookahead=2,
        track=2, threshold=0.99, eos="none",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for least, problem in zip((0.0, 0.5, 0.8), held_out("arithmetic", 3), strict=True):
            taken = []

            def watch(stale, rows, length, least=least, taken=taken):
                logits = verify_loop_logits(stale, rows, length)
                (draft,) = (row.token for row in rows if row.kind == "draft" and row.rank == 0)
                if not taken and len(logits) == 2 and logits[0].softmax(-1)[draft] >= least:
                    taken.append(enumerated(stale, rows, length))
                return logits

            patch.setattr(verify_loop, "verify_logits", watch)
            prompt = torch.tensor(small_tokenizer(problem.prompt)["input_ids"])
            cached(LladaRows(small_model), [prompt], config, small_fast.facts)
            found += taken
    assert len(found) == 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize("product", [True, False], ids=["product", "per_token"])
def test_total_variation_of_what_is_accepted(passes, product):
    """Within 1 - gamma (product), 1 - gamma^m (per token); one token within 1 - gamma by either."""
    counts = []
    for joint, drafts, best in passes:
        assert abs(joint.sum().item() - 1) < 1e-6
        first = joint.sum(1)
        chosen = [first[drafts[0]].item(), (joint[drafts[0], drafts[1]] / first[drafts[0]]).item()]
        highest = [first.max().item(), (joint[drafts[0]].max() / first[drafts[0]]).item()]
        for gamma in GAMMAS:
            rule = FlashVerifyRule(0.99, gamma, product, 2)
            tensors = [torch.tensor([values]) for values in (drafts, best, highest, chosen)]
            kept = int(rule.accept(*tensors, torch.ones(1, 2, dtype=torch.bool)).sum())
            counts.append(kept)
            distribution = [torch.ones(()), first, joint][kept].double()
            point = torch.zeros_like(distribution)
            point[tuple(drafts[:kept])] = 1.0
            distance = 0.5 * (point - distribution).abs().sum().item()
            assert abs(distance - (1 - math.prod(chosen[:kept]))) < 1e-6
            assert distance <= (1 - gamma if product else 1 - gamma**kept) + 1e-6
    assert len(set(counts)) > 1, "some are accepted, and some are not"
