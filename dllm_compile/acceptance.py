# SPDX-License-Identifier: Apache-2.0
"""The last check of `optimize`: the rewritten graph's logits against the model's own, on two ragged samples.

Exact rewrites are checked first, against a bound that rounding explains. What FP8 adds is measured after that and has
a bound of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from .capture import Captured
from .certify import decibels, relative_deviation, relative_error
from .errors import CertificateError
from .passes import GraphPass
from .passes.graph import aten, find
from .refusals import logits_of
from .runtime.facts import ModelFacts
from .runtime.layout import tile_table
from .runtime.programs import ModelPrograms
from .runtime.rectangular import RectangularPrograms

LOGITS_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of rewritten and original logits, relative to the largest logit, that needs no explanation."""

NOISE_FACTOR = 4.0
"""A larger difference is accepted up to this many times the model's own rounding noise."""

FP8_LOGITS_BOUND = 10.0
"""Decibels of the logits that FP8 must keep on random samples. One product keeps 28.7 dB; how much of that is left
behind many layers depends on the model. Below 10 dB, an error of 32 %, decoding is a lottery."""


def is_rectangular(gm: GraphModule) -> bool:
    """Whether an attention was refused and keeps the shape [B, T]."""
    return bool(find(gm, aten.scaled_dot_product_attention.default))


def accept_logits(captured: Captured, facts: ModelFacts, finish: Sequence[GraphPass] = ()) -> float:
    """Compare rewritten and original logits on two random samples of different lengths.

    A packed product may sum in another order than three separate ones, and how far that reaches depends on the model:
    weights of a large scale amplify one rounding many times. A difference beyond `LOGITS_BOUND` is therefore held
    against the model's own rounding noise before it counts as an error.

    Args:
        captured: the model and its canonical graph, weights in place.
        facts: of the model.
        finish: passes that end every program.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        CertificateError: it is larger than rounding explains.
    """
    samples = _samples(captured, facts)
    expected, actual = _logits(captured, samples, finish)
    error = relative_deviation(expected, actual)
    allowed = LOGITS_BOUND[next(captured.source.parameters()).dtype]
    if not error <= allowed and not is_rectangular(captured.gm):
        programs = _programs(captured, ())
        with torch.no_grad():
            noise = rounding_noise(programs.forward_program().gm, _rows(samples, programs))  # type: ignore[union-attr]
        allowed = max(allowed, NOISE_FACTOR * noise)
    if not error <= allowed:
        raise CertificateError(
            f"the rewritten graph's logits differ from {type(captured.source).__name__}'s by {error:.1e} of the "
            f"largest logit, more than rounding explains ({allowed:.0e}): please report this model"
        )
    return error


def accept_fp8_logits(captured: Captured, facts: ModelFacts, finish: Sequence[GraphPass]) -> float:
    """Measure what FP8 does to the logits, on the samples of `accept_logits`.

    Args:
        captured: the model, whose weights are still there, and its graph with FP8 products.
        facts: of the model.
        finish: passes that end every program.

    Returns:
        Norm of the difference over the norm of the model's own logits.

    Raises:
        CertificateError: less than `FP8_LOGITS_BOUND` decibels are left.
    """
    error = relative_error(*_logits(captured, _samples(captured, facts), finish))
    if decibels(error) < FP8_LOGITS_BOUND:
        raise CertificateError(
            f"in FP8 the logits of {type(captured.source).__name__} keep {decibels(error):.1f} dB on random samples, "
            f"less than {FP8_LOGITS_BOUND:.0f}: name more layers in fp8_skip_layers, or use precision='checkpoint'"
        )
    return error


def _samples(captured: Captured, facts: ModelFacts) -> list[Tensor]:
    """Random ids of two lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, facts.max_sequence_length or length) for length in (13, 6)]
    device = next(captured.source.parameters()).device
    return [torch.randint(facts.vocab_size, (length,), generator=generator).to(device) for length in lengths]


def _programs(captured: Captured, finish: Sequence[GraphPass]) -> ModelPrograms | RectangularPrograms:
    device = next(captured.source.parameters()).device
    if is_rectangular(captured.gm):
        return RectangularPrograms(captured.gm, mask_token_id=None, device=device)
    return ModelPrograms(
        captured.gm, layers=captured.layers, mask_token_id=None, device=device, compiled=False, finish=finish
    )


def _rows(samples: list[Tensor], programs: ModelPrograms | RectangularPrograms) -> dict[str, Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    return {
        "ids": torch.cat(samples),
        "positions": torch.cat([torch.arange(len(sample), device=sample.device) for sample in samples]),
        "tiles": tile_table(lengths, programs.tile_rows).to(samples[0].device),
    }


def _logits(captured: Captured, samples: list[Tensor], finish: Sequence[GraphPass]) -> tuple[Tensor, Tensor]:
    """The model's own logits and those of its rewritten graph, (R, V)."""
    programs = _programs(captured, finish)
    with torch.no_grad():
        actual = programs.forward(**_rows(samples, programs))
        expected = torch.cat([logits_of(captured.source(sample[None]))[0] for sample in samples])
    return expected, actual


def rounding_noise(gm: GraphModule, rows: dict[str, Tensor]) -> float:
    """How far one rounding in each matrix product reaches: relative change of the logits.

    Every product's output is disturbed by normal noise of one unit in the last place of its largest value, about what
    another order of summation does.
    """
    return relative_deviation(gm(**rows), _Disturbed(gm).run(*rows.values()))


class _Disturbed(Interpreter):
    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self._generator = torch.Generator().manual_seed(0)

    def run_node(self, node: Node) -> Any:
        """Run a node; disturb what a matrix product returns."""
        out = super().run_node(node)
        if node.target not in (aten.linear.default, torch.ops.dllm.head.default):
            return out
        noise = torch.randn(out.shape, generator=self._generator).to(out.device)
        unit = torch.finfo(out.dtype).eps * out.abs().max().float()
        return (out.float() + unit * noise).to(out.dtype)
