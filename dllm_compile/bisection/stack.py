# SPDX-License-Identifier: Apache-2.0
"""Builds the stack up from the user's model, layer by layer, and compares after each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .._compat import can_compile, references_only
from ..acceptance import FP8_LOGITS_BOUND, is_rectangular, rounding_noise
from ..capture import capture
from ..certify import relative_error
from ..config import CompileConfig, DecodingConfig
from ..errors import ConfigError
from ..fp8_weights import GROUPS
from ..passes import FUSE, INLINE_REFERENCES, NORMALIZE, OPTIONAL, GraphPass, finishing_passes, run_passes
from ..passes.graph import placeholders, share
from ..passes.packing import packed
from ..passes.quantize_ffn_fp8 import quantize_ffn_fp8_pass
from ..precision import decide
from ..refusals import refuse_unsupported
from ..runtime.engine import decode
from ..runtime.facts import ModelFacts
from ..runtime.programs import CUDA_TILE_ROWS, ModelPrograms
from ..runtime.session import SessionPool
from ..runtime.shape import ModelShape
from .cases import Ground, cases
from .eager import EagerPrograms
from .judging import Bound, logits_error
from .recording import Recorder
from .trials import Trials
from .variants import exact_caches, ground, one_by_one, policies

FP8_PROGRAM_BOUND = 5e-2
"""Between an FP8 program and the FP8 graph it was made of. Another order of sums may move a value over the edge between
two codes, which are up to 12 % apart; few do."""

_SWITCHES = {
    "insert_kv_cache": 'cache="none"',
    "insert_lacache_first": 'cache="none"',
    "insert_lacache_step": 'cache="none"',
    "insert_verify": 'commit="threshold"',
    "inline_references": "compile=False",
}


class Stack(Recorder):
    """The layers over one model, for one prompt.

    Args:
        model: the user's.
        prompt: (P,) int64.
        config: how it is rewritten.
        decoding: how it is decoded.
        stop: raise `Fault` at the first fault.
        told: called with the name of each layer before it is compared.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: Tensor,
        config: CompileConfig,
        decoding: DecodingConfig,
        *,
        stop: bool,
        told: Callable[[str], None],
    ) -> None:
        parameter = next(model.parameters())
        super().__init__(parameter.dtype, stop=stop, told=told)
        self._model = model
        self._config = config
        self._decoding = decoding
        self._device, self._dtype = parameter.device, parameter.dtype
        self._facts = ModelFacts.from_config(model.config)
        self._mask_id = int(self._facts.mask_token_id or 0)
        self._prompt = prompt
        self._eager = EagerPrograms(model, self._mask_id)

    def compare(self) -> None:
        """Everything, from the ground up."""
        self._lay_ground()
        on_card = self._device.type == "cuda"
        with references_only() if on_card else contextlib.nullcontext():
            canonical = self._graphs()
            if canonical is None:
                return
            # Raises where FP8 was asked for and cannot be had: that is no fault of a layer.
            fp8, reason = decide(self._config, self._device, self._dtype, self._captured.layers)
            sample = self._sample(canonical)
            trials = self._trials(canonical, sample, fp8=False)
            self._programs(trials)
            programs = self._model_programs(trials, compiled=False)
            self._loop(programs)
        if on_card:
            self._kernels(trials, programs)
        self._compiled(trials, programs)
        if fp8:
            self._fp8(canonical, sample)
        elif reason is not None:
            self.skipped.append(reason)
        self._cuda_graphs(programs)
        self._policies(programs)

    def _decode(self, programs: Any, decoding: DecodingConfig, sessions: SessionPool | None = None) -> Tensor:
        """The answer (G,)."""
        out = decode(programs, self._facts, [self._prompt], decoding, sessions=sessions)
        assert out.sequences is not None
        return out.sequences[0, -decoding.max_new_tokens :].cpu()

    # --- layers -----------------------------------------------------------------------------------------------------

    def _lay_ground(self) -> None:
        """What the user's model says: tokens of the plain loop, logits of two canvases."""
        self.told("eager model")
        self._answer = self._decode(self._eager, ground(self._decoding))
        decoding, start = self._decoding, len(self._prompt)
        masks = torch.full((decoding.max_new_tokens,), self._mask_id)
        early = torch.cat((self._prompt.cpu(), masks))
        width = decoding.block_length if decoding.has_blocks else decoding.window_length
        self._block = (start, min(start + width, len(early)))
        late = early.clone()
        half = (self._block[0] + self._block[1] + 1) // 2
        late[start:half] = self._answer[: half - start]
        self._canvases = torch.stack((early, late)).to(self._device)
        positions = torch.arange(len(early), device=self._device)
        self._logits = torch.stack([self._eager.logits(ids, positions) for ids in self._canvases])

    def _graphs(self) -> GraphModule | None:
        """Capture, and each pass over the canonical graph; None where there are no row programs."""
        with self.layer("capture", "the model itself"):
            refuse_unsupported(self._model)
            self._captured = capture(self._model, self._facts.max_sequence_length, self._facts.vocab_size)
            plain = share(self._captured.gm)
            name = str(placeholders(plain)[0].target)
            self.bound = Bound(self._dtype, lambda: rounding_noise(plain, {name: self._canvases}))
            self.error("capture", "the model itself", self._of_canvases(plain))
        gm = self._captured.gm
        for graph_pass in (*NORMALIZE, *(one for one in FUSE if one.name not in self._config.disable)):
            switch = _disable(graph_pass)
            with self.layer(graph_pass.name, switch):
                run_passes(gm, (graph_pass,), layers=self._captured.layers, strict=self._config.strict)
                with packed(gm):
                    self.error(graph_pass.name, switch, self._of_canvases(gm))
        if is_rectangular(gm):
            self.skipped.append("programs: an attention was left as it was, so samples go through the graph one by one")
            return None
        return share(gm)

    def _of_canvases(self, gm: GraphModule) -> float:
        with torch.no_grad():
            return logits_error(self._logits, gm(self._canvases))

    def _sample(self, canonical: GraphModule) -> Ground:
        return Ground(
            early=self._canvases[0],
            late=self._canvases[1],
            early_logits=self._logits[0],
            late_logits=self._logits[1],
            block=self._block,
            mask_token_id=self._mask_id,
            tile_rows=CUDA_TILE_ROWS if self._device.type == "cuda" else None,
            shape=ModelShape.of(canonical),
        )

    def _trials(self, canonical: GraphModule, sample: Ground, *, fp8: bool) -> Trials:
        return Trials(
            canonical,
            cases(sample, self._decoding),
            finishing_passes(self._device, self._dtype, fp8=fp8, disable=self._config.disable),
            layers=self._captured.layers,
            mask_token_id=self._mask_id,
        )

    def _programs(self, trials: Trials, bound: float | None = None, names: Sequence[str] | None = None) -> None:
        """Each program, pass by pass; only some passes are reported where `names` are given."""
        inline = (INLINE_REFERENCES,) if self._inlines else ()
        for case in trials.cases:
            for graph_pass, apply in trials.stages(case, inline):
                layer, switch = f"{graph_pass.name} in {case.name}", _disable(graph_pass)
                with self.layer(layer, switch):
                    gm = apply()
                    if names is None or graph_pass.name in names:
                        self.error(layer, switch, trials.error(case, gm), bound)

    def _model_programs(self, trials: Trials, *, compiled: bool) -> ModelPrograms:
        return ModelPrograms(
            trials.canonical,
            layers=self._captured.layers,
            mask_token_id=self._mask_id,
            device=self._device,
            compiled=compiled,
            finish=trials.finish,
            inline=self._inlines,
        )

    @property
    def _inlines(self) -> bool:
        return INLINE_REFERENCES.name not in self._config.disable

    def _loop(self, programs: ModelPrograms) -> None:
        """The decode loop, and the forms of the cache that must give the same tokens."""
        variants = {"decode loop": ground(self._decoding), **exact_caches(self._decoding)}
        for layer, decoding in variants.items():
            switch = "the model's own loop" if layer == "decode loop" else 'cache="none"'
            with self.layer(layer, switch):
                self.tokens(layer, switch, self._decode(programs, decoding), self._answer)

    def _kernels(self, trials: Trials, programs: ModelPrograms) -> None:
        """The same graphs, whose operators launch Triton kernels now."""
        switch = "DLLM_COMPILE_TRITON=0"
        for case in trials.cases:
            layer = f"Triton kernels in {case.name}"
            with self.layer(layer, switch):
                self.error(layer, switch, trials.error(case, trials.build(case.name)))
        layer = "decode loop with Triton kernels"
        with self.layer(layer, switch):
            self.tokens(layer, switch, self._decode(programs, ground(self._decoding)), self._answer)

    def _compiled(self, trials: Trials, plain: ModelPrograms) -> None:
        """Programs as torch.compile makes them, then the loop over them."""
        switch = "compile=False"
        if self._config.compile is False:
            return
        if not can_compile(self._device):
            self.skipped.append("torch.compile: no compiler was found")
            return
        programs = self._model_programs(trials, compiled=True)
        with self.layer("torch.compile", switch):
            programs.forward_program()
            answer = self._decode(programs, self._decoding)
            for program in programs.built:
                case = next((one for one in trials.cases if program.name.startswith(one.name)), None)
                if case is None or "sampled" in program.name or "guided" in program.name:
                    continue
                layer = f"torch.compile of {program.name}"
                self.error(layer, switch, trials.error(case, program.gm, program))
            self.tokens("decode loop, compiled", switch, answer, self._decode(plain, self._decoding))

    def _fp8(self, canonical: GraphModule, sample: Ground) -> None:
        """Quantized products, programs that fuse the quantization, and what it does to tokens."""
        switch = 'precision="checkpoint"'
        config = self._config
        with self.layer("quantize_ffn_fp8", switch):
            gm = share(canonical)
            group = GROUPS[config.fp8_granularity]
            step = quantize_ffn_fp8_pass(group, config.fp8_skip_layers, config.fp8_linears, required=True)
            strict = config.strict and config.precision == "fp8"
            run_passes(gm, (step,), layers=self._captured.layers, strict=strict)
            with torch.no_grad():
                logits = gm(self._canvases)
            bound = 10 ** (-FP8_LOGITS_BOUND / 20)
            self.error("quantize_ffn_fp8", switch, relative_error(self._logits, logits), bound)
            quantized = dataclasses.replace(sample, early_logits=logits[0], late_logits=logits[1])
            trials = self._trials(gm, quantized, fp8=True)
            self._programs(trials, FP8_PROGRAM_BOUND, [graph_pass.name for graph_pass in trials.finish])
            answer = self._decode(self._model_programs(trials, compiled=False), ground(self._decoding))
            self.tokens(f"precision {config.precision}", switch, answer, self._answer, by_design=True)

    def _cuda_graphs(self, programs: ModelPrograms) -> None:
        """Steps that are captured and replayed, against the same steps as they are."""
        if self._device.type != "cuda" or self._config.cuda_graphs is False:
            return
        if not self._decoding.is_capturable:
            self.skipped.append(f"CUDA graphs: steps of cache={self._decoding.cache!r} are not captured")
            return
        with self.layer("CUDA graphs", "cuda_graphs=False"):
            pool = SessionPool()
            expected = self._decode(programs, self._decoding)
            # The first call sees sizes for the first time, the second captures, the third replays.
            answers = [self._decode(programs, self._decoding, pool) for _ in range(3)]
            self.tokens("CUDA graphs", "cuda_graphs=False", answers[-1], expected)

    def _policies(self, programs: ModelPrograms) -> None:
        """What is another algorithm: how many tokens it changes here."""
        for layer, (decoding, switch) in policies(self._decoding).items():
            with self.layer(layer, switch):
                self.tokens(layer, switch, self._decode(programs, decoding), self._answer, by_design=True)
        if self._decoding.rule != "quota":
            layer, switch = f"commit {ground(self._decoding).rule}", "one token a step: no commit rule"
            with self.layer(layer, switch):
                answer = self._decode(programs, one_by_one(self._decoding))
                self.tokens(layer, switch, self._answer, answer, by_design=True)


def _disable(graph_pass: GraphPass) -> str:
    """How to do without a pass."""
    if graph_pass.name in OPTIONAL:
        return f'disable="{graph_pass.name}"'
    return _SWITCHES.get(graph_pass.name, "needed")


def check_disable(config: CompileConfig) -> None:
    """Raise ConfigError where `disable` names no optional pass."""
    unknown = sorted(set(config.disable) - set(OPTIONAL))
    if unknown:
        raise ConfigError(f"disable names {', '.join(unknown)}; optional passes are {', '.join(OPTIONAL)}")
