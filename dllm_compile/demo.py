# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: an unmodified LLaDA is captured, rewritten, compiled, and decodes held-out word problems.

The plain loop here is the definition of one-token-a-step decoding on the user's model; the same tokens must come out of
the rewritten one. The last run keeps several tokens a step, which is another algorithm: its answers may differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._config_checks import integer
from .config import CompileConfig, DecodingConfig
from .models.small.problem import Problem

if TYPE_CHECKING:
    from rich.console import Console

    from .optimized import OptimizedModel


@dataclass(frozen=True)
class Run:
    """One way of decoding all problems: canvases behind the prompts, graded answers, and what it took."""

    name: str
    canvases: list[list[int]]
    solved: list[bool]
    texts: list[str]
    forwards: int
    seconds: float


@torch.no_grad()
def plain_decode(model: nn.Module, prompt: Sequence[int], config: DecodingConfig, mask_id: int, eos_id: int) -> Tensor:
    """Decode one prompt by the definition: the most confident masked token of the block, one a forward.

    Args:
        model: `ids (1, T) -> output with logits (1, T, V)`.
        prompt: token ids.
        config: `max_new_tokens` and `block_length` are read.
        mask_id: the mask token, never proposed.
        eos_id: a finished block that holds it ends the answer; the rest of the canvas is filled with it.

    Returns:
        (P + G,) int64, the canvas.
    """
    start, total = len(prompt), len(prompt) + config.max_new_tokens
    canvas = torch.full((total,), mask_id, device=next(model.parameters()).device)
    canvas[:start] = torch.tensor(list(prompt))
    for begin in range(start, total, config.block_length):
        block = canvas[begin : begin + config.block_length]
        while bool((block == mask_id).any()):
            logits = model(canvas[None]).logits[0, begin : begin + len(block)].float()
            probability = torch.softmax(logits, dim=-1)
            logits[:, mask_id] = -torch.inf
            token = logits.argmax(-1)
            confidence = probability.gather(-1, token[:, None])[:, 0]
            best = torch.where(block == mask_id, confidence, -1.0).argmax()
            block[best] = token[best]
        if bool((block == eos_id).any()):
            break
    canvas[canvas == mask_id] = eos_id
    return canvas


def run(*, problems: int = 4, threshold: float = 0.9, device: str | None = None, compile: bool | None = None) -> int:  # noqa: A002
    """Show the whole path; returns 0 when the rewritten model gave the plain loop's tokens, else 1.

    Raises:
        ConfigError: fewer than one problem, a threshold that is none, or no such device.
    """
    from rich.console import Console

    from ._checkpoints import target_device
    from .api import optimize
    from .models import load_small, load_small_tokenizer
    from .models.small.problem import held_out

    problems = integer("problems", problems, 1)
    one = DecodingConfig()
    parallel = one.replace(threshold=threshold)
    target = target_device(device)
    console = Console(soft_wrap=False, highlight=False)

    console.rule("1  An unmodified LLaDA")
    model, tokenizer = load_small(device=target), load_small_tokenizer()
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{type(model).__name__}: {size / 1e6:.1f} million parameters, {model.config.n_layers} layers, "
        f"{str(model.dtype).removeprefix('torch.')} on {target} (torch {torch.__version__})"
    )

    console.rule("2  Captured, rewritten, certified")
    began = time.perf_counter()
    with console.status("optimize(model) ..."):
        fast = optimize(model, CompileConfig(compile=compile))
    console.print(f"optimize(model) took {time.perf_counter() - began:.1f} s")
    console.print(str(fast.report()), markup=False, soft_wrap=True)

    console.rule("3  Held-out word problems")
    chosen = held_out("arithmetic", problems)
    began = time.perf_counter()
    with console.status("first call: compiling ..."):
        fast.generate([tokenizer(chosen[0].prompt)["input_ids"]], one.replace(max_new_tokens=one.block_length))
    console.print(f"first call, with whatever is compiled in it: {time.perf_counter() - began:.1f} s")
    with console.status("decoding ..."):
        runs = [
            _plain("plain loop, one prompt at a time", model, tokenizer, chosen, one),
            _fast("optimized, same rule, one batch", fast, tokenizer, chosen, one),
            _fast(f"optimized, threshold {threshold}", fast, tokenizer, chosen, parallel),
        ]
    _show(console, chosen, runs)
    console.print(
        "The plain loop takes one prompt at a time, the others all prompts together: the times compare ways of "
        "working, not kernels. One run each; compiling is not counted.",
        style="dim",
    )
    equal = runs[0].canvases == runs[1].canvases
    if equal:
        console.print("[bold green]Same tokens[/]: the rewritten model decodes exactly what the plain loop decodes.")
    else:
        differing = sum(a != b for a, b in zip(runs[0].canvases, runs[1].canvases, strict=True))
        console.print(f"[bold red]Different tokens[/] in {differing} of {problems} problems: please report this.")
    return 0 if equal else 1


def _plain(name: str, model: Any, tokenizer: Any, problems: Sequence[Problem], config: DecodingConfig) -> Run:
    """All problems with the plain loop; every forward is counted by a hook on the model itself."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.register_forward_hook(count)
    began = time.perf_counter()
    canvases = []
    for problem in problems:
        ids = tokenizer(problem.prompt)["input_ids"]
        canvas = plain_decode(model, ids, config, model.config.mask_token_id, model.config.eos_token_id)
        canvases.append(canvas[len(ids) :].tolist())
    seconds = time.perf_counter() - began
    handle.remove()
    return _graded(name, canvases, tokenizer, problems, forwards, seconds)


def _fast(name: str, fast: OptimizedModel, tokenizer: Any, problems: Sequence[Problem], config: DecodingConfig) -> Run:
    """All problems in one call of `generate`."""
    began = time.perf_counter()
    output = fast.generate([tokenizer(problem.prompt)["input_ids"] for problem in problems], config)
    seconds = time.perf_counter() - began
    assert output.sequences is not None and output.stats is not None, "generate fills both"
    canvases = output.sequences[:, -config.max_new_tokens :].tolist()
    return _graded(name, canvases, tokenizer, problems, output.stats.forwards, seconds)


def _graded(
    name: str, canvases: list[list[int]], tokenizer: Any, problems: Sequence[Problem], forwards: int, seconds: float
) -> Run:
    from .models.small.families import grade

    eos = tokenizer.eos_token_id
    answers = [canvas[: canvas.index(eos)] if eos in canvas else canvas for canvas in canvases]
    texts = [tokenizer.decode(answer) for answer in answers]
    solved = [grade(problem, text) for problem, text in zip(problems, texts, strict=True)]
    return Run(name, canvases, solved, texts, forwards, seconds)


def _show(console: Console, problems: Sequence[Problem], runs: Sequence[Run]) -> None:
    from rich.markup import escape
    from rich.table import Table

    for number, problem in enumerate(problems):
        console.print(f"\n[bold]{escape(problem.prompt)}[/]")
        for run_ in runs[1:]:
            mark = "[green]right[/]" if run_.solved[number] else "[red]wrong[/]"
            console.print(f"  {run_.name} ({mark}):")
            console.print("    " + escape(run_.texts[number]).replace("\n", "\n    "))
    table = Table("", "right", "seconds", "forwards", "faster than the plain loop")
    for run_ in runs:
        table.add_row(
            run_.name,
            f"{sum(run_.solved)} of {len(problems)}",
            f"{run_.seconds:.2f}",
            str(run_.forwards),
            f"{runs[0].seconds / run_.seconds:.1f}x",
        )
    console.print()
    console.print(table)
