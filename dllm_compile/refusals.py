# SPDX-License-Identifier: Apache-2.0
"""Models, and states that models are in, that cannot be captured; and what a forward must do to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import CaptureError, DeviceMismatchError, DllmCompileError, UnsupportedModelError


def first_line(error: BaseException) -> str:
    """Kind of an error and the first line of what it says, if it says anything."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def forward_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """What `model(ids)` returns, or an error that says why it is of no use.

    Args:
        model: a module.
        ids: (B, T) int64.

    Returns:
        Logits (B, T, V).

    Raises:
        UnsupportedModelError: the forward raises, or its logits are no such tensor.
        CaptureError: it returns no logits.
    """
    name, shape = type(model).__name__, tuple(ids.shape)
    try:
        output = model(ids)
    except (DllmCompileError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not run on input_ids of shape {shape}, {first_line(error)}: its forward must take input_ids "
            "first and need nothing else"
        ) from error
    logits = logits_of(output)
    plain = logits.layout is torch.strided and not logits.is_nested
    if not plain or not logits.is_floating_point() or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        what = f"{logits.dtype} of shape {tuple(logits.shape)}" if plain else f"a tensor of layout {logits.layout}"
        raise UnsupportedModelError(
            f"{name} returns {what} for input_ids of shape {shape}: its forward must return the logits of every "
            "position, a floating-point tensor (batch, tokens, vocabulary)"
        )
    return logits


def model_config(model: object, asks: str) -> Any:
    """The configuration of a model, for the call named `asks`.

    Raises:
        UnsupportedModelError: it is no module with parameters, or has none.
    """
    config = getattr(model, "config", None)
    if config is None or not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no .config, or is no torch.nn.Module with parameters; {asks} needs a model, "
            "its vocabulary and mask id"
        )
    return config


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a forward returns."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple | list) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise CaptureError(
            f"the model returns {type(output).__name__} without logits: its forward must return them, alone, first in "
            "a tuple or as `.logits`"
        )
    return logits


def refuse_backward_hooks(source: nn.Module) -> None:
    """Refuse hooks that export would capture as operators: those of the modules inside of `source`.

    Raises:
        UnsupportedModelError: naming the first of these modules.
    """
    for path, module in source.named_modules():
        full = module._backward_pre_hooks or (module._is_full_backward_hook and module._backward_hooks)
        if path and full:
            raise UnsupportedModelError(
                f"{path} of {type(source).__name__} has a full backward hook, which would become an operator of the "
                "graph: take it off, handle.remove(), and register it again after optimize"
            )


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse what torch.compile has wrapped: export does not look into it."""
    for path, module in model.named_modules():
        place = f"model.{path}" if path else "model"
        if isinstance(module, torch._dynamo.OptimizedModule):
            what = f"{place} is the result of torch.compile, which optimize does itself"
            how = "pass the original model (`model._orig_mod`)" if not path else f"put back `{place}._orig_mod`"
            raise UnsupportedModelError(f"{what}: {how}")
        if module._compiled_call_impl is not None:
            raise UnsupportedModelError(
                f"{place} was compiled in place ({place}.compile()), which optimize does itself: load the model again, "
                f"or undo it with `{place}._compiled_call_impl = None`"
            )


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse states of a model that export would capture without complaint, but wrongly or not at all.

    Raises:
        UnsupportedModelError, DeviceMismatchError: naming what to do about it.
    """
    name = type(model).__name__
    _refuse_compiled(model)
    if any(module.training for module in model.modules()):
        raise UnsupportedModelError(f"{name} is in train mode: call model.eval() first")
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise UnsupportedModelError("autocast is on and would change the captured graph: leave the autocast block")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{name} was made in inference mode, which fixes its weights: make it outside of it"
        )
    if getattr(model, "peft_config", None) or any("lora" in type(m).__module__ for m in model.modules()):
        raise UnsupportedModelError(f"{name} carries adapters: call merge_and_unload() first")
    if getattr(model, "hf_quantizer", None) is not None or any(
        type(p.data) is not Tensor or not (p.is_floating_point() or p.is_complex()) for p in model.parameters()
    ):
        raise UnsupportedModelError(f"{name} has quantised parameters: load it in bf16 or fp32")
    placement = getattr(model, "hf_device_map", None) or {}
    if len(set(placement.values())) > 1:
        raise UnsupportedModelError(
            f"{name} is sharded over {sorted(map(str, set(placement.values())))}: load it on one device"
        )
    parameters = list(model.parameters())
    if not parameters:
        raise UnsupportedModelError(f"{name} has no parameters")
    devices = sorted({str(p.device) for p in parameters})
    if "meta" in devices:
        raise UnsupportedModelError(f"{name} has parameters on the meta device: load its weights first")
    if len(devices) > 1:
        raise DeviceMismatchError(f"{name} has parameters on {', '.join(devices)}: move it to one device")
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) > 1:
        raise DeviceMismatchError(f"{name} mixes {', '.join(dtypes)}: convert it with model.to(dtype)")
