# SPDX-License-Identifier: Apache-2.0
"""How well a model solves held-out problems: plain block-by-block decoding of the whole canvas, no caches.

Used by the training script on whatever device it has. It measures the model, not this package's runtime.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from dllm_compile.models.small.families import grade
from dllm_compile.models.small.problem import Problem, held_out
from dllm_compile.models.small.tokenizer import EOS_ID, MASK_ID


@dataclass(frozen=True)
class Decoded:
    """Answers as token lists up to the first end token, and the forwards each took."""

    tokens: list[list[int]]
    forwards: list[int]


@torch.no_grad()
def decode(
    model: nn.Module, prompts: Sequence[Sequence[int]], gen_length: int, block_length: int, threshold: float | None
) -> Decoded:
    """Decode one batch.

    In every step each sample commits, inside its current block, all masked positions whose confidence exceeds
    `threshold`, at least the best one; with None exactly one. A sample is done when its canvas is full or a finished
    block holds the end token. Confidence is the softmax probability of the arg-max; the mask token is never chosen.

    Args:
        model: ids and attention mask to an output with `logits`.
        prompts: token ids of each prompt.
        gen_length: canvas length in tokens, a multiple of `block_length`; training saw canvases from about 100 up.
        block_length: tokens a block.
        threshold: confidence above which positions are committed.
    """
    device = next(model.parameters()).device
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
    total = max(len(prompt) for prompt in prompts) + gen_length
    ids = torch.full((len(prompts), total), MASK_ID, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt), device=device)
    place = torch.arange(total, device=device)[None] - starts
    real = place < gen_length
    ids = torch.where(real, ids, EOS_ID)
    block = torch.zeros_like(starts)
    done = torch.zeros_like(starts, dtype=torch.bool)
    forwards = torch.zeros_like(starts)
    while not bool(done.all()):
        logits = model(ids, attention_mask=real).logits.float()
        inside = (place >= 0) & (place >= block * block_length) & (place < (block + 1) * block_length)
        masked = inside & (ids == MASK_ID) & ~done
        probabilities = torch.softmax(logits, dim=-1)
        logits[..., MASK_ID] = -math.inf
        token = logits.argmax(-1)
        confidence = probabilities.gather(-1, token[..., None])[..., 0].masked_fill(~masked, -1.0)
        best = torch.zeros_like(masked).scatter_(1, confidence.argmax(1, keepdim=True), True) & masked
        commit = best if threshold is None else best | (masked & (confidence > threshold))
        ids = torch.where(commit, token, ids)
        forwards += (~done).long()
        finished = ~(inside & (ids == MASK_ID)).any(1, keepdim=True)
        ended = (inside & (ids == EOS_ID)).any(1, keepdim=True)
        block = block + (finished & ~done).long()
        done = done | (finished & (ended | (block * block_length >= gen_length)))
    tokens = []
    for row, prompt in enumerate(prompts):
        answer = ids[row, len(prompt) : len(prompt) + gen_length].tolist()
        tokens.append(answer[: answer.index(EOS_ID)] if EOS_ID in answer else answer)
    return Decoded(tokens, forwards[:, 0].tolist())


def measure(
    model: nn.Module,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    threshold: float | None,
    gen_length: int = 128,
    block_length: int = 32,
    batch: int = 500,
) -> tuple[dict[str, Any], list[bool], list[str]]:
    """Accuracy, its standard error, forwards and tokens a problem; which were right; the decoded texts."""
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([problem.prompt for problem in problems])]
    tokens: list[list[int]] = []
    forwards: list[int] = []
    began = time.perf_counter()
    for at in range(0, len(prompts), batch):
        part = decode(model, prompts[at : at + batch], gen_length, block_length, threshold)
        tokens += part.tokens
        forwards += part.forwards
    seconds = time.perf_counter() - began
    texts = tokenizer.decode_batch(tokens, skip_special_tokens=False)
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(grade, problems, texts))
    accuracy = sum(right) / len(right)
    figures: dict[str, Any] = {
        "threshold": threshold,
        "problems": len(right),
        "accuracy": round(accuracy, 4),
        "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / len(right)), 4),
        "forwards_per_problem": round(sum(forwards) / len(forwards), 2),
        "answer_tokens": round(sum(map(len, tokens)) / len(tokens), 2),
        "seconds": round(seconds, 1),
    }
    by_steps: dict[int, list[bool]] = {}
    for problem, ok in zip(problems, right, strict=True):
        by_steps.setdefault(problem.check.get("steps", 0), []).append(ok)
    if len(by_steps) > 1:
        figures["by_steps"] = {str(steps): round(sum(oks) / len(oks), 4) for steps, oks in sorted(by_steps.items())}
    return figures, right, texts


def report(
    model: nn.Module,
    tokenizer: Tokenizer,
    sizes: dict[str, int],
    thresholds: Sequence[float | None] = (None, 0.9, 0.7),
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """`measure` for several families (name to number of problems) and rules; prints what it finds.

    Returns:
        The figures of each family, a rule an entry; in the same order, which problems were right, as 0s and 1s.
    """
    figures: dict[str, list[dict[str, Any]]] = {family: [] for family in sizes}
    details: dict[str, list[str]] = {family: [] for family in sizes}
    for family, n in sizes.items():
        problems = held_out(family, n)
        for threshold in thresholds:
            found, right, texts = measure(model, tokenizer, problems, threshold)
            figures[family].append(found)
            details[family].append("".join(str(int(ok)) for ok in right))
            print(f"{family}: {found}", flush=True)
            for i in [i for i, ok in enumerate(right) if not ok][:3]:
                print(f"  {problems[i].prompt!r}\n    got  {texts[i]!r}\n    want {problems[i].answer!r}", flush=True)
    return figures, details


def main() -> None:
    """Measure a checkpoint folder: `python -m dllm_compile.models.small.evaluate [--checkpoint DIR] ...`."""
    from dllm_compile.models.llada import LLaDAForMaskedDiffusion
    from dllm_compile.models.small import CHECKPOINT

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--arithmetic", type=int, default=500, help="number of problems")
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--prose", type=int, default=0)
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.9, 0.7], help="besides one token a step")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LLaDAForMaskedDiffusion.from_pretrained(given.checkpoint, dtype=torch.float32, device=device)
    sizes = {family: getattr(given, family) for family in ("arithmetic", "code", "prose") if getattr(given, family)}
    report(model, Tokenizer.from_file(str(given.checkpoint / "tokenizer.json")), sizes, (None, *given.thresholds))


if __name__ == "__main__":
    main()
