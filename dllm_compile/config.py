# SPDX-License-Identifier: Apache-2.0
"""What a user can choose: how the model is compiled and how it is decoded. Frozen, validated when built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ._config_checks import (
    BELONGS_TO,
    FP8_BELONGS_TO,
    GAMMA_DEFAULTS,
    RELEASED_KEY_BLOCK,
    RULE_DEFAULTS,
    RULE_PARAMETER,
    check_belonging,
    check_switch,
    layer_numbers,
    normalise,
    one_of,
    pass_names,
    require,
)
from .errors import ConfigError, UnknownOptionError

CommitRule = Literal["quota", "threshold", "factor", "frechet", "flash_verify"]
VerifyRule = Literal["product", "per_token"]
Remasking = Literal["low_confidence", "random"]
EosRule = Literal["block", "first", "rightmost", "none"]
LastRank = Literal["strict", "released"]
Cache = Literal["none", "lacache", "prefix", "dual", "vicinity", "dkv", "flash"]
Suffix = Literal["all", "dpad", "window"]
ScoreLayers = Literal["upper", "all"]
Pin = Literal["all", "released"]
KeyEnd = Literal["exact", "released"]
NewShapes = Literal["capture", "eager", "raise"]
Precision = Literal["checkpoint", "fp8", "auto"]
Granularity = Literal["group", "row", "tensor"]
Fp8Linears = Literal["ffn", "all"]


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
        disable: names of optional passes to leave out, for bisecting (`dllm_compile.passes.OPTIONAL`); one name may be
            given alone. Packing passes move parameters into shared storage: a later `optimize` of the same model that
            packs more makes earlier results stale, which then raise `StaleWeightsError`.
        precision: "checkpoint" computes in the parameters' dtype; "fp8" multiplies the feed-forward projections in
            FP8 (E4M3) on copies of their weights, with activations quantized as they are made: a card from compute
            capability 8.9 on, or a CPU, where a slow reference computes the same numbers to rounding. "auto" is "fp8"
            where the card can and the layers fit, else "checkpoint"; the report says which.
        fp8_granularity: what shares a scale: "group", 128 values of an activation row and 128 x 128 of a weight
            (LaCache); "row", a row of either; "tensor", all of it.
        fp8_skip_layers: layers that stay in the checkpoint's precision, from 0; () for none. LaCache leaves out the
            first one.
        fp8_linears: "ffn", or "all": q, k, v and the output projection of attention as well. Never the head.
        cuda_graphs: replay steps as CUDA graphs; buffers and graphs are then kept between calls. None: on a card.
        fuse_bookkeeping: compile what a step does around its forwards as well: fewer launches, 0.4 ms of 5.0 of an 8B
            step. None: where steps are captured. True keeps buffers between calls on a CPU, too.
        new_shapes: what happens, after `warm_up`, to a step of a size that was not captured: "capture" runs it once as
            it is and captures it when it comes back, "eager" always runs it as it is, "raise" refuses.

    Raises:
        ConfigError: a value of another type, or an option that means nothing without another one.
    """

    strict: bool = True
    compile: bool | None = None
    disable: tuple[str, ...] = ()
    precision: Precision = "checkpoint"
    fp8_granularity: Granularity = "group"
    fp8_skip_layers: tuple[int, ...] = (0,)
    fp8_linears: Fp8Linears = "ffn"
    cuda_graphs: bool | None = None
    fuse_bookkeeping: bool | None = None
    new_shapes: NewShapes = "capture"

    def __post_init__(self) -> None:
        """Check types; whether a pass of such a name exists, `optimize` says."""
        check_switch("strict", self.strict)
        for name in ("compile", "cuda_graphs", "fuse_bookkeeping"):
            value = getattr(self, name)
            require(value is None or isinstance(value, bool), f"{name} must be True, False or None, not {value!r}")
        require(
            not self.fuse_bookkeeping or self.compile is not False,
            "fuse_bookkeeping=True compiles, and compile=False forbids it: drop one",
        )
        one_of("new_shapes", self.new_shapes, NewShapes)
        object.__setattr__(self, "disable", pass_names(self.disable))
        one_of("precision", self.precision, Precision)
        one_of("fp8_granularity", self.fp8_granularity, Granularity)
        one_of("fp8_linears", self.fp8_linears, Fp8Linears)
        object.__setattr__(self, "fp8_skip_layers", layer_numbers("fp8_skip_layers", self.fp8_skip_layers))
        check_belonging(self, FP8_BELONGS_TO)


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(_Replaceable):
    """How masked positions are filled: names and defaults as LLaDA's users know them.

    Args:
        max_new_tokens: G, masked positions appended to each prompt.
        block_length: b; blocks are decoded left to right. The last block is shorter when b does not divide G.
        steps: denoising steps for the whole answer under the quota rule, a multiple of the number of blocks;
            None means one token a step.
        commit: rule that picks the tokens to keep in a step. None: the rule whose parameter is set, else "quota".
            "flash_verify" (with cache="flash", greedy) keeps what "threshold" keeps, then drafts the most confident of
            the other candidates and checks them in a second, smaller forward.
        threshold: commit every token with confidence >= threshold, at least one (Fast-dLLM); above 1 is one a step.
        factor: commit ranks k while (k + 1)(1 - c_k) <= factor, at least one (Fast-dLLM).
        frechet_margin: commit the largest k whose Fréchet lower bound beats the upper bound by more than this
            (Fast-dLLM++).
        gamma: with "flash_verify", how sure the second forward must be of a draft; above 1 accepts none. None: 0.8 for
            verify_rule="product", 0.9 for "per_token".
        verify_rule: with "flash_verify", drafts are accepted while the product of their probabilities is >= gamma
            ("product", Flash-dLLM's released code), or while the forward's best token agrees and its probability
            is >= gamma ("per_token", the paper's Eq. 5).
        verify_candidates: with "flash_verify", most drafts of a step; None: half of `window_length`.
        verify_context: with "flash_verify", most decoded rows that are computed beside the drafts; tokens of the
            step's first forward always are. None: as many as `verify_rows` leaves room for.
        verify_rows: with "flash_verify", rows of the second forward, two for each draft and the rest context; None:
            twice `window_length`, or what window and drafts need.
        last_rank: "released" reproduces Fast-dLLM's factor loop, which also commits a failing *last* rank.
        temperature: 0 is greedy; else Gumbel noise of that temperature on the logits.
        cfg_scale: classifier-free guidance, z = z_u + (cfg_scale + 1)(z_c - z_u); 0 is off.
        remasking: "low_confidence", or "random" (quota rule only).
        eos: "block": a finished block that holds a stop id ends the answer; "first": the leftmost stop id of the
            step in which one first appears ends it there; "rightmost": the rightmost one of that step (Flash-dLLM's
            released code); "none": everything is decoded. None: "block", and "first" with cache="flash", which has no
            blocks.
        eos_token_id: stop ids; None takes the model's `eos_token_id`.
        logits_eos_inf: never propose the model's eos id.
        confidence_eos_eot_inf: stop ids are committed last (confidence 0).
        infill: allow mask tokens in prompts; they form a first block of their own.
        cache: "none" computes every row in every step; "lacache" keeps q, k, v and the attention state of rows outside
            the block in the layers of `lacache_layers`. The others keep keys and values of all rows and compute,
            between refreshes at block starts: "prefix" the block and what follows it, "dual" the block (Fast-dLLM),
            "vicinity" the block and its neighbours (dInfer), "dkv" the masks and the tokens of the step before
            (dKV-Cache). "flash" (Flash-Cache) has no blocks (`block_length` is not read): it computes the leftmost
            masks, of which the first `window_length` are candidates, and the decoded rows with the best score.
        lacache_layers: "first" is layer 0, which is exact; "wide" is the paper's set (0 and 3-17 of 32 layers, as a
            share of the depth), or layer numbers: approximate.
        lacache_interval: with layers beyond 0, compute everything anew every so many steps; None only at block starts;
            1 is exact.
        refresh_interval: with "prefix", "dual" and "vicinity", compute every row anew every so many forwards, counted
            from the last time; None only at block starts; 1 is exact.
        prefix_look: with "vicinity", rows in front of the block.
        after_look: with "vicinity", rows behind the block.
        warmup_steps: with "vicinity", forwards over every row at the beginning of a sample.
        cache_steps: with "dkv", compute every row anew every so many steps of a block; 1 is exact.
        window_length: with "flash", candidates of a step.
        lookahead: with "flash", masks behind the candidates that are computed as well.
        track: with "flash", decoded rows that are computed as well, tokens of the step before always among them;
            negative: every row, which is exact.
        score_layers: with "flash", layers that add to the score: "upper" from the third on, or "all".
        key_end: with "flash", where the keys of a sample end: "exact" is its canvas; "released" reproduces Flash-dLLM's
            code, which rounds up to the next multiple of 128 (never none) and attends to eos ids there. Nothing is
            committed in these rows, and the model's length must hold them.
        pin: with "flash_verify", tokens of the step before that are always tracked: "all" of them; "released"
            reproduces Flash-dLLM's code, which forgets those of the step's first forward.
        suffix: which masks behind the block are seen and computed: "all"; "dpad" drops more of them the farther they
            are (DPad); "window" keeps the nearest. Drawn anew at each block.
        suffix_window: with "dpad" and "window", masks behind it are dropped.
        k_sigma: with "dpad", where the end of the window falls on the Gaussian.
        scale: with "dpad", multiplies the probability of being kept.
        slots: samples decoded at the same time, the others wait in a queue; None: all of them.
        seed: sample i uses seed + i, so results do not depend on what else is in the batch.
        check_every: steps between two looks of the host at the done flags. A sample that enters a block which must be
            begun by computing every row waits for the next look. None: 1, or 4 where captured steps are replayed and
            no sample waits. Tokens do not depend on it.

    Raises:
        ConfigError: a value of another type, a value outside its range or two options that contradict each other.
    """

    max_new_tokens: int = 128
    block_length: int = 32
    steps: int | None = None
    commit: CommitRule | None = None
    threshold: float | None = None
    factor: float | None = None
    frechet_margin: float | None = None
    gamma: float | None = None
    verify_rule: VerifyRule = "product"
    verify_candidates: int | None = None
    verify_context: int | None = None
    verify_rows: int | None = None
    last_rank: LastRank = "strict"
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    eos: EosRule | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    infill: bool = False
    cache: Cache = "none"
    lacache_layers: Literal["first", "wide"] | tuple[int, ...] = "first"
    lacache_interval: int | None = None
    refresh_interval: int | None = None
    prefix_look: int = 0
    after_look: int = 0
    warmup_steps: int = 0
    cache_steps: int = 8
    window_length: int = 16
    lookahead: int = 48
    track: int = 64
    score_layers: ScoreLayers = "upper"
    key_end: KeyEnd = "exact"
    pin: Pin = "all"
    suffix: Suffix = "all"
    suffix_window: int = 256
    k_sigma: float = 4.0
    scale: float = 2.0
    slots: int | None = None
    seed: int = 0
    check_every: int | None = None

    def __post_init__(self) -> None:
        """Check types, ranges and contradictions; nothing is silently corrected."""
        normalise(self)
        one_of("remasking", self.remasking, Remasking)
        if self.eos is not None:
            one_of("eos", self.eos, EosRule)
        one_of("last_rank", self.last_rank, LastRank)
        one_of("verify_rule", self.verify_rule, VerifyRule)
        if self.commit is not None:
            one_of("commit", self.commit, CommitRule)
        self._check_rule()
        self._check_steps()
        self._check_cache()
        self._check_verify()

    def _check_rule(self) -> None:
        given = [name for name in dict.fromkeys(RULE_PARAMETER.values()) if getattr(self, name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are rules of their own: set one of them")
        wanted = RULE_PARAMETER.get(self.rule)
        if given and given[0] != wanted:
            raise ConfigError(f"commit={self.commit!r} does not use {given[0]}: remove one of the two")
        if self.remasking == "random" and self.rule != "quota":
            raise ConfigError(
                f"remasking='random' draws uniform numbers, for which the {self.rule} rule means nothing: "
                "use commit='quota'"
            )
        if self.rule != "quota" and self.steps is not None:
            raise ConfigError(f"steps is a quota; the {self.rule} rule runs until each block is done: remove steps")

    def _check_steps(self) -> None:
        if self.steps is None:
            return
        blocks = self.number_of_blocks
        require(
            self.steps >= blocks and self.steps % blocks == 0,
            f"steps={self.steps!r} must be a multiple of the {blocks} blocks "
            f"(max_new_tokens={self.max_new_tokens}, block_length={self.block_length})",
        )

    def _check_cache(self) -> None:
        one_of("cache", self.cache, Cache)
        one_of("suffix", self.suffix, Suffix)
        one_of("score_layers", self.score_layers, ScoreLayers)
        one_of("key_end", self.key_end, KeyEnd)
        one_of("pin", self.pin, Pin)
        check_belonging(self, BELONGS_TO)
        if self.cache == "flash" and self.eos == "block":
            raise ConfigError("cache='flash' has no blocks, so eos='block' means nothing there: use 'first' or 'none'")
        if self.cache == "flash" and self.suffix != "all":
            raise ConfigError(
                f"suffix={self.suffix!r} chooses masks once a block, and cache='flash' has no blocks; it computes only "
                "the nearest masks anyway: use suffix='all'"
            )

    def _check_verify(self) -> None:
        if self.rule != "flash_verify":
            return
        if self.cache != "flash":
            raise ConfigError(
                f"commit='flash_verify' checks drafts against the cache of cache='flash', not of cache={self.cache!r}: "
                "change one of the two"
            )
        for name, what in (("temperature", "samples tokens"), ("cfg_scale", "guides them")):
            if getattr(self, name) > 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} {what}, and commit='flash_verify' is defined for the model's own "
                    f"most probable tokens: set {name}=0 or use commit='threshold'"
                )
        needed = self.window_length + self.most_candidates
        require(
            self.verify_size >= needed,
            f"verify_rows={self.verify_rows} must be at least window_length + verify_candidates = {needed}, so that "
            "every token of the step's first forward has a row",
        )

    @property
    def most_candidates(self) -> int:
        """Most drafts that a verify pass checks."""
        return max(1, self.window_length // 2) if self.verify_candidates is None else self.verify_candidates

    @property
    def verify_size(self) -> int:
        """Rows of a verify pass, for each sample."""
        if self.verify_rows is not None:
            return self.verify_rows
        return max(2 * self.window_length, self.window_length + self.most_candidates)

    @property
    def verify_gamma(self) -> float:
        """The gamma in force."""
        return GAMMA_DEFAULTS[self.verify_rule] if self.gamma is None else self.gamma

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
        name = RULE_PARAMETER[self.rule]
        value = getattr(self, name)
        return RULE_DEFAULTS[name] if value is None else float(value)

    @property
    def eos_rule(self) -> EosRule:
        """The end-of-sequence rule in force."""
        if self.eos is not None:
            return self.eos
        return "block" if self.has_blocks else "first"

    @property
    def has_blocks(self) -> bool:
        """Whether blocks are decoded one after the other; else a window slides over the masks."""
        return self.cache != "flash"

    def padding_of(self, length: int) -> int:
        """Rows that a sample sees behind its canvas of `length` rows."""
        return 0 if self.key_end == "exact" else RELEASED_KEY_BLOCK - length % RELEASED_KEY_BLOCK

    @property
    def waits_for_looks(self) -> bool:
        """Whether a sample that enters a block must wait until the host has looked."""
        return self.has_blocks and (self.cache != "none" or self.suffix != "all")

    @property
    def is_capturable(self) -> bool:
        """Whether a step is decided on the device alone, so that it can be captured in a CUDA graph."""
        return self.cache != "lacache"

    @property
    def number_of_blocks(self) -> int:
        """Blocks of the answer, the last one possibly shorter; 1 where there are no blocks."""
        if not self.has_blocks:
            return 1
        return -(-self.max_new_tokens // self.block_length)

    @property
    def steps_per_block(self) -> int | None:
        """S of the quota rule; None means one token a step."""
        return None if self.steps is None else self.steps // self.number_of_blocks
