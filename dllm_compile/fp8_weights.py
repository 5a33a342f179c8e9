# SPDX-License-Identifier: Apache-2.0
"""FP8 copies of weights: made with torchao, refreshed in place, and the high-precision originals freed on request.

A graph that reads FP8 weights keeps a list of `QuantizedWeight` beside it. The copies are buffers of the graph; where
they came from is remembered by path, so that an update of the parameters can be followed.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .errors import MissingPackageError, ReleasedWeightsError
from .kernels.fp8_format import GROUP, ROW, TENSOR, mend_zero_groups, padded_weight_scales
from .passes.graph import lookup, set_buffer
from .passes.packing import plans

WEIGHTS = "dllm_fp8_weights"

GROUPS = {"group": GROUP, "row": ROW, "tensor": TENSOR}
"""Width of a quantization group by the name of the granularity, as the `dllm::` operators take it."""

_RELEASED = (
    "the high-precision weights of {name} were freed by optimize(model, release=True); only the optimized model can "
    "run. Load the model again for anything else"
)


@dataclass(frozen=True)
class QuantizedWeight:
    """An FP8 copy of a weight.

    Attributes:
        source: path of the high-precision weight in the graph (a parameter, or a packed tensor).
        codes: path of the buffer with its codes, [N, K] float8_e4m3fn.
        scales: path of the buffer with its scales, fp32: [N / 128, K / 128], [N, 1] or [1, 1].
        group: 128, 0 (a row) or -1 (the tensor).
    """

    source: str
    codes: str
    scales: str
    group: int


def quantized_weights(gm: GraphModule) -> tuple[QuantizedWeight, ...]:
    """The FP8 copies a graph reads."""
    return tuple(gm.meta.get(WEIGHTS, ()))


def add_quantized(gm: GraphModule, source: str, group: int, codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """Store an FP8 copy of the weight at `source` beside it."""
    weight = QuantizedWeight(source, f"{source}_codes", f"{source}_scales", group)
    set_buffer(gm, weight.codes, codes)
    set_buffer(gm, weight.scales, scales)
    gm.meta.setdefault(WEIGHTS, []).append(weight)
    return weight


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torchao says at import: which of its extensions do not load (they are not used) and deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def require_torchao() -> Any:
    """The quantization module of torchao.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        with _quiet():
            import torchao.quantization
    except ImportError as error:
        raise MissingPackageError(
            "precision='fp8' quantizes weights with torchao, which is not installed: pip install -e '.[fp8]'"
        ) from error
    return torchao.quantization


@torch.no_grad()
def quantize_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight, as torchao's `Float8Tensor` makes them of its fp32 values.

    torchao divides in the dtype it is given: fp32, so that no scale is rounded to bf16. For a block of zeros it stores
    NaN, which is mended: code 0, scale 1.

    Args:
        weight: [N, K], any floating dtype.
        group: 128 (blocks of 128 x 128; N and K are multiples of it), 0 (a scale for each row) or -1 (one scale).

    Returns:
        codes [N, K] float8_e4m3fn, contiguous, and fp32 scales: [N/128, K/128] with rows that the block-scaled product
        reads as they are, [N, 1] or [1, 1].
    """
    ao = require_torchao()
    granularity = {GROUP: ao.PerBlock([GROUP, GROUP]), ROW: ao.PerRow(), TENSOR: ao.PerTensor()}[group]
    quantized = ao.Float8Tensor.from_hp(weight.detach().float(), granularity=granularity)
    codes, scales = mend_zero_groups(quantized.qdata.contiguous(), quantized.scale.contiguous())
    return codes, padded_weight_scales(scales) if group == GROUP else scales


def sources_of(gm: GraphModule) -> dict[str, tuple[str, ...]]:
    """Paths of the parameters behind each quantized weight: its own, or those that a packed tensor stacks."""
    stacked = {packing.path: packing.sources for packing in plans(gm)}
    return {weight.source: stacked.get(weight.source, (weight.source,)) for weight in quantized_weights(gm)}


def parameters_of(gm: GraphModule) -> dict[str, Tensor]:
    """The parameters that are in use as FP8 copies, by path in the graph."""
    return {path: lookup(gm, path) for paths in sources_of(gm).values() for path in paths}


def refresh(gm: GraphModule) -> None:
    """Quantize every weight again into the buffers that programs read."""
    for weight in quantized_weights(gm):
        codes, scales = quantize_weight(lookup(gm, weight.source), weight.group)
        lookup(gm, weight.codes).copy_(codes)
        lookup(gm, weight.scales).copy_(scales)


def fp8_bytes(gm: GraphModule) -> int:
    """Bytes of all codes and scales, padding of the scales included."""
    paths = (path for weight in quantized_weights(gm) for path in (weight.codes, weight.scales))
    return sum(lookup(gm, path).untyped_storage().nbytes() for path in paths)


def release(model: nn.Module, gm: GraphModule) -> tuple[int, tuple[str, ...]]:
    """Free the high-precision weights that only FP8 copies stand for now.

    Their parameters become meta tensors in `model`, which keep shape and dtype and no values. Modules that had one
    refuse to run, to be saved and to be loaded into, with the reason. A weight that the graph still reads elsewhere
    stays.

    Args:
        model: the user's model.
        gm: the graph with its FP8 weights; its own references to the freed storage are emptied as well.

    Returns:
        bytes freed, and the paths of weights that had to stay.
    """
    in_use = {
        lookup(gm, str(node.target)).untyped_storage().data_ptr() for node in gm.graph.nodes if node.op == "get_attr"
    }
    freed: dict[int, int] = {}
    kept = []
    for source, paths in sources_of(gm).items():
        tensors = [lookup(gm, path) for path in (source, *paths)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        if in_use.intersection(storages):
            kept.append(source)
            continue
        freed |= storages
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                _forget(model, tensor)
            # Every graph that was copied from this one holds the same tensor objects.
            tensor.data = tensor.data.new_empty(0)
    return sum(freed.values()), tuple(kept)


def _forget(model: nn.Module, parameter: nn.Parameter) -> None:
    """Put a meta tensor in a parameter's place, and a refusal in front of every module that had it."""
    owners = [
        (path, module, name)
        for path, module in model.named_modules()
        for name, own in module._parameters.items()
        if own is parameter
    ]
    for path, module, name in owners:
        module.register_parameter(name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
        refuse = _Refuse(path or type(module).__name__)
        module.register_forward_pre_hook(refuse)
        module.register_state_dict_pre_hook(refuse)
        module.register_load_state_dict_pre_hook(refuse)


class _Refuse:
    """A hook that says where the weights of a module went."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any) -> NoReturn:
        raise ReleasedWeightsError(_RELEASED.format(name=self.name))


def refuse_released(model: nn.Module) -> None:
    """Refuse a model whose weights were freed.

    Raises:
        ReleasedWeightsError: naming the first module that lost its weights.
    """
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Refuse):
                hook(module, path)
