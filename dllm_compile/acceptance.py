# SPDX-License-Identifier: Apache-2.0
"""The last check of `optimize`: the rewritten graph's logits against the model's own, on two ragged samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from .capture import Captured, logits_of
from .certify import relative_deviation
from .errors import CertificateError
from .passes.graph import aten, find
from .runtime.facts import ModelFacts
from .runtime.layout import tile_table
from .runtime.programs import ModelPrograms
from .runtime.rectangular import RectangularPrograms

LOGITS_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of rewritten and original logits, relative to the largest logit, that needs no explanation."""

NOISE_FACTOR = 4.0
"""A larger difference is accepted up to this many times the model's own rounding noise."""


def is_rectangular(gm: GraphModule) -> bool:
    """Whether an attention was refused and keeps the shape [B, T]."""
    return bool(find(gm, aten.scaled_dot_product_attention.default))


def accept_logits(captured: Captured, facts: ModelFacts) -> float:
    """Compare rewritten and original logits on two random samples of different lengths.

    A packed product may sum in another order than three separate ones, and how far that reaches depends on the model:
    weights of a large scale amplify one rounding many times. A difference beyond `LOGITS_BOUND` is therefore held
    against the model's own rounding noise before it counts as an error.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        CertificateError: it is larger than rounding explains.
    """
    parameter = next(captured.source.parameters())
    device, dtype = parameter.device, parameter.dtype
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([min(length, facts.max_sequence_length or length) for length in (13, 6)])
    samples = [torch.randint(facts.vocab_size, (int(n),), generator=generator).to(device) for n in lengths]
    programs: ModelPrograms | RectangularPrograms
    if is_rectangular(captured.gm):
        programs = RectangularPrograms(captured.gm, mask_token_id=None, device=device)
    else:
        programs = ModelPrograms(captured.gm, layers=captured.layers, mask_token_id=None, device=device, compiled=False)
    positions = torch.cat([torch.arange(len(sample), device=device) for sample in samples])
    rows = {
        "ids": torch.cat(samples),
        "positions": positions,
        "tiles": tile_table(lengths, programs.tile_rows).to(device),
    }
    with torch.no_grad():
        actual = programs.forward(**rows)
        expected = torch.cat([logits_of(captured.source(sample[None]))[0] for sample in samples])
        error = relative_deviation(expected, actual)
        allowed = LOGITS_BOUND[dtype]
        if not error <= allowed and isinstance(programs, ModelPrograms):
            noise = rounding_noise(programs.forward_program().gm, rows)
            allowed = max(allowed, NOISE_FACTOR * noise)
    if not error <= allowed:
        raise CertificateError(
            f"the rewritten graph's logits differ from {type(captured.source).__name__}'s by {error:.1e} of the "
            f"largest logit, more than rounding explains ({allowed:.0e}): please report this model"
        )
    return error


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
