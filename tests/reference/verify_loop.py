# SPDX-License-Identifier: Apache-2.0
"""Flash-Verify over Flash-Cache, written out: one prompt, Python lists, a list of keys for each row of a verify pass.

Section 11 of the method, step by step. A verify pass holds rows (position, token, kind, rank); who sees whom is the
table of section 11.2, entry by entry. Nothing is imported from the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .cached_loop import CachedResult, CacheOptions, _Canvas
from .plain_loop import PlainOptions, _propose, count_threshold
from .stale_rows import StaleCanvas, dense_attention


@dataclass(frozen=True)
class VerifyOptions:
    """What the second forward of a step reads; names as in `DecodingConfig`, defaults filled in."""

    rule: str = "product"
    gamma: float = 0.8
    candidates: int = 8
    rows: int = 32
    context: int | None = None


class Row(NamedTuple):
    """One row of a verify pass; rank counts candidates from 0."""

    position: int
    token: int
    kind: str
    rank: int


@dataclass
class VerifyResult(CachedResult):
    """As `CachedResult`, with the verify passes: their rows, and how many drafts each had and accepted."""

    passes: list[list[Row]] = field(default_factory=list)
    accepted: list[tuple[int, int]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)


def sees(row: Row, key: Row) -> bool:
    """Section 11.2."""
    if key.kind == "context":
        return True
    if row.kind == "context":
        return key.kind == "mask"
    if row.kind == "draft":
        return key.rank <= row.rank if key.kind == "draft" else key.rank > row.rank
    return key.rank < row.rank if key.kind == "draft" else key.rank >= row.rank


def verify_logits(stale: StaleCanvas, rows: Sequence[Row], length: int) -> dict[int, Tensor]:
    """Logits of the mask rows by rank; the cache is read and not written."""
    fresh = {row.position for row in rows}
    old = [position for position in range(length) if position not in fresh]
    layer = 0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal layer
        out = []
        for i, row in enumerate(rows):
            new = [j for j, key in enumerate(rows) if sees(row, key)]
            assert sorted(old + [rows[j].position for j in new]) == list(range(length)), "each position exactly once"
            keys = [stale.keys[layer][position] for position in old] + [k[j] for j in new]
            values = [stale.values[layer][position] for position in old] + [v[j] for j in new]
            out.append(dense_attention(q[i : i + 1], torch.stack(keys), torch.stack(values)))
        layer += 1
        return torch.cat(out)

    ids, positions = torch.tensor([row.token for row in rows]), torch.tensor([row.position for row in rows])
    logits = stale.model.logits(stale.model.hidden(ids, positions, attend))
    return {row.rank: logits[i] for i, row in enumerate(rows) if row.kind == "mask"}


def count_accepted(
    rule: str, gamma: float, drafts: Sequence[int], best: Sequence[tuple[int, float]], given: Sequence[float]
) -> int:
    """How many drafts are accepted: `best` (token, probability) under each mask, `given` the drafts' probabilities."""
    joint = 0.0
    for i, draft in enumerate(drafts):
        if rule == "product":
            joint += math.log(given[i]) if given[i] > 0 else -math.inf
            passes = gamma == 0 or joint >= math.log(gamma)
        else:
            passes = best[i][0] == draft and best[i][1] >= gamma
        if not passes:
            return i
    return len(drafts)


