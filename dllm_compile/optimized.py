# SPDX-License-Identifier: Apache-2.0
"""`OptimizedModel`, what `optimize` returns: decoding, the own forward, reports, and what is kept between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers.modeling_outputs import MaskedLMOutput

from ._config_checks import chosen
from .acceptance import is_rectangular
from .capture import Captured
from .config import CompileConfig, DecodingConfig
from .errors import CopyError, ReleasedWeightsError, UnsupportedModelError
from .export_gate import EXPORT_GATE, OPTIMIZING
from .fp8_weights import parameters_of, refresh
from .fp8_weights import release as free_weights
from .inspection.dump import dump_graphs
from .passes import INLINE_REFERENCES, GraphPass, PassResult
from .passes.graph import share
from .precision import Fp8Report
from .report import Report, model_report
from .runtime.ambient import plain_mode
from .runtime.engine import decode
from .runtime.facts import ModelFacts
from .runtime.forward_inputs import checked_ids, checked_mask
from .runtime.layout import tile_table
from .runtime.output import GenerationOutput
from .runtime.programs import ModelPrograms
from .runtime.prompt_forms import Mask, Prompts, check_decodes, encoded
from .runtime.prompts import split_prompts
from .runtime.rectangular import RectangularPrograms
from .runtime.session import SessionPool
from .runtime.stages import run_compiled, run_plainly
from .runtime.streamers import Streamer
from .runtime.warm_up import WarmUp, warm_up
from .weights import WeightWatch

_NO_COPY = "an optimized model cannot be copied or pickled: copy or save `fast.model` and call optimize again"


class OptimizedModel(nn.Module):
    """A rewritten model. Made by `optimize`; `model` is the user's own object, unchanged.

    It cannot be copied, pickled or trained: do that with `model`. What `nn.Module` does to parameters (`.to()`,
    `.double()`, `.requires_grad_()`) reaches `model`, because the parameters are its own; after a move or a conversion
    call `optimize(fast.model)` again.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        facts: ModelFacts,
        config: CompileConfig,
        results: tuple[PassResult, ...],
        snapshots: list[tuple[str, GraphModule]],
        *,
        logits_error: float,
        capture_seconds: float,
        compiled: bool,
        finish: Sequence[GraphPass],
        fp8: Fp8Report | None,
        notes: list[str],
    ) -> None:
        super().__init__()
        self.model = model
        self.facts = facts
        self.compile_config = config
        self._captured = captured
        self._results = results
        self._snapshots = snapshots
        self._logits_error = logits_error
        self._capture_seconds = capture_seconds
        self._notes = notes
        self._finish = finish
        self._fp8 = fp8
        self._watch = self._watched()
        device = next(model.parameters()).device
        self.programs = self._make_programs(device, compiled)
        self._sessions = self._make_sessions()
        self.eval()

    def _watched(self) -> WeightWatch:
        quantized = parameters_of(self._captured.gm)  # those that were released are empty
        prefix = self._captured.prefix
        return WeightWatch(self.model, {prefix + path: value for path, value in quantized.items() if value.numel()})

    def _release(self) -> None:
        """Free the weights that FP8 copies stand for."""
        if self._fp8 is None:
            self._notes.append("release=True freed nothing: no weight is an FP8 copy")
            return
        freed, kept = free_weights(self.model, self._captured.gm)
        self._notes += [f"{path} is not released: the graph reads it elsewhere as well" for path in kept]
        self._fp8 = dataclasses.replace(self._fp8, released_bytes=freed)
        self._watch = self._watched()

    def refresh_weights(self) -> None:
        """Quantize the FP8 copies again after parameters were updated in place (`p.copy_`, an optimizer's step).

        All other weights are read where the parameters lie and need no such call. Programs and captured graphs go on
        reading the same buffers.

        Raises:
            ReleasedWeightsError: the parameters were freed by `release=True`.
            StaleWeightsError: parameters were replaced: call `optimize` again.
        """
        if self._fp8 is not None and self._fp8.released_bytes:
            raise ReleasedWeightsError(
                "the weights behind the FP8 copies were freed by optimize(model, release=True), so there is nothing to "
                "quantize again: load the updated model and call optimize on it"
            )
        self._watch.check_places()
        refresh(self._captured.gm)
        self._watch.refreshed()

    @property
    def config(self) -> Any:
        """The model's own configuration."""
        return getattr(self.model, "config", None)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode; `model` is left in the mode it is in.

        Raises:
            UnsupportedModelError: `mode` is True.
        """
        if mode:
            raise UnsupportedModelError(
                "an optimized model only decodes: train the model itself, `fast.model.train()`; "
                "generate sees weights that are updated in place"
            )
        self.training = False
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise CopyError(_NO_COPY)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyError(_NO_COPY)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.programs.device

    def generate(
        self,
        input_ids: Prompts | None = None,
        config: DecodingConfig | None = None,
        *,
        attention_mask: Mask | None = None,
        tokenizer: Any = None,
        streamer: Streamer | Sequence[Streamer] | None = None,
        progress: bool = False,
        cancelled: Callable[[], bool] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Decode answers to a batch of prompts.

        Args:
            input_ids: (B, T) int64 with an optional `attention_mask` (padded on the left or on the right), a list of
                prompts of different lengths, what a tokenizer returns for them (a mapping with "input_ids" and perhaps
                "attention_mask"), or one or several strings together with `tokenizer`.
            config: how to decode; `DecodingConfig()` is LLaDA's plain loop, one token a step.
            attention_mask: (B, T), 1 for tokens and 0 for padding.
            tokenizer: encodes strings as `tokenizer(text)` does, special tokens included, and fills `texts` of the
                output.
            streamer: shown the canvas after each step; of several prompts a list, one for each.
            progress: show a bar over committed tokens.
            cancelled: asked between steps (e.g. an event's `is_set`); True ends the call with what there is, masks and
                all.
            **options: fields of `DecodingConfig` that replace those of `config`, e.g. `max_new_tokens=256`.

        Returns:
            `sequences`, `answers`, `tokens_per_forward`, `stats`, `texts`: see `GenerationOutput`.

        Raises:
            PromptError: empty, too long, badly padded prompts, or mask tokens without `infill`.
            ConfigError, UnknownOptionError: options that contradict each other or do not exist; `tokenizer`, `streamer`
                or `cancelled` that cannot be used as one.
            StaleWeightsError: parameters were replaced after `optimize`, or their FP8 copies are older than they are.
        """
        decoding = chosen(config, DecodingConfig, "generate(ids, max_new_tokens=64)").replace(**options)
        ids, attention_mask = encoded(input_ids, attention_mask, tokenizer)
        check_decodes(tokenizer)
        self._watch.check()
        with plain_mode():
            prompts = split_prompts(ids, attention_mask)
            output = decode(
                self.programs,
                self.facts,
                prompts,
                decoding,
                streamer=streamer,
                progress=progress,
                cancelled=cancelled,
                sessions=self._sessions,
            )
            if tokenizer is not None:
                output["texts"] = [
                    tokenizer.decode(answer, skip_special_tokens=True) for answer in output.answers or ()
                ]
            return output

    def warm_up(
        self,
        prompt_lengths: Sequence[int],
        config: DecodingConfig | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> WarmUp:
        """Compile, and on a card capture, what decoding prompts of these lengths will ask for.

        Without it the first calls do that: a step of a new size is run as it is, and captured when it comes back.

        Args:
            prompt_lengths: tokens of each prompt of a call, of which `slots` are decoded together. Sizes are rounded
                up, so prompts that are a little shorter are served as well.
            config: how they will be decoded.
            progress: show a bar over sizes.
            **options: as in `generate`.

        Returns:
            What it took; `print` it.

        Raises:
            PromptError: `prompt_lengths` are no numbers of tokens, or `generate` would refuse such prompts.
            ConfigError, UnknownOptionError, StaleWeightsError: as `generate`.
        """
        decoding = chosen(config, DecodingConfig, "warm_up([768], cache='flash')").replace(**options)
        self._watch.check()
        with plain_mode():
            return warm_up(self.programs, self.facts, prompt_lengths, decoding, self._sessions, progress)

    def free_buffers(self) -> None:
        """Give up caches, buffers and captured steps that are kept for the next call."""
        if self._sessions is not None:
            self._sessions.clear()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> MaskedLMOutput:
        """The model's own forward, computed by the rewritten graph over the real tokens only.

        Args:
            input_ids: (B, T) integers inside the vocabulary.
            attention_mask: (B, T), 1 for tokens; each row's tokens must be contiguous. Padding is neither attended
                nor computed.

        Returns:
            `.logits` (B, T, V); zero where the mask is zero.

        Raises:
            PromptError: `input_ids` is no (B, T) tensor of token ids.
            PaddingError: shapes differ, or padding stands between tokens.
            PromptTooLongError: a row has more tokens than the model has positions.
            StaleWeightsError: parameters were replaced after `optimize`, or their FP8 copies are older than they are.
        """
        self._watch.check()
        input_ids = checked_ids(input_ids, self.facts.vocab_size)
        mask, lengths = checked_mask(attention_mask, input_ids, self.facts)
        with plain_mode(), EXPORT_GATE.running():
            ids = input_ids.to(self.device)[mask.to(self.device)].clone()
            positions = (mask.cumsum(1) - 1)[mask].to(self.device)
            tiles = tile_table(lengths.cpu(), self.programs.tile_rows).to(self.device)
            rows = self.programs.forward(ids, positions, tiles)
            logits = rows.new_zeros((*input_ids.shape, rows.shape[-1]))
            logits[mask.to(self.device)] = rows
        return MaskedLMOutput(logits=logits)

    def report(self) -> Report:
        """What was rewritten so far; `print` or `show()` it, or use `to_dict()`."""
        return model_report(self)

    def dump_graphs(self, directory: str | Path, *, decompile: bool | None = None) -> list[Path]:
        """Write the graph as captured and after each pass, and each program built so far, to be read and to be run.

        Args:
            directory: made where it does not exist. An earlier dump in it is replaced, all files of it; files of others
                stay as they are. `index.html` in it shows everything; the modules in it are numbered in the order of
                the passes, and `program_<name>.py` is a program with inputs and outputs recorded.
            decompile: also compile each compiled program anew under depyf, caches off, for its decompiled code. None:
                where depyf is installed.

        Returns:
            The files that were written, `index.html` first, then the numbered modules.

        Raises:
            DumpError: the folder cannot be made or written to, or files of others stand where the dump's belong;
                nothing of theirs is touched then.
            MissingPackageError: `decompile` is True and depyf is not installed.
        """
        with OPTIMIZING:  # graphs run
            return dump_graphs(self, directory, decompile=decompile)

    def _make_sessions(self) -> SessionPool | None:
        """Where buffers and captured steps stay between calls; None where steps are neither captured nor compiled."""
        config, programs = self.compile_config, self.programs
        if not isinstance(programs, ModelPrograms):
            return None
        graphs = self.device.type == "cuda" and config.cuda_graphs is not False
        fused = programs.compiled and (graphs if config.fuse_bookkeeping is None else config.fuse_bookkeeping)
        if not (graphs or fused):
            return None
        return SessionPool(config.new_shapes, run=run_compiled if fused else run_plainly)

    def _make_programs(self, device: torch.device, compiled: bool) -> ModelPrograms | RectangularPrograms:
        captured, mask_token_id = self._captured, self.facts.mask_token_id
        if is_rectangular(captured.gm):
            self._notes = ["an attention was left as it was, so samples are computed one by one, uncompiled: slow"]
            return RectangularPrograms(captured.gm, mask_token_id=mask_token_id, device=device)
        return ModelPrograms(
            captured.gm,
            layers=captured.layers,
            mask_token_id=mask_token_id,
            device=device,
            compiled=compiled,
            finish=self._finish,
            inline=INLINE_REFERENCES.name not in self.compile_config.disable,
            observe=lambda program, name, gm: self._snapshots.append((f"{program}.{name}", share(gm))),
        )
