# SPDX-License-Identifier: Apache-2.0
"""Train the bundled small model: `python -m dllm_compile.models.small.train --out DIR --minutes 8`.

LLaDA's objective on prompt-answer pairs: a fraction t ~ U(0, 1) of the answer's tokens is masked (the prompt never is),
and the loss is the cross-entropy of the masked tokens divided by t. A share of the rows is masked as decoding block by
block meets them. Answers are padded with end tokens to the end of the row, and those count. Writes a checkpoint folder
with its tokenizer and `training.json`: settings and figures.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from dllm_compile.models.llada import LLaDAConfig, LLaDAForMaskedDiffusion
from dllm_compile.models.small.dataset import RowBuilder
from dllm_compile.models.small.evaluate import report
from dllm_compile.models.small.noise import noised
from dllm_compile.models.small.optimizer import MatrixMomentum
from dllm_compile.models.small.problem import training
from dllm_compile.models.small.tokenizer import BOS_ID, EOS_ID, MASK_ID, save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Settings:
    """Everything the result depends on, besides the machine's speed (the budget is wall-clock minutes)."""

    minutes: float = 8.0
    max_steps: int = 1_000_000
    problems: int = 2_000_000
    batch: int = 512
    row_length: int = 192
    long_row_length: int = 384
    long_every: int = 8
    min_canvas: int = 100
    learning_rate: float = 4e-3
    adam_learning_rate: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05
    block_share: float = 0.5
    seed: int = 0
    init: str = ""
    d_model: int = 256
    n_layers: int = 8
    n_heads: int = 4
    mlp_hidden_size: int = 768
    vocab_size: int = 1024
    max_sequence_length: int = 512
    arithmetic_share: float = 0.7
    code_share: float = 0.15
    prose_share: float = 0.15
    eval_problems: int = 1000
    workers: int = 0
    compile: bool = True

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(rows, length) of an ordinary batch and of one of long rows, which holds about as many tokens."""
        long = max(8, self.batch * self.row_length // self.long_row_length // 8 * 8)
        return (self.batch, self.row_length), (long, self.long_row_length)

    def mixture(self) -> dict[str, int]:
        """Number of training problems of each family."""
        shares = {"arithmetic": self.arithmetic_share, "code": self.code_share, "prose": self.prose_share}
        return {family: int(self.problems * share) for family, share in shares.items()}


def make_tokenizer(settings: Settings) -> Tokenizer:
    """Train the tokenizer on a sample of the training text."""
    texts: list[str] = []
    for family, n in settings.mixture().items():
        for problem in training(family, max(200, min(n, 6000)), seed=settings.seed):
            texts += [problem.prompt, problem.answer]
    return train_tokenizer(texts, settings.vocab_size)


def make_model(settings: Settings) -> LLaDAForMaskedDiffusion:
    """A freshly drawn model."""
    config = LLaDAConfig(
        d_model=settings.d_model,
        n_heads=settings.n_heads,
        n_layers=settings.n_layers,
        n_kv_heads=settings.n_heads,
        mlp_hidden_size=settings.mlp_hidden_size,
        vocab_size=settings.vocab_size,
        embedding_size=settings.vocab_size,
        max_sequence_length=settings.max_sequence_length,
        mask_token_id=MASK_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        rope_theta=10000.0,
        bias_for_layer_norm=False,
        # Unit-sized activations from the start: attention that begins almost uniform learns to copy names very late.
        init_std=settings.d_model**-0.5,
    )
    model = LLaDAForMaskedDiffusion(config)
    model.model.reset_parameters(settings.seed)
    with torch.no_grad():
        model.model.wte.weight.mul_(8)  # of the size of what the layers add to the stream
    return model


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_loss(model: LLaDAForMaskedDiffusion, settings: Settings) -> Loss:
    """The loss of (ids, targets, weights), compiled and warmed up for both row lengths if settings say so."""
    kind = model.device.type

    def loss_of(ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = model.model(ids).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()

    if not settings.compile:
        return loss_of
    compiled: Loss = torch.compile(loss_of, dynamic=False)
    for size, length in settings.shapes():
        ids = torch.zeros(size, length, dtype=torch.long, device=model.device)
        compiled(ids, ids, ids.float()).backward()
    model.zero_grad(set_to_none=True)
    return compiled


def make_optimizers(model: LLaDAForMaskedDiffusion, settings: Settings) -> list[torch.optim.Optimizer]:
    """Orthogonalised momentum for the matrices of the layers, AdamW for embedding, head and norms."""
    matrices = [p for block in model.model.layers() for p in block.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    fused = model.device.type == "cuda"
    return [
        MatrixMomentum(matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay),
        torch.optim.AdamW(others, lr=settings.adam_learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def train(
    model: LLaDAForMaskedDiffusion, loss_of: Loss, rows: Tensor, starts: Tensor, settings: Settings
) -> dict[str, Any]:
    """Train in place on the model's device; returns steps, seconds and the course of the loss."""
    device = model.device
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    optimizers = make_optimizers(model, settings)
    highest = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    (short_size, _), (long_size, long_length) = settings.shapes()
    model.train()
    curve: list[tuple[int, float]] = []
    running = torch.zeros((), device=device)
    began = last = time.perf_counter()
    step, order, at = 0, torch.empty(0, dtype=torch.long, device=device), 0
    spent = 0.0
    while spent < settings.minutes * 60 and step < settings.max_steps:
        long = settings.long_every > 0 and step % settings.long_every == settings.long_every - 1
        size, length = (long_size, long_length) if long else (short_size, settings.row_length)
        if at + size > len(order):
            order, at = torch.randperm(len(rows), generator=generator, device=device), 0
        chosen = order[at : at + size]
        at += size
        targets = F.pad(rows[chosen].long(), (0, length - settings.row_length), value=EOS_ID)
        ids, weights = noised(targets, starts[chosen].long(), generator, settings.block_share)
        progress = max(spent / (settings.minutes * 60), step / settings.max_steps)
        rate = min(1.0, (step + 1) / settings.warmup_steps) * max(0.01, 1 - progress)
        loss = loss_of(ids, targets, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rates in zip(optimizers, highest, strict=True):
            for group, value in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * value
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        step += 1
        if step <= 2 * settings.long_every or step % 20 == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - began
        if step % 100 == 0 or step == settings.max_steps:
            mean = float(running) / (step - (curve[-1][0] if curve else 0))
            running.zero_()
            curve.append((step, round(mean, 4)))
            now = time.perf_counter()
            print(f"step {step}  loss {mean:.4f}  rate {rate:.3f}  {spent:.0f} s  (+{now - last:.1f} s)", flush=True)
            last = now
    model.eval()
    return {"steps": step, "seconds": round(time.perf_counter() - began, 1), "loss": curve[:: max(1, len(curve) // 40)]}


def run(settings: Settings, out: Path) -> dict[str, Any]:
    """Everything: tokenizer, data, training, checkpoint, figures; returns what `training.json` holds."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    first = Path(settings.init) if settings.init else None
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json")) if first else make_tokenizer(settings)
    save_tokenizer(tokenizer, out, settings.max_sequence_length)
    workers = settings.workers or os.cpu_count() or 1
    builder = RowBuilder(
        tokenizer.to_str(), settings.mixture(), settings.seed, settings.row_length, settings.min_canvas, workers
    )
    # Compiling takes about as long as making the rows: both at once.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if first:
        model = LLaDAForMaskedDiffusion.from_pretrained(first, dtype=torch.float32, device=device)
    else:
        model = make_model(settings).to(device)
    loss_of = make_loss(model, settings)
    print(f"ready, {time.perf_counter() - began:.0f} s", flush=True)
    tokens, starts = builder.collect()
    print(
        f"{len(tokens)} rows, vocabulary {tokenizer.get_vocab_size()}, longest prompt {starts.max()}, "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    course = train(model, loss_of, torch.from_numpy(tokens).to(device), torch.from_numpy(starts).to(device), settings)
    model.to(torch.bfloat16).save_pretrained(out)
    # The figures are those of the file's rounded weights, computed in fp32.
    torch.set_float32_matmul_precision("highest")
    model = LLaDAForMaskedDiffusion.from_pretrained(out, dtype=torch.float32, device=device)
    few = max(1, settings.eval_problems // 4)
    sizes = {"arithmetic": settings.eval_problems, "code": few, "prose": few}
    held_out, details = report(model, tokenizer, sizes) if settings.eval_problems else ({}, {})
    (out / "details.json").write_text(json.dumps(details) + "\n", encoding="utf-8")
    result = {
        "settings": asdict(settings),
        "before": json.loads((first / "training.json").read_text(encoding="utf-8")) if first else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": len(tokens),
        "masked_rows_seen": course["steps"] * settings.batch,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "training": course,
        "decoding": {"gen_length": 128, "block_length": 32, "dtype": "float32", "seed": 0},
        "held_out": held_out,
    }
    result["total_seconds"] = round(time.perf_counter() - began, 1)
    (out / "training.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main() -> None:
    """Command line: one option for each field of `Settings`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for name, value in asdict(Settings()).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(option, type=type(value), default=value)
    given = vars(parser.parse_args())
    out = given.pop("out")
    run(Settings(**given), out)


if __name__ == "__main__":
    main()
