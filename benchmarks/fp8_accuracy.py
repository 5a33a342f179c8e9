# SPDX-License-Identifier: Apache-2.0
"""What FP8 does to the bundled model: decibels of products and logits, and held-out problems solved, paired.

On a CPU the reference makes every step slow: `-n 100 --families arithmetic --no-compile` takes some ten minutes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig, OptimizedModel
from dllm_compile.certify import decibels, relative_error
from dllm_compile.evaluate import evaluate
from dllm_compile.models.small.problem import held_out

from .paired_accuracy import FAMILIES, p_value, paired

PRECISIONS: dict[str, dict[str, Any]] = {
    "checkpoint": {},
    "FP8, a scale a group": {"fp8_granularity": "group"},
    "FP8, a scale a row": {"fp8_granularity": "row"},
    "FP8, a scale a tensor": {"fp8_granularity": "tensor"},
    "FP8, a scale a group, first layer too": {"fp8_granularity": "group", "fp8_skip_layers": ()},
    "FP8, a scale a row, first layer too": {"fp8_granularity": "row", "fp8_skip_layers": ()},
    "FP8, a scale a tensor, first layer too": {"fp8_granularity": "tensor", "fp8_skip_layers": ()},
    "FP8, a scale a group, attention too": {"fp8_granularity": "group", "fp8_linears": "all"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("-n", "--problems", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no-compile", action="store_true")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each precision and family; the first precision is what the others are paired with."""
    tokenizer = dllm_compile.models.load_small_tokenizer()
    decoding = DecodingConfig(threshold=arguments.threshold)
    canvases = _canvases(tokenizer)
    base_logits: torch.Tensor | None = None
    base_solved: dict[str, tuple[bool, ...]] = {}
    rows = []
    for name, options in PRECISIONS.items():
        fast = _optimized(arguments, options)
        logits = torch.cat([fast(ids.to(fast.device)).logits[0].float() for ids in canvases])
        base_logits = logits if base_logits is None else base_logits
        quality = _quality(fast, relative_error(base_logits, logits))
        for family in arguments.families:
            found = evaluate(
                fast,
                tokenizer,
                decoding,
                family=family,
                problems=arguments.problems,
                batch_size=arguments.batch_size,
            )
            base = base_solved.setdefault(family, found.solved)
            row = {"precision": name, **quality, **found.to_dict(), **paired(base, found.solved)}
            rows.append(row)
            print(
                f"{name}, {family}: {100 * found.accuracy:.1f} ± {100 * found.accuracy_error:.1f} %, "
                f"{row['gained']} gained, {row['lost']} lost (p: {p_value(row['p'])})",
                flush=True,
            )
    return rows


def _optimized(arguments: argparse.Namespace, options: dict[str, Any]) -> OptimizedModel:
    model = dllm_compile.models.load_small(device=arguments.device, dtype=getattr(torch, arguments.dtype))
    config = CompileConfig(
        compile=False if arguments.no_compile else None, precision="fp8" if options else "checkpoint", **options
    )
    return dllm_compile.optimize(model, config)


def _canvases(tokenizer: Any) -> list[torch.Tensor]:
    """Held-out problems with the first half of the answer given and the rest masked: what decoding meets."""
    model = dllm_compile.models.load_small()
    canvases = []
    for family in FAMILIES:
        for problem in held_out(family, 8):
            prompt, answer = (tokenizer(text)["input_ids"] for text in (problem.prompt, problem.answer))
            masks = [model.config.mask_token_id] * (64 - len(answer) // 2)
            canvases.append(torch.tensor([[*prompt, *answer[: len(answer) // 2], *masks]]))
    return canvases


def _quality(fast: OptimizedModel, error: float) -> dict[str, Any]:
    """Decibels that products keep on random ids (from the pass) and logits keep on real canvases."""
    fp8 = fast.report().fp8
    if fp8 is None:
        return {"products": {}, "worst_sqnr": None, "mean_sqnr": None, "logits_sqnr": None}
    (result,) = (result for result in fast.report().passes if result.name == "quantize_ffn_fp8")
    products = {region.where.removeprefix("transformer.blocks."): round(region.sqnr, 2) for region in result.regions}
    return {
        "products": products,
        "worst_sqnr": round(fp8.worst_sqnr, 2),
        "mean_sqnr": round(fp8.mean_sqnr, 2),
        "logits_sqnr": round(decibels(error), 2),
    }


def table(result: dict[str, Any]) -> str:
    """The tables of docs/fp8.md."""
    rows = result["rows"]
    environment = result["environment"]
    where = f"{environment['card']}, torch {environment['torch']}, commit {environment['commit']}"
    families = list(dict.fromkeys(row["family"] for row in rows))
    names = list(dict.fromkeys(row["precision"] for row in rows))
    lines = [
        f"{where}; {rows[0]['problems']} held-out problems a family, threshold {rows[0]['config']['threshold']}.",
        "",
        "| precision | " + " | ".join(f"{family}: solved; difference; p" for family in families) + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for name in names:
        cells = []
        for family in families:
            (row,) = (row for row in rows if row["precision"] == name and row["family"] == family)
            cell = f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy_error']:.1f} %"
            if name != names[0]:
                change = f"{100 * row['difference']:+.1f} ± {100 * row['difference_error']:.1f}"
                cell += f"; {change}; {p_value(row['p'])}"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| precision | worst product | products, mean | logits |",
        "|---|---|---|---|",
    ]
    for name in names[1:]:
        row = next(row for row in rows if row["precision"] == name)
        figures = (f"{row[key]:.1f} dB" for key in ("worst_sqnr", "mean_sqnr", "logits_sqnr"))
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"
