# SPDX-License-Identifier: Apache-2.0
"""`optimize(model)`: capture, rewrite, certify; what it returns is in `optimized`."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ._compat import can_compile
from ._config_checks import check_switch, chosen
from .acceptance import accept_logits
from .capture import capture
from .certify import LENGTH
from .config import CompileConfig
from .errors import ConfigError, UnsupportedModelError
from .export_gate import OPTIMIZING
from .fp8_weights import refuse_released
from .optimized import OptimizedModel
from .passes import FUSE, NORMALIZE, OPTIONAL, finishing_passes, run_passes
from .passes.graph import share
from .passes.normalize_attention import COS
from .passes.packing import packed
from .precision import decide, quantize
from .refusals import model_config, refuse_unsupported
from .runtime.facts import ModelFacts
from .stages import Stages


def optimize(
    model: nn.Module,
    config: CompileConfig | None = None,
    *,
    release: bool = False,
    progress: bool = False,
    **options: Any,
) -> OptimizedModel:
    """Rewrite a masked-diffusion language model for fast decoding. The model itself is not changed.

    The module is captured as one graph, normalised to a small canonical vocabulary, fused, and turned into row
    programs that are compiled when they are first needed. Packed weights share storage with the model's parameters,
    which keep their names, values and identity. FP8 weights (`precision="fp8"`) are copies: the originals stay with the
    model unless they are released.

    Args:
        model: an unmodified LLaDA-class module in eval mode, all parameters on one device and of one dtype, with a
            `.config`.
        config: how to rewrite and compile.
        release: free the weights that FP8 copies stand for. **`model` can no longer run, be saved or be updated**: its
            modules say so, their parameters are on the meta device, and only a newly loaded model brings them back.
        progress: show a bar over the stages.
        **options: fields of `CompileConfig` that replace those of `config`.

    Returns:
        An `OptimizedModel` with `generate`, `report`, `dump_graphs` and the model's own forward.

    Raises:
        UnsupportedModelError: the model, or the state it is in.
        PassError: a required pass matched fewer regions than the layer count asks for (with `strict`).
        CertificateError: the rewritten graph does not compute what the model computes, or too little of it in FP8.
        ConfigError: `disable` names no optional pass; FP8 was asked for and cannot be had here; `release` without it.
        MissingPackageError: FP8 was asked for and torchao is not installed.
        ReleasedWeightsError: an earlier call with `release=True` freed this model's weights.

    The model is as it was before when this raises.

    Several threads may call this, and decode with optimized models meanwhile. A model's own forward, `model(ids)`, in
    another thread cannot be kept apart: torch marks the whole process as exporting.
    """
    config = chosen(config, CompileConfig, "optimize(model, compile=False)").replace(**options)
    if isinstance(model, OptimizedModel):
        raise UnsupportedModelError("this model is optimized already: pass the original, `fast.model`")
    unknown = sorted(set(config.disable) - set(OPTIONAL))
    if unknown:
        raise ConfigError(f"disable names {', '.join(unknown)}; optional passes are {', '.join(OPTIONAL)}")
    check_switch("release", release)
    facts = ModelFacts.from_config(model_config(model, "optimize"))
    if config.cuda_graphs and next(model.parameters()).device.type != "cuda":
        raise ConfigError("cuda_graphs=True, but the model is not on a CUDA device: move it, or leave cuda_graphs out")
    if config.fuse_bookkeeping and config.cuda_graphs is False and next(model.parameters()).device.type == "cuda":
        raise ConfigError("fuse_bookkeeping=True uses the buffers of cuda_graphs, which is False: drop one")
    if release and config.precision == "checkpoint":
        raise ConfigError("release=True frees what FP8 copies replace, and precision='checkpoint' makes none: drop one")
    with OPTIMIZING:
        return _optimized(model, facts, config, release, progress)


def _optimized(
    model: nn.Module, facts: ModelFacts, config: CompileConfig, release: bool, progress: bool
) -> OptimizedModel:
    """`optimize` with options that do not contradict each other."""
    refuse_released(model)
    refuse_unsupported(model)
    if facts.max_sequence_length is not None and facts.max_sequence_length < LENGTH:
        raise UnsupportedModelError(
            f"max_sequence_length={facts.max_sequence_length} is too short to certify a rewrite on: "
            f"it must be {LENGTH} or more"
        )
    parameter = next(model.parameters())
    compiled, note = _decide_compile(config, parameter.device)
    if note is not None and config.compile is None:
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    with torch.inference_mode(False), Stages(progress) as stage:
        stage("capturing")
        start = time.perf_counter()
        captured = capture(model, facts.max_sequence_length, facts.vocab_size)
        seconds = time.perf_counter() - start
        snapshots = [("captured", share(captured.gm))]

        def observe(name: str, gm: GraphModule) -> None:
            snapshots.append((name, share(gm)))

        stage("rewriting")
        fuse = [graph_pass for graph_pass in FUSE if graph_pass.name not in config.disable]
        results = run_passes(
            captured.gm, (*NORMALIZE, *fuse), layers=captured.layers, strict=config.strict, observe=observe
        )
        facts = _within_tables(facts, captured.gm)
        fp8, reason = decide(config, parameter.device, parameter.dtype, captured.layers)
        finish = finishing_passes(parameter.device, parameter.dtype, fp8=fp8, disable=config.disable)
        quality = None
        stage("packing weights")
        with packed(captured.gm):
            stage("certifying")
            error = accept_logits(captured, facts, finish)
            if fp8:
                more, quality = quantize(captured, facts, config, finish, observe)
                results = (*results, *more)
            optimized = OptimizedModel(
                model,
                captured,
                facts,
                config,
                results,
                snapshots,
                logits_error=error,
                capture_seconds=seconds,
                compiled=compiled,
                finish=finish,
                fp8=quality,
                notes=[one for one in (note, reason, captured.note) if one is not None],
            )
        if release:
            optimized._release()
    return optimized


def _decide_compile(config: CompileConfig, device: torch.device) -> tuple[bool, str | None]:
    """Whether programs are compiled, and what the report says where they are not."""
    if config.compile is False:
        return False, "programs run uncompiled (compile=False)"
    if can_compile(device):
        return True, None
    missing = "Triton" if device.type == "cuda" else "a C++ compiler (g++ or clang++)"
    if config.compile:
        raise ConfigError(f"compile=True, but {missing} was not found: install it or pass compile=None")
    return False, f"programs run uncompiled on {device.type}, slower: {missing} was not found"


def _within_tables(facts: ModelFacts, gm: GraphModule) -> ModelFacts:
    """Facts whose length is not beyond the rotary tables: a position outside of them would be read from nowhere."""
    rows = len(getattr(gm, COS)) if hasattr(gm, COS) else None
    limits = [limit for limit in (facts.max_sequence_length, rows) if limit is not None]
    return dataclasses.replace(facts, max_sequence_length=min(limits, default=None))
