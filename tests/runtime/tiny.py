# SPDX-License-Identifier: Apache-2.0
"""Ways to run the tiny model behind `RowPrograms`, and comparisons with the references.

`DensePrograms` calls the model once for each sample, with the very call the plain loop makes: logits are equal to the
last bit, so that fp32 tokens must be equal too. `FlatPrograms` computes all rows at once and attends tile by tile, as
compiled programs do; it runs in fp64, where a different order of summation changes no decision.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dllm_compile.config import DecodingConfig
from dllm_compile.kernels import counter_rng
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.facts import ModelFacts, stop_ids
from dllm_compile.runtime.output import GenerationOutput
from dllm_compile.runtime.row_programs import CacheInputs, LaCacheInputs, StepInputs, VerifyInputs
from dllm_compile.runtime.shape import ModelShape
from tests.reference.cached_loop import CachedResult, CacheOptions, cached_decode
from tests.reference.plain_loop import PlainOptions, PlainResult, plain_decode
from tests.reference.stale_rows import Attend, RowModel
from tests.reference.verify_loop import VerifyOptions, verify_decode

from .tiny_model import EOS, EOT, MASK, PAD, VOCAB, TinyModel, attention

__all__ = ["EOS", "EOT", "FACTS", "MASK", "PAD", "VOCAB", "TinyModel"]

FACTS = ModelFacts(vocab_size=VOCAB, max_sequence_length=96, mask_token_id=MASK, eos_token_id=(EOS,), pad_token_id=PAD)


class _Programs:
    """Logits of the wanted rows -> token and confidence, in the plainest way."""

    device = torch.device("cpu")

    def __init__(self, model: TinyModel, tile_rows: int | None = None) -> None:
        self.model = model
        self.tile_rows = tile_rows
        self.calls: list[StepInputs] = []
        self.ids: list[Tensor] = []

    def all_logits(self, inputs: StepInputs) -> Tensor:
        raise NotImplementedError

    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        self.calls.append(inputs)
        self.ids.append(inputs.ids.clone())
        logits = self.all_logits(inputs)
        z = logits[inputs.wanted]
        if inputs.unconditional is not None:
            blind = logits[inputs.unconditional]
            z = blind + (inputs.guidance + 1) * (z - blind)
        return pick(z, inputs)


def pick(z: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    vocabulary = torch.arange(VOCAB)
    z = z.masked_fill((vocabulary[:, None] == inputs.banned).any(-1), -torch.inf)
    scores = z
    if inputs.seeds is not None:
        scores = z + inputs.temperature * counter_rng.gumbel(inputs.seeds[:, None], vocabulary)
    token = scores.masked_fill(vocabulary == MASK, -torch.inf).argmax(-1)
    confidence = z.double().softmax(-1).gather(1, token[:, None]).squeeze(1)
    return token, confidence.float()


class DensePrograms(_Programs):
    """One dense call for each tile, which must be a whole sample."""

    def all_logits(self, inputs: StepInputs) -> Tensor:
        parts = []
        for q_begin, q_end, k_begin, k_end in inputs.tiles.tolist():
            assert (q_begin, q_end) == (k_begin, k_end)
            assert inputs.positions[q_begin:q_end].tolist() == list(range(q_end - q_begin))
            parts.append(self.model.forward(inputs.ids[None, q_begin:q_end])[0])
        return torch.cat(parts)


class FlatPrograms(_Programs):
    """All rows at once; attention follows the tile table."""

    def all_logits(self, inputs: StepInputs) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.full_like(q, torch.nan)  # a row that no tile covers would show
            for q_begin, q_end, k_begin, k_end in inputs.tiles.tolist():
                assert self.tile_rows is None or q_end - q_begin <= self.tile_rows
                out[q_begin:q_end] = attention(q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end])
            return out

        return self.model.logits(self.model.hidden(inputs.ids, inputs.positions, attend))

    @property
    def shape(self) -> ModelShape:
        model = self.model
        width = model.heads * model.head_dim
        return ModelShape(model.layers, model.heads, model.kv_heads, model.head_dim, width, model.dtype)


class CachedPrograms(FlatPrograms):
    """Given rows over caches: written first, then read, by the definition."""

    def __init__(self, model: TinyModel, tile_rows: int | None = None) -> None:
        super().__init__(model, tile_rows)
        self.cache_calls: list[CacheInputs] = []
        self.verify_calls: list[tuple[StepInputs, VerifyInputs]] = []

    def cached_step(self, inputs: StepInputs, cache: CacheInputs) -> tuple[Tensor, Tensor]:
        self.cache_calls.append(cache)
        layer = 0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal layer
            keys, values = cache.caches[f"k_cache_{layer}"], cache.caches[f"v_cache_{layer}"]
            keys[cache.cache_rows], values[cache.cache_rows] = k, v
            if layer in cache.scored:
                self._score(q, keys, cache)
            out = torch.full_like(q, torch.nan)  # a row that no tile covers would show
            for q_begin, q_end, k_begin, k_end in inputs.tiles.tolist():
                assert self.tile_rows is None or q_end - q_begin <= self.tile_rows
                out[q_begin:q_end] = attention(q[q_begin:q_end], keys[k_begin:k_end], values[k_begin:k_end])
            layer += 1
            return out

        self._attend = attend
        try:
            return self.step(inputs)
        finally:
            self._attend = None

    def verify_step(self, inputs: StepInputs, verify: VerifyInputs) -> tuple[Tensor, Tensor, Tensor]:
        self.verify_calls.append((inputs, verify))
        before = {name: cache.clone() for name, cache in verify.caches.items()}
        layer = 0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal layer
            keys, values = verify.caches[f"k_cache_{layer}"], verify.caches[f"v_cache_{layer}"]
            layer += 1
            out = torch.zeros_like(q)
            for q_begin, q_end, k_begin, k_end in inputs.tiles.tolist():
                cached = [row for row in range(k_begin, k_end) if not verify.hidden[row]]
                for row in range(q_begin, q_end):
                    depth = int(verify.views[row, 0])
                    own = [i for i in range(q_begin, q_end) if verify.views[i, 1] <= depth < verify.views[i, 2]]
                    if depth >= 0:
                        seen = (torch.cat((old[cached], new[own])) for old, new in ((keys, k), (values, v)))
                        out[row] = attention(q[row : row + 1], *seen)[0]
            return out

        z = self.model.logits(self.model.hidden(inputs.ids, inputs.positions, attend))[inputs.wanted]
        for name, cache in verify.caches.items():
            assert torch.equal(cache, before[name]), f"{name} was written"
        token, confidence = pick(z, inputs)
        z = z.masked_fill((torch.arange(VOCAB)[:, None] == inputs.banned).any(-1), -torch.inf)
        return token, confidence, z.double().softmax(-1).gather(1, verify.given[:, None]).squeeze(1).float()

    _attend: Attend | None = None

    def all_logits(self, inputs: StepInputs) -> Tensor:
        if self._attend is None:
            return super().all_logits(inputs)
        return self.model.logits(self.model.hidden(inputs.ids, inputs.positions, self._attend))

    @staticmethod
    def _score(q: Tensor, keys: Tensor, cache: CacheInputs) -> None:
        for window, (begin, end) in zip(cache.window.tolist(), cache.spans.tolist(), strict=True):
            rows = [row for row in window if row >= 0]
            if rows:
                key = keys[begin:end].repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
                cache.scores[begin:end] += torch.einsum("qhd,khd->k", q[rows].double(), key.double()).float()


class ScriptedPrograms:
    """Proposes a given token with a given confidence at each canvas position, whatever the canvas holds."""

    device = torch.device("cpu")
    tile_rows = None

    def __init__(self, tokens: list[int], confidence: list[float]) -> None:
        self.tokens, self.confidence = torch.tensor(tokens), torch.tensor(confidence)
        self.steps = 0

    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        self.steps += 1
        at = inputs.positions[inputs.wanted]
        return self.tokens[at], self.confidence[at]

    shape = ModelShape(3, 4, 2, 8, 32, torch.float32)

    def cached_step(self, inputs: StepInputs, cache: CacheInputs) -> tuple[Tensor, Tensor]:
        return self.step(inputs)

    def lacache_step(self, inputs: StepInputs, cache: LaCacheInputs) -> tuple[Tensor, Tensor]:
        return self.step(inputs)


def prompts_of(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Random prompts without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, PAD, (length,), generator=generator) for length in lengths]


def options_of(config: DecodingConfig, facts: ModelFacts = FACTS) -> PlainOptions:
    """The plain loop's options for a configuration."""
    stops = stop_ids(facts, config.eos_token_id)
    own = [one for one in facts.eos_token_id if one in stops]
    return PlainOptions(
        mask_id=facts.mask_token_id,
        stop_ids=stops,
        model_eos=facts.eos_token_id,
        fill_id=(*own, *stops, facts.mask_token_id)[0],
        max_new_tokens=config.max_new_tokens,
        block_length=config.block_length,
        steps=config.steps,
        rule=config.rule,
        parameter=0.0 if config.rule == "quota" else config.rule_parameter,
        released_last_rank=config.last_rank == "released",
        temperature=config.temperature,
        cfg_scale=config.cfg_scale,
        remasking=config.remasking,
        eos=config.eos_rule,
        logits_eos_inf=config.logits_eos_inf,
        confidence_eos_eot_inf=config.confidence_eos_eot_inf,
        seed=config.seed,
    )


