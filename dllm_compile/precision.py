# SPDX-License-Identifier: Apache-2.0
"""Which precision a model is computed in: what was asked for, what the card can, and the quantization itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from ._compat import has_fp8
from .acceptance import accept_fp8_logits
from .capture import Captured
from .certify import decibels
from .config import CompileConfig
from .errors import ConfigError
from .fp8_weights import GROUPS, fp8_bytes, quantized_weights, require_torchao, sources_of
from .passes import GraphPass, PassResult, run_passes
from .passes.framework import Observer
from .passes.graph import lookup
from .passes.quantize_ffn_fp8 import quantize_ffn_fp8_pass
from .runtime.facts import ModelFacts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp8Report:
    """What FP8 does to a model.

    Attributes:
        granularity, linears, skipped: as configured.
        weights: how many weights are FP8 copies.
        fp8_bytes: of codes and scales.
        replaced_bytes: of the high-precision weights they stand for.
        released_bytes: of those, freed by `release=True`.
        worst_sqnr, mean_sqnr: decibels that the products keep on random samples.
        logits_sqnr: the same of the logits, against the unmodified model.
    """

    granularity: str
    linears: str
    skipped: tuple[int, ...]
    weights: int
    fp8_bytes: int
    replaced_bytes: int
    released_bytes: int
    worst_sqnr: float
    mean_sqnr: float
    logits_sqnr: float

    def lines(self) -> list[str]:
        """For the report."""
        skipped = ", ".join(map(str, self.skipped)) or "none"
        what = "feed-forward" if self.linears == "ffn" else "all linear layers but the head"
        kept = f"{self.released_bytes / 2**20:.1f} MiB released" if self.released_bytes else "kept with the model"
        weights = (
            f"FP8 ({what}, a scale a {self.granularity}, layers left out: {skipped}): {self.weights} weights, "
            f"{self.fp8_bytes / 2**20:.1f} MiB for {self.replaced_bytes / 2**20:.1f} MiB, {kept}"
        )
        quality = (
            f"FP8 keeps {self.worst_sqnr:.1f} dB of the worst product, {self.mean_sqnr:.1f} on average, and "
            f"{self.logits_sqnr:.1f} dB of the logits (random samples)"
        )
        return [weights, quality]


def decide(config: CompileConfig, device: torch.device, dtype: torch.dtype, layers: int) -> tuple[bool, str | None]:
    """Whether to quantize, and what the report says where "auto" does not.

    Raises:
        ConfigError: "fp8" was asked for and cannot be had, or layers are named that the model does not have.
        MissingPackageError: "fp8" was asked for and torchao is not installed.
    """
    if config.precision == "checkpoint":
        return False, None
    if max(config.fp8_skip_layers, default=0) >= layers:
        raise ConfigError(f"fp8_skip_layers={config.fp8_skip_layers} names layers of a model that has {layers}")
    reason = None
    if device.type == "cuda" and not has_fp8(device):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        reason = f"FP8 products need compute capability 8.9 or more, and {device} has {capability}"
    elif device.type not in ("cuda", "cpu"):
        reason = f"FP8 products are not there on {device.type}"
    elif dtype not in DTYPES:
        reason = f"{str(dtype).removeprefix('torch.')} weights are not quantized (only fp32, bf16 and fp16)"
    elif config.fp8_granularity == "row" and device.type == "cuda" and dtype != torch.bfloat16:
        reason = "fp8_granularity='row' needs bf16 weights on a card (its product returns bf16)"
    elif len(config.fp8_skip_layers) == layers:
        reason = f"fp8_skip_layers={config.fp8_skip_layers} leaves none of {layers} layers"
    if config.precision == "fp8":
        if reason is not None:
            raise ConfigError(f"precision='fp8': {reason}; use precision='checkpoint' or 'auto'")
        require_torchao()
        return True, None
    if reason is None and device.type == "cpu":
        reason = "a CPU gains nothing from FP8"
    if reason is None and importlib.util.find_spec("torchao") is None:
        reason = "torchao is not installed (pip install -e '.[fp8]')"
    return reason is None, None if reason is None else f"precision='auto' stays with the checkpoint's: {reason}"


def quantize(
    captured: Captured, facts: ModelFacts, config: CompileConfig, finish: Sequence[GraphPass], observe: Observer
) -> tuple[tuple[PassResult, ...], Fp8Report | None]:
    """Quantize the canonical graph, whose weights must be in place, and measure what that does to the logits.

    Returns:
        The pass's result, and the report; None where no layer fits ("auto", or not `strict`).

    Raises:
        PassError: strict, and a layer does not fit ("auto" leaves it as it is).
        CertificateError: the logits are too far from the model's.
    """
    strict = config.strict and config.precision == "fp8"
    step = quantize_ffn_fp8_pass(
        GROUPS[config.fp8_granularity], config.fp8_skip_layers, config.fp8_linears, required=True
    )
    results = run_passes(captured.gm, (step,), layers=captured.layers, strict=strict, observe=observe)
    if not quantized_weights(captured.gm):
        return results, None
    error = accept_fp8_logits(captured, facts, finish)
    sqnr = [region.sqnr for region in results[0].regions]
    return results, Fp8Report(
        granularity=config.fp8_granularity,
        linears=config.fp8_linears,
        skipped=config.fp8_skip_layers,
        weights=len(quantized_weights(captured.gm)),
        fp8_bytes=fp8_bytes(captured.gm),
        replaced_bytes=_replaced_bytes(captured.gm),
        released_bytes=0,
        worst_sqnr=min(sqnr),
        mean_sqnr=sum(sqnr) / len(sqnr),
        logits_sqnr=decibels(error),
    )


def _replaced_bytes(gm: GraphModule) -> int:
    return sum(lookup(gm, source).nbytes for source in sources_of(gm))
