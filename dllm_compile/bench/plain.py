# SPDX-License-Identifier: Apache-2.0
"""The plain loop: the model's own forward over the whole canvas in every step, and the same commit rule.

What people run without this package: nothing is cached, every row's logits are made, the host looks at each step. It
takes rectangular batches, so prompts of different lengths are decoded one length after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DecodingConfig
from ..errors import ConfigError
from ..runtime.commit import commit_rule
from ..runtime.eos import BlockView, eos_rule
from ..runtime.facts import ModelFacts, stop_ids
from ..runtime.output import FinishedRow, GenerationOutput, build_output
from ..runtime.state import NO_END

Forward = Callable[[Tensor], Tensor]
"""(B, N) int64 -> logits (B, N, V)."""


def plain_config(config: DecodingConfig) -> DecodingConfig:
    """What a plain loop can do of `config`: its lengths, end and commit rule; no cache, no suffix, no verify pass.

    Raises:
        ConfigError: something that changes which tokens come out and that the plain loop does not do.
    """
    for name in ("temperature", "cfg_scale", "infill", "confidence_eos_eot_inf", "logits_eos_inf"):
        if getattr(config, name):
            raise ConfigError(f"bench compares greedy decoding with a plain loop, which has no {name}: leave it out")
    if config.remasking == "random":
        raise ConfigError("bench compares with a plain loop, which has no remasking='random': leave it out")
    if config.rule == "flash_verify":
        return config.replace(
            commit="threshold",
            threshold=config.rule_parameter,
            gamma=None,
            verify_rule="product",
            verify_candidates=None,
            verify_context=None,
            verify_rows=None,
        )
    return config


def decode_plainly(
    forward: Forward, prompts: Sequence[Sequence[int]], config: DecodingConfig, facts: ModelFacts, device: torch.device
) -> GenerationOutput:
    """Decode prompts with the plain loop.

    Args:
        forward: logits of a rectangular batch.
        prompts: token ids.
        config: as `plain_config` returns it. With cache="flash" the candidates are the leftmost masks.
        facts: ids of the model, the mask id among them.
        device: where `forward` computes.

    Returns:
        As `generate` returns it, with figures counted the same way.
    """
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(i)
    rows: list[FinishedRow | None] = [None] * len(prompts)
    forwards = row_forwards = 0
    started = time.perf_counter()
    for places in groups.values():
        batch = torch.tensor([list(prompts[i]) for i in places], device=device)
        done = _Batch(batch, config, facts).run(forward)
        forwards += done.forwards
        row_forwards += done.forwards * done.canvas.numel()
        for i, row in zip(places, done.rows(), strict=True):
            rows[i] = row
    stops = stop_ids(facts, config.eos_token_id)
    return build_output(
        [row for row in rows if row is not None],
        stops=stops,
        pad_id=next((one for one in (facts.pad_token_id, *facts.eos_token_id) if one is not None), 0),
        forwards=forwards,
        row_forwards=row_forwards,
        seconds=time.perf_counter() - started,
        device=device,
    )


@dataclass
class _Batch:
    """Prompts of one length."""

    prompts: Tensor
    config: DecodingConfig
    facts: ModelFacts

    def __post_init__(self) -> None:
        assert self.facts.mask_token_id is not None, "prompts are checked first"
        self.mask_id = self.facts.mask_token_id
        count, self.start = self.prompts.shape
        masks = self.prompts.new_full((count, self.config.max_new_tokens), self.mask_id)
        self.canvas = torch.cat([self.prompts, masks], dim=1)
        stops = stop_ids(self.facts, self.config.eos_token_id)
        self.stops = torch.tensor(stops, dtype=torch.int64, device=self.canvas.device)
        own = [one for one in self.facts.eos_token_id if one in stops]
        self.fill = next(iter((*own, *stops)), self.mask_id)
        self.rule, self.ends = commit_rule(self.config), eos_rule(self.config)
        self.forwards = 0
        self.active = torch.zeros(count, dtype=torch.int64, device=self.canvas.device)
        self.decoded = torch.zeros(count, dtype=torch.int64, device=self.canvas.device)
        self.end = torch.full_like(self.active, NO_END)
        self.done = torch.zeros(count, dtype=torch.bool, device=self.canvas.device)

    @torch.no_grad()
    def run(self, forward: Forward) -> _Batch:
        """Decode block after block; a sample that has ended stays as it is."""
        length = self.config.block_length if self.config.has_blocks else self.config.max_new_tokens
        total = self.canvas.shape[1]
        for begin in range(self.start, total, length):
            end = min(begin + length, total)
            self._block(forward, begin, end)
            if bool(self.done.all()):
                break
        self.canvas[self.canvas == self.mask_id] = self.fill
        return self

    def _block(self, forward: Forward, begin: int, end: int) -> None:
        block = self.canvas[:, begin:end]
        positions = torch.arange(begin, end, device=block.device).expand_as(block)
        self.decoded[~self.done] = end - self.start
        masks = (block == self.mask_id).sum(1)
        step = torch.zeros_like(masks)
        while True:
            wanted = (block == self.mask_id) & (positions < self.end[:, None]) & ~self.done[:, None]
            if not bool(wanted.any()):
                return
            logits = forward(self.canvas)[:, begin:end].float()
            self.forwards += 1
            self.active += wanted.any(1)
            probability = torch.softmax(logits, dim=-1)
            logits[..., self.mask_id] = -torch.inf
            token = logits.argmax(-1)
            confidence = probability.gather(-1, token[..., None])[..., 0]
            valid = wanted if self.config.has_blocks else wanted & (wanted.cumsum(1) <= self.config.window_length)
            take = self.rule(confidence, valid, masks, step)
            block[take] = token[take]
            step += 1
            self._find_ends(block, positions, wanted.any(1))

    def _find_ends(self, block: Tensor, positions: Tensor, active: Tensor) -> None:
        """A sample is done when its end is known and no mask is left in front of it."""
        left, exists = block == self.mask_id, torch.ones_like(block, dtype=torch.bool)
        end = self.ends(BlockView(positions, exists, left, torch.isin(block, self.stops), self.end))
        self.end = torch.where(active, end, self.end)
        open_ = (left & (positions < self.end[:, None])).any(1)
        self.done |= active & ~open_ & (self.end != NO_END)
        if self.config.has_blocks:  # masks behind an end are filled at once, which the next forward sees
            places = torch.arange(self.canvas.shape[1], device=block.device)
            self.canvas[(self.canvas == self.mask_id) & (places >= self.end[:, None])] = self.fill

    def rows(self) -> list[FinishedRow]:
        """What was decoded, sample by sample."""
        ended = self.decoded if self.config.has_blocks else torch.minimum(self.decoded, self.end - self.start)
        tokens, decoded, active = self.canvas.cpu(), ended.tolist(), self.active.tolist()
        return [
            FinishedRow(tokens=tokens[i], prompt_length=self.start, decoded=decoded[i], forwards=active[i])
            for i in range(len(tokens))
        ]