def cache_options_of(config: DecodingConfig) -> CacheOptions:
    """The reference's options of a cache and suffix policy."""
    return CacheOptions(**{field.name: getattr(config, field.name) for field in dataclasses.fields(CacheOptions)})


def verify_options_of(config: DecodingConfig) -> VerifyOptions:
    """The reference's options of a verify pass."""
    size, most, gamma = config.verify_size, config.most_candidates, config.verify_gamma
    return VerifyOptions(config.verify_rule, gamma, most, size, config.verify_context)


def cached(
    model: RowModel, prompts: list[Tensor], config: DecodingConfig, facts: ModelFacts = FACTS
) -> list[CachedResult]:
    """Each prompt by itself through the reference of its policy."""
    options = options_of(config, facts)
    if not config.has_blocks:
        options = dataclasses.replace(options, block_length=config.max_new_tokens)
    policy = cache_options_of(config)
    if config.rule == "flash_verify":
        verify = verify_options_of(config)
        return [verify_decode(model, prompt.tolist(), options, policy, verify) for prompt in prompts]
    return [cached_decode(model, prompt.tolist(), options, policy, i) for i, prompt in enumerate(prompts)]


def assert_equals_cached(
    programs: CachedPrograms, prompts: list[Tensor], config: DecodingConfig, facts: ModelFacts = FACTS
) -> tuple[GenerationOutput, list[CachedResult]]:
    """Tokens, counts and computed rows of one call are those of the policy's reference, prompt by prompt."""
    output = decode(programs, facts, prompts, config)
    expected = cached(programs.model, prompts, config, facts)
    assert canvases(output, prompts, config) == [one.canvas for one in expected]
    assert output.stats is not None
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)
    assert output.stats.canvas_tokens == sum(one.decoded for one in expected)
    if config.check_every == 1:
        per_row = 2 if config.cfg_scale > 0 else 1
        assert output.stats.row_forwards == per_row * sum(len(rows) for one in expected for rows in one.rows)
    return output, expected


