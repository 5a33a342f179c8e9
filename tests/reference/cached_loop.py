# SPDX-License-Identifier: Apache-2.0
"""The cache and suffix policies, written out: one prompt, Python lists, a set of rows for each forward.

Follows the definitions of LaCache, prefix, dual, vicinity, dKV (decode), Flash-Cache and DPad step by step. Noise,
commit rules and filling are those of `plain_loop`. Nothing is imported from the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .plain_loop import PlainOptions, _combine, _count, _fill, _propose, _uniform
from .stale_rows import RowModel, StaleCanvas

SUFFIX_STREAM = 2**32 - 2


@dataclass(frozen=True)
class CacheOptions:
    """What the policies read; names as in `DecodingConfig`."""

    cache: str = "none"
    lacache_layers: tuple[int, ...] | str = "first"
    lacache_interval: int | None = None
    refresh_interval: int | None = None
    prefix_look: int = 0
    after_look: int = 0
    warmup_steps: int = 0
    cache_steps: int = 8
    window_length: int = 16
    lookahead: int = 48
    track: int = 64
    score_layers: str = "upper"
    key_end: str = "exact"
    pin: str = "all"
    suffix: str = "all"
    suffix_window: int = 256
    k_sigma: float = 4.0
    scale: float = 2.0


@dataclass
class CachedResult:
    """The final canvas, forwards (CFG counts 2); of each forward its rows, its seen rows, whether it was full."""

    canvas: list[int]
    forwards: int = 0
    decoded: int = 0
    rows: list[list[int]] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    full: list[bool] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)


class _Canvas:
    """The canvas, its cache (two with guidance) and one forward."""

    def __init__(self, model: RowModel, prompt: Sequence[int], options: PlainOptions, key_end: str = "exact") -> None:
        self.options = options
        self.start = len(prompt)
        self.end = self.start + options.max_new_tokens
        self.ids = list(prompt) + [options.mask_id] * options.max_new_tokens
        if key_end == "released":
            self.ids += [options.fill_id] * ((self.end // 128 + 1) * 128 - self.end)
        self.length = len(self.ids)
        self.pads = list(range(self.end, self.length))
        self.given = [i < self.start and self.ids[i] != options.mask_id for i in range(self.length)]
        self.stale = StaleCanvas(model, self.length)
        self.blind = StaleCanvas(model, self.length)
        self.result = CachedResult(self.ids)

    def masked(self, positions: Sequence[int]) -> list[int]:
        return [i for i in positions if self.ids[i] == self.options.mask_id]

    def forward(
        self,
        rows: Sequence[int],
        seen: Sequence[int],
        *,
        full: bool,
        reuse: tuple[list[int], tuple[int, ...]] | None = None,
    ) -> dict[int, Tensor]:
        """`reuse`: the block, and the layers in which LaCache reuses what lies outside of it."""

        def run(stale: StaleCanvas, ids: list[int]) -> dict[int, Tensor]:
            if reuse is not None:
                return stale.forward_reusing(ids, seen, *reuse, fill=full)
            return stale.forward(ids, rows, seen)

        logits = run(self.stale, self.ids)
        if self.options.cfg_scale > 0:
            hidden = [self.options.mask_id if known else one for one, known in zip(self.ids, self.given, strict=True)]
            other = run(self.blind, hidden)
            scale = self.options.cfg_scale + 1
            logits = {i: other[i] + scale * (logits[i] - other[i]) for i in rows}
        self.result.forwards += 2 if self.options.cfg_scale > 0 else 1
        self.result.rows.append(list(rows))
        self.result.seen.append(list(seen))
        self.result.full.append(full)
        return logits

    def commit(
        self, logits: dict[int, Tensor], candidates: Sequence[int], seed: int, steps: int, n: int, i: int
    ) -> list[int]:
        """Propose and commit among the candidates; the positions that were taken."""
        proposals = {p: _propose(logits[p].double().tolist(), p, seed, steps, self.options) for p in candidates}
        ranked = sorted(candidates, key=lambda p: (-proposals[p][1], p))
        taken = ranked[: _count(self.options, [proposals[p][1] for p in ranked], n, i)]
        for position in taken:
            self.ids[position] = proposals[position][0]
        return taken

    def finish(self, end: int) -> None:
        """The answer ends at `end`; what lies behind the canvas is no part of the result."""
        _fill(self.ids, end, self.options)
        self.result.canvas = self.ids[: self.end]
        self.result.decoded = end - self.start

    def stops(self, positions: Sequence[int]) -> list[int]:
        return [i for i in positions if i >= self.start and self.ids[i] in self.options.stop_ids]


def cached_decode(
    model: RowModel, prompt: Sequence[int], options: PlainOptions, policy: CacheOptions, index: int = 0
) -> CachedResult:
    """Decode one prompt; `index` is its place in the call, which only seeds the noise."""
    if policy.cache == "flash":
        return _sliding(model, prompt, options, policy, index)
    return _by_blocks(model, prompt, options, policy, index)


# --- policies with blocks ------------------------------------------------------------------------------------------


def _by_blocks(
    model: RowModel, prompt: Sequence[int], options: PlainOptions, policy: CacheOptions, index: int
) -> CachedResult:
    canvas = _Canvas(model, prompt, options)
    start, length, ids = canvas.start, canvas.length, canvas.ids
    blocks = [list(range(s, min(s + options.block_length, length))) for s in range(start, length, options.block_length)]
    holes = canvas.masked(range(start))
    if holes:
        blocks.insert(0, holes)
    seed, steps, end = options.seed + index, 0, None
    for number, block in enumerate(blocks):
        canvas.result.decoded = block[-1] + 1 - start
        kept = _kept(canvas, block, policy, _combine(seed, number))
        masks_at_start, i, since = len(canvas.masked(block)), 0, 0
        must = True  # the block's first forward computes everything
        last: list[int] = []
        while canvas.masked(block):
            full = must or _is_full(policy, i, steps, since)
            if policy.cache == "lacache":
                layers = (0,) if policy.lacache_layers == "first" else tuple(policy.lacache_layers)
                logits = canvas.forward(kept, kept, full=full, reuse=(block, layers))
            else:
                rows = kept if full else [p for p in _query(canvas, block, policy, last) if p in kept]
                logits = canvas.forward(rows, kept, full=full)
            since = 1 if full else since + 1
            last = canvas.commit(logits, canvas.masked(block), seed, steps, masks_at_start, i)
            must = False
            steps += 1
            i += 1
            if options.eos in ("first", "rightmost") and end is None and canvas.stops(last):
                end = (min if options.eos == "first" else max)(canvas.stops(last)) + 1
                _fill(ids, end, options)
                must = True  # tokens changed outside the block
        if options.eos == "block" and canvas.stops(block):
            end = block[-1] + 1
            _fill(ids, end, options)
        if end is not None:
            break
    return canvas.result


def _is_full(policy: CacheOptions, i: int, steps: int, since: int) -> bool:
    """Whether step i of a block, `since` forwards after the last full one, computes everything."""
    if policy.cache == "none":
        return True
    if policy.cache == "lacache":
        return policy.lacache_interval is not None and since >= policy.lacache_interval
    if policy.cache == "dkv":
        return i in (0, 1) or i % policy.cache_steps == 0
    if policy.cache == "vicinity" and steps < policy.warmup_steps:
        return True
    return policy.refresh_interval is not None and since >= policy.refresh_interval


def _query(canvas: _Canvas, block: list[int], policy: CacheOptions, last: list[int]) -> list[int]:
    first, end = block[0], block[-1] + 1
    if policy.cache == "prefix":
        return list(range(first, canvas.length))
    if policy.cache == "dual":
        return list(range(first, end))
    if policy.cache == "vicinity":
        return list(range(max(0, first - policy.prefix_look), min(canvas.length, end + policy.after_look)))
    assert policy.cache == "dkv"
    return sorted(canvas.masked(range(canvas.length)) + last)


def _kept(canvas: _Canvas, block: list[int], policy: CacheOptions, seed: int) -> list[int]:
    """Positions that exist while the block is decoded."""
    kept = []
    for position in range(canvas.length):
        distance = position - (block[-1] + 1)
        if policy.suffix == "all" or distance < 0 or canvas.ids[position] != canvas.options.mask_id:
            kept.append(position)
        elif policy.suffix == "window":
            kept += [position] if distance < policy.suffix_window else []
        elif _uniform(_combine(seed, position), SUFFIX_STREAM) < keep_probability(distance, policy):
            kept.append(position)
    return kept


def keep_probability(distance: int, policy: CacheOptions) -> float:
    """DPad's P(keep t)."""
    if distance >= policy.suffix_window:
        return 0.0
    z = policy.k_sigma * distance / max(policy.suffix_window - 1, 1)
    return min(1.0, policy.scale * math.exp(-z * z / 2) / math.sqrt(2 * math.pi))


# --- Flash-Cache -----------------------------------------------------------------------------------------------------


def _sliding(
    model: RowModel, prompt: Sequence[int], options: PlainOptions, policy: CacheOptions, index: int
) -> CachedResult:
    canvas = _Canvas(model, prompt, options, policy.key_end)
    everything = list(range(canvas.length))
    layers = list(range(2 if policy.score_layers == "upper" and model.layers > 2 else 0, model.layers))
    n = len(canvas.masked(everything))
    seed, steps, end, ended = options.seed + index, 0, canvas.end, False
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
            budget = max(policy.track, len(last))
            tracked = ascending[len(ascending) - budget :] if budget < len(ascending) else ascending
            rows = sorted((masked + canvas.pads)[: policy.window_length + policy.lookahead] + tracked)
        logits = canvas.forward(rows, everything, full=full)
        canvas.result.windows.append(window)
        scores = canvas.stale.scores(window, layers)
        candidates = [p for p in window if p < end]
        last = canvas.commit(logits, candidates, seed, steps, n, steps)
        steps += 1
        if options.eos in ("first", "rightmost") and not ended and canvas.stops(last):
            end, ended = (min if options.eos == "first" else max)(canvas.stops(last)) + 1, True
    canvas.finish(end)
    return canvas.result