def verify_decode(
    model: object, prompt: Sequence[int], options: PlainOptions, policy: CacheOptions, verify: VerifyOptions
) -> VerifyResult:
    """Decode one prompt, greedily."""
    canvas = _Canvas(model, prompt, options, policy.key_end)
    canvas.result = result = VerifyResult(canvas.ids)
    everything = list(range(canvas.length))
    layers = list(range(2 if policy.score_layers == "upper" and model.layers > 2 else 0, model.layers))
    end, ended, steps = canvas.end, False, 0
    scores: dict[int, float] = {}
    last: list[int] = []
    while [p for p in canvas.masked(everything) if p < end]:
        masked = canvas.masked(everything)
        window = masked[: policy.window_length]
        full = steps == 0 or policy.track < 0
        rows = everything
        if not full:
            decoded = [p for p in everything if p not in masked + canvas.pads]
            ascending = sorted(decoded, key=lambda p: (p in last, scores[p], p))
            tracked = ascending[-max(policy.track, len(last)) :] if max(policy.track, len(last)) > 0 else []
            rows = sorted((masked + canvas.pads)[: policy.window_length + policy.lookahead] + tracked)
        logits = canvas.forward(rows, everything, full=full)
        result.windows.append(window)
        scores = canvas.stale.scores(window, layers)

        # First forward: everything that is confident, and the best one.
        found = {p: _propose(logits[p].double().tolist(), p, 0, steps, options) for p in window if p < end}
        ranked = sorted(found, key=lambda p: (-found[p][1], p))
        taken = ranked[: count_threshold([found[p][1] for p in ranked], options.parameter)]
        for p in taken:
            canvas.ids[p] = found[p][0]
        stage_end = end
        if not ended and options.eos in ("first", "rightmost") and canvas.stops(taken):
            stage_end = (min if options.eos == "first" else max)(canvas.stops(taken)) + 1

        # Second forward: the best of what is left before the end.
        left = [p for p in ranked if p not in taken and p < stage_end][: verify.candidates]
        accepted = _verified(canvas, left, found, taken, last, scores, verify) if left else []
        for p in accepted:
            canvas.ids[p] = found[p][0]

        both = taken + accepted
        last = both if policy.pin == "all" else accepted  # the released code overwrites the first forward's count
        result.commits.append(len(both))
        if not ended and options.eos in ("first", "rightmost") and canvas.stops(both):
            end, ended = (min if options.eos == "first" else max)(canvas.stops(both)) + 1, True
        steps += 1
    canvas.finish(end)
    return result


def _verified(
    canvas: _Canvas,
    left: list[int],
    found: dict[int, tuple[int, float]],
    taken: list[int],
    last: list[int],
    scores: dict[int, float],
    verify: VerifyOptions,
) -> list[int]:
    """The candidates that a verify pass accepts."""
    options, result = canvas.options, canvas.result
    room = verify.rows - 2 * len(left)
    if verify.context is not None:
        room = min(room, max(verify.context, len(taken)))
    decoded = [p for p in range(canvas.end) if canvas.ids[p] != options.mask_id]
    ascending = sorted(decoded, key=lambda p: (2 if p in taken else 1 if p in last else 0, scores[p], p))
    context = ascending[max(0, len(ascending) - room) :]
    assert set(taken) <= set(context), "a token of this step's first forward has no row of its own"
    rows = [Row(p, canvas.ids[p], "context", 0) for p in context]
    rows += [Row(p, found[p][0], "draft", i) for i, p in enumerate(left)]
    rows += [Row(p, options.mask_id, "mask", i) for i, p in enumerate(left)]
    before = _frozen(canvas.stale)
    logits = verify_logits(canvas.stale, rows, canvas.length)
    assert before == _frozen(canvas.stale), "the cache was written"
    best, given = [], []
    for i, p in enumerate(left):
        z = logits[i].double().tolist()
        best.append(_propose(z, p, 0, 0, options))
        if options.logits_eos_inf:
            z = [-math.inf if token in options.model_eos else value for token, value in enumerate(z)]
        draft, top = found[p][0], max(z)
        share = math.exp(z[draft] - top) / sum(math.exp(value - top) for value in z)
        given.append(0.0 if options.confidence_eos_eot_inf and draft in options.stop_ids else share)
    count = count_accepted(verify.rule, verify.gamma, [found[p][0] for p in left], best, given)
    result.forwards += 1
    result.rows.append([row.position for row in rows])
    result.passes.append(rows)
    result.accepted.append((len(left), count))
    return left[:count]


def _frozen(stale: StaleCanvas) -> list[list[int | None]]:
    """Identities of the cached tensors, which are replaced when they are written."""
    return [[None if one is None else id(one) for one in layer] for layer in (*stale.keys, *stale.values)]