def plain(model: TinyModel, prompts: list[Tensor], config: DecodingConfig) -> list[PlainResult]:
    """Each prompt by itself through the plain loop."""
    options = options_of(config)
    return [plain_decode(model.forward, prompt.tolist(), options, i) for i, prompt in enumerate(prompts)]


def canvases(output: GenerationOutput, prompts: list[Tensor], config: DecodingConfig) -> list[list[int]]:
    """Rows of `sequences` without the padding in front."""
    width = max(len(prompt) for prompt in prompts)
    assert output.sequences is not None
    assert output.sequences.shape == (len(prompts), width + config.max_new_tokens)
    for row, prompt in zip(output.sequences, prompts, strict=True):
        assert (row[: width - len(prompt)] == PAD).all()
    return [row[width - len(p) :].tolist() for row, p in zip(output.sequences, prompts, strict=True)]


def assert_equals_plain(
    programs: _Programs, prompts: list[Tensor], config: DecodingConfig
) -> tuple[GenerationOutput, list[PlainResult]]:
    """Tokens and counts of one call are those of the plain loop, prompt by prompt."""
    output = decode(programs, FACTS, prompts, config)
    expected = plain(programs.model, prompts, config)
    assert canvases(output, prompts, config) == [one.canvas for one in expected]
    assert output.stats is not None
    assert output.stats.forwards_per_row == tuple(one.forwards for one in expected)
    assert output.stats.canvas_tokens == sum(one.decoded for one in expected)
    return output, expected
