# SPDX-License-Identifier: Apache-2.0
"""What a user can choose: how the model is compiled and how it is decoded. Frozen, validated when built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import ConfigError, UnknownOptionError

CommitRule = Literal["quota", "threshold", "factor", "frechet"]
Remasking = Literal["low_confidence", "random"]
EosRule = Literal["block", "first", "none"]
LastRank = Literal["strict", "released"]
Cache = Literal["none", "lacache"]

# The value a rule takes when it is chosen by name only (sources: algorithms' released defaults).
_RULE_DEFAULTS: dict[str, float] = {"threshold": 0.9, "factor": 1.0, "frechet_margin": 0.25}
_RULE_PARAMETER: dict[str, str] = {"threshold": "threshold", "factor": "factor", "frechet": "frechet_margin"}


class _Replaceable:
    """`replace` with a clear error for names that are no fields."""

    def replace(self, **changes: Any) -> Any:
        """A copy with `changes` applied and validated again; an unknown name raises `UnknownOptionError`."""
        known = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        unknown = sorted(set(changes) - known)
        if unknown:
            raise UnknownOptionError(
                f"{type(self).__name__} has no option {', '.join(unknown)}; its options are {', '.join(sorted(known))}"
            )
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class CompileConfig(_Replaceable):
    """How the graph is rewritten and compiled.

    Args:
        strict: raise when a required pass matches fewer regions than the layer count asks for; with False the
            refused region stays as it was and the report says so.
        compile: True, False, or None for "if a compiler is there" (said aloud when it is not).
        disable: names of optional passes to leave out, for bisecting (`dllm_compile.passes.OPTIONAL`).
    """

    strict: bool = True
    compile: bool | None = None
    disable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse names that are no optional passes."""
        object.__setattr__(self, "disable", tuple(self.disable))


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(_Replaceable):
    """How masked positions are filled: names and defaults as LLaDA's users know them.

    Args:
        max_new_tokens: G, masked positions appended to each prompt.
        block_length: b; blocks are decoded left to right. The last block is shorter when b does not divide G.
        steps: denoising steps for the whole answer under the quota rule, a multiple of the number of blocks;
            None means one token a step.
        commit: rule that picks the tokens to keep in a step. None: the rule whose parameter is set, else "quota".
        threshold: commit every token with confidence >= threshold, at least one (Fast-dLLM).
        factor: commit ranks k while (k + 1)(1 - c_k) <= factor, at least one (Fast-dLLM).
        frechet_margin: commit the largest k whose Fréchet lower bound beats the upper bound by more than this
            (Fast-dLLM++).
        last_rank: "released" reproduces Fast-dLLM's factor loop, which also commits a failing *last* rank.
        temperature: 0 is greedy; else Gumbel noise of that temperature on the logits.
        cfg_scale: classifier-free guidance, z = z_u + (cfg_scale + 1)(z_c - z_u); 0 is off.
        remasking: "low_confidence", or "random" (quota rule only).
        eos: "block": a finished block that holds a stop id ends the answer; "first": the leftmost stop id of the
            step in which one first appears ends it there; "none": every block is decoded.
        eos_token_id: stop ids; None takes the model's `eos_token_id`.
        logits_eos_inf: never propose the model's eos id.
        confidence_eos_eot_inf: stop ids are committed last (confidence 0).
        infill: allow mask tokens in prompts; they form a first block of their own.
        cache: "none" computes every row in every step; "lacache" keeps q, k, v and the attention state of rows outside
            the block in the layers of `lacache_layers`.
        lacache_layers: "first" is layer 0, which is exact; "wide" is the paper's set (0 and 3-17 of 32 layers, as a
            share of the depth), or layer numbers: approximate.
        lacache_interval: with layers beyond 0, compute everything anew every so many steps; None only at block starts;
            1 is exact.
        seed: sample i uses seed + i, so results do not depend on what else is in the batch.
        check_every: steps between two looks of the host at the done flags.

    Raises:
        ConfigError: a value outside its range or two options that contradict each other.
    """

    max_new_tokens: int = 128
    block_length: int = 32
    steps: int | None = None
    commit: CommitRule | None = None
    threshold: float | None = None
    factor: float | None = None
    frechet_margin: float | None = None
    last_rank: LastRank = "strict"
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    eos: EosRule = "block"
    eos_token_id: int | tuple[int, ...] | None = None
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    infill: bool = False
    cache: Cache = "none"
    lacache_layers: Literal["first", "wide"] | tuple[int, ...] = "first"
    lacache_interval: int | None = None
    seed: int = 0
    check_every: int = 1

    def __post_init__(self) -> None:
        """Check ranges and contradictions; nothing is silently corrected."""
        for name in ("max_new_tokens", "block_length", "check_every"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, f"{name} must be a positive integer, not {value!r}")
        _require(self.temperature >= 0, f"temperature must be >= 0, not {self.temperature}")
        _require(self.cfg_scale >= 0, f"cfg_scale must be >= 0, not {self.cfg_scale}")
        _one_of("remasking", self.remasking, Remasking)
        _one_of("eos", self.eos, EosRule)
        _one_of("last_rank", self.last_rank, LastRank)
        if self.commit is not None:
            _one_of("commit", self.commit, CommitRule)
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        self._check_rule()
        self._check_steps()
        self._check_cache()

    def _check_rule(self) -> None:
        given = [name for name in _RULE_PARAMETER.values() if getattr(self, name) is not None]
        _require(len(given) <= 1, f"{' and '.join(given)} are rules of their own: set one of them")
        wanted = _RULE_PARAMETER.get(self.rule)
        if given and given[0] != wanted:
            raise ConfigError(f"commit={self.commit!r} does not use {given[0]}: remove one of the two")
        if self.remasking == "random" and self.rule != "quota":
            raise ConfigError(
                f"remasking='random' draws uniform numbers, for which the {self.rule} rule means nothing: "
                "use commit='quota'"
            )
        if self.rule != "quota" and self.steps is not None:
            raise ConfigError(f"steps is a quota; the {self.rule} rule runs until each block is done: remove steps")
        if self.rule == "frechet":
            _require(self.rule_parameter >= 0, f"frechet_margin must be >= 0, not {self.rule_parameter}")
        if self.rule == "factor":
            _require(self.rule_parameter > 0, f"factor must be > 0, not {self.rule_parameter}")

    def _check_steps(self) -> None:
        if self.steps is None:
            return
        blocks = self.number_of_blocks
        _require(
            isinstance(self.steps, int) and self.steps >= blocks and self.steps % blocks == 0,
            f"steps={self.steps!r} must be a multiple of the {blocks} blocks "
            f"(max_new_tokens={self.max_new_tokens}, block_length={self.block_length})",
        )

    def _check_cache(self) -> None:
        _one_of("cache", self.cache, Cache)
        layers, interval = self.lacache_layers, self.lacache_interval
        if self.cache != "lacache" and (layers != "first" or interval is not None):
            raise ConfigError(f"lacache_layers and lacache_interval belong to cache='lacache', not {self.cache!r}")
        if not isinstance(layers, str):
            object.__setattr__(self, "lacache_layers", tuple(layers))
            _require(len(layers) > 0 and min(layers) >= 0, f"lacache_layers={layers!r} must name layers from 0 on")
        else:
            _require(layers in ("first", "wide"), f"lacache_layers={layers!r}: choose 'first', 'wide' or layer numbers")
        _require(interval is None or interval >= 1, f"lacache_interval must be at least 1, not {interval}")

    @property
    def rule(self) -> CommitRule:
        """The commit rule in force."""
        if self.commit is not None:
            return self.commit
        if self.threshold is not None:
            return "threshold"
        if self.factor is not None:
            return "factor"
        return "frechet" if self.frechet_margin is not None else "quota"

    @property
    def rule_parameter(self) -> float:
        """The parameter of the rule in force; not defined for the quota rule (raises KeyError)."""
        name = _RULE_PARAMETER[self.rule]
        value = getattr(self, name)
        return _RULE_DEFAULTS[name] if value is None else float(value)

    @property
    def number_of_blocks(self) -> int:
        """Blocks of the answer, the last one possibly shorter."""
        return -(-self.max_new_tokens // self.block_length)

    @property
    def steps_per_block(self) -> int | None:
        """S of the quota rule; None means one token a step."""
        return None if self.steps is None else self.steps // self.number_of_blocks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _one_of(name: str, value: object, kind: Any) -> None:
    allowed = get_args(kind)
    _require(value in allowed, f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")
