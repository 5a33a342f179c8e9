# SPDX-License-Identifier: Apache-2.0
"""What stays the same for all steps of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DecodingConfig
from .commit import CommitRule, FlashVerifyRule, commit_rule
from .eos import EosRule, eos_rule
from .facts import ModelFacts, stop_ids

# Index of the draw for random remasking: Gumbel noise uses the indices [0, vocab_size), so this one is a stream of
# its own.
_REMASKING_STREAM = 2**32 - 1


@dataclass(frozen=True)
class StepConstants:
    """What stays the same for all steps of a call: rules on the host, scalars and id lists on the device.

    Attributes:
        mask_token_id: id of a masked position.
        fill_id: id written behind the end of an answer.
        stops: (n,) int64, ids that end an answer (possibly none).
        banned: (n,) int64, ids that are never proposed; [-1] for none.
        seed: 0-dim int64, the low 32 bits of the seed (all that the generator uses).
        remasking_stream: 0-dim int64 for random remasking, else None.
        temperature: 0-dim fp32, or None when greedy.
        guidance: 0-dim fp32, or None when off.
        stops_last: stop ids get confidence 0.
        commit: the commit rule.
        eos: the end-of-sequence rule.
        fills_at_once: masks behind a known end are filled in that step, not only when the sample is done.
        flags: two 0-dim bool, false and true, for what differs from step to step of the same shapes.
    """

    mask_token_id: int
    fill_id: int
    stops: Tensor
    banned: Tensor
    seed: Tensor
    remasking_stream: Tensor | None
    temperature: Tensor | None
    guidance: Tensor | None
    stops_last: bool
    commit: CommitRule
    eos: EosRule
    fills_at_once: bool
    flags: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, config: DecodingConfig, facts: ModelFacts, device: torch.device) -> StepConstants:
        """Constants of `config` for a model with `facts`, whose mask id must be known."""
        assert facts.mask_token_id is not None, "prompts are checked first"
        stops = stop_ids(facts, config.eos_token_id)
        own = [one for one in facts.eos_token_id if one in stops]
        banned = facts.eos_token_id if config.logits_eos_inf else ()

        def ids(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def scalar(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        randomly = config.remasking == "random"
        return cls(
            mask_token_id=facts.mask_token_id,
            fill_id=next(iter((*own, *stops)), facts.mask_token_id),
            stops=ids(stops),
            banned=ids(banned or (-1,)),
            seed=scalar(config.seed & 0xFFFFFFFF, torch.int64),
            remasking_stream=scalar(_REMASKING_STREAM, torch.int64) if randomly else None,
            temperature=scalar(config.temperature, torch.float32) if config.temperature > 0 else None,
            guidance=scalar(config.cfg_scale, torch.float32) if config.cfg_scale > 0 else None,
            stops_last=config.confidence_eos_eot_inf,
            commit=commit_rule(config),
            eos=eos_rule(config),
            fills_at_once=config.has_blocks,
            flags=(scalar(False, torch.bool), scalar(True, torch.bool)),
        )

    @property
    def forwards_per_step(self) -> int:
        """Forwards run in one step: 2 with guidance; a verify pass counts, also when it has nothing to check."""
        return self.forwards_per_draft + isinstance(self.commit, FlashVerifyRule)

    @property
    def forwards_per_draft(self) -> int:
        """Forwards of one step in front of a verify pass: 2 with guidance."""
        return 1 if self.guidance is None else 2
