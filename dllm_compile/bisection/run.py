# SPDX-License-Identifier: Apache-2.0
"""`bisect(model, prompt)`: which layer of the stack changes the answer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from .._config_checks import chosen
from ..config import CompileConfig, DecodingConfig
from ..errors import PromptError
from ..export_gate import OPTIMIZING
from ..fp8_weights import refuse_released
from ..optimized import OptimizedModel
from ..refusals import forward_logits, model_config, refuse_unsupported
from ..runtime.ambient import plain_mode
from ..runtime.facts import ModelFacts
from ..runtime.prompt_forms import encoded
from ..runtime.prompts import check_mask_token, check_prompts, split_prompts
from .findings import BisectResult
from .recording import Fault
from .stack import Stack, check_disable


def bisect(
    model: nn.Module,
    prompt: Any,
    config: CompileConfig | None = None,
    decoding: DecodingConfig | None = None,
    *,
    tokenizer: Any = None,
    stop: bool = True,
    progress: bool = False,
    **options: Any,
) -> BisectResult:
    """Compare each layer between a model and its answer with the layers below it, from the user's eager model up.

    The eager model decodes the prompt by the plain loop, and its logits of two canvases are kept. Then come: the
    captured graph; each pass over it; the programs that the decoding asks for, pass by pass; the decode loop; caches in
    the forms that must change nothing; compiled code; FP8; on a card Triton kernels and CUDA graphs; at the end what
    changes tokens by design. Exact layers are held to the tokens (fp32) or to the error that rounding explains.

    It costs about as much as decoding the prompt ten times without any of this. In fp32 (`model.float()`) more shows
    than in 16 bit, where a token may change by rounding. As in `optimize`, packed parameters become views of shared
    storage: an `OptimizedModel` of the same model that packs less is stale afterwards.

    Args:
        model: the user's model, or an `OptimizedModel`, whose `compile_config` is then the default.
        prompt: token ids of one prompt, or a string with `tokenizer`.
        config: how it is rewritten and compiled. `compile=False` leaves compiled code out, which takes longest.
        decoding: how it is decoded: what gave the wrong answer.
        tokenizer: encodes a string.
        stop: compare nothing above the first fault.
        progress: print each layer before it is compared.
        **options: fields of `DecodingConfig` that replace those of `decoding`.

    Returns:
        A `BisectResult`: `print` it; `first` is the first layer that changes tokens or exceeds its bound, `fault` the
        first that must not.

    Raises:
        UnsupportedModelError, DeviceMismatchError: the model, or the state it is in, as in `optimize`.
        PromptError: not one prompt, or one that cannot be decoded.
        ConfigError: options that contradict each other or do not exist, or FP8 that cannot be had here.
        MissingPackageError: FP8 was asked for and torchao is not installed.
        ReleasedWeightsError: the model's weights were freed by `optimize(model, release=True)`.
    """
    if isinstance(model, OptimizedModel):
        config = model.compile_config if config is None else config
        model = model.model
    config = chosen(config, CompileConfig, "bisect(model, ids, CompileConfig(compile=False))")
    decoding = chosen(decoding, DecodingConfig, "bisect(model, ids, max_new_tokens=64)").replace(**options)
    check_disable(config)
    facts = ModelFacts.from_config(model_config(model, "bisect"))
    refuse_released(model)
    ids = _one_prompt(prompt, tokenizer)
    check_prompts([ids], facts, decoding)
    check_mask_token(facts)
    with OPTIMIZING, torch.inference_mode(False), plain_mode(), torch.no_grad():
        refuse_unsupported(model)
        forward_logits(model, ids[None].to(next(model.parameters()).device))
        stack = Stack(model, ids, config, decoding, stop=stop, told=_tell if progress else lambda layer: None)
        with contextlib.suppress(Fault):
            stack.compare()
    return BisectResult(tuple(stack.findings), tuple(stack.skipped))


def _one_prompt(prompt: Any, tokenizer: Any) -> Tensor:
    if isinstance(prompt, Tensor) and prompt.dim() == 1:
        prompt = prompt[None]
    elif isinstance(prompt, list | tuple) and prompt and all(isinstance(one, int) for one in prompt):
        prompt = [list(prompt)]
    prompts = split_prompts(*encoded(prompt, None, tokenizer))
    if len(prompts) != 1:
        raise PromptError(f"bisect takes one prompt, not {len(prompts)}: give the one whose answer is wrong")
    return prompts[0].cpu()


def _tell(layer: str) -> None:
    print(f"comparing {layer}", flush=True)  # noqa: T201  (asked for)
