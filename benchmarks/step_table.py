# SPDX-License-Identifier: Apache-2.0
"""Table of a decoding result: what a step takes, the least it could take, and which kernels it spends its time in."""

from __future__ import annotations

import re
from typing import Any

from dllm_compile.cards import Card, card_named

from .models import SHAPES

# The first that occurs in a kernel's name says what the kernel is for.
PARTS = (
    ("attention", r"row_attention_kernel|verify_attention_kernel|facache_kernel"),
    ("head", r"^tile_kernel|^merge_kernel"),
    ("products", r"nvjet|gemm|cutlass|fp8_linear_kernel|linear_parts_kernel"),
    ("norms, SwiGLU, codes", r"add_rms_norm_kernel|swiglu"),
    ("rotation, writes", r"rope_write|cat_index_mul_neg"),
    ("everything else", ""),
)
# Rows of a sample in each forward of a step, and rows whose logits it reads; None: the whole canvas.
ROWS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "flash step": ((128, 16),),
    "flash step + verify": ((128, 16), (32, 8)),
    "dual step": ((32, 32),),
    "lacache step": ((None, 32),),
    "uncached step": ((None, 32),),
}


def table(result: dict[str, Any]) -> str:
    """Rows of the page's table, one for each step in FP8 that was profiled."""
    environment, settings = result["environment"], result["settings"]
    card = card_named(environment["card"])
    where = f"{environment['card']}, torch {environment['torch']}, commit {environment['commit']}"
    lines = [
        f"{where}; FP8 in layers 1 to {settings['layers'] - 1}.",
        "",
        f"| step | B | ms | of the floor | {' | '.join(name for name, _ in PARTS)} |",
        "|---|---|---|---|" + "---|" * len(PARTS),
    ]
    profiled = [row for row in result["rows"] if "kernels" in row and row["precision"] == "fp8"]
    if not profiled:
        raise LookupError("no step in FP8 lists its kernels: run the case with --profile")
    for row in profiled:
        least = None if card is None else floor_ms(card, row, settings["shape"], settings["layers"])
        of_floor = "" if least is None else f"{100 * least / row['median_ms']:.0f} %"
        shares = " | ".join(f"{100 * share:.0f} %" for share in shares_of(row["kernels"]))
        lines.append(f"| {row['name']} | {row['batch']} | {row['median_ms']:.2f} | {of_floor} | {shares} |")
    return "\n".join(lines) + "\n"


def shares_of(kernels: list[dict[str, Any]]) -> list[float]:
    """What share of a step's time on the device goes to each of PARTS."""
    times = [0.0] * len(PARTS)
    for one in kernels:
        times[next(i for i, (_, pattern) in enumerate(PARTS) if re.search(pattern, one["kernel"]))] += one["us"]
    return [time / sum(times) for time in times]


def floor_ms(card: Card, row: dict[str, Any], shape: str, layers: int) -> float | None:
    """Least milliseconds of a step: each forward reads the weights once and the keys and values of all samples.

    FP8 in all layers but the first; scales, activations and what surrounds forwards are left out. None: the card has
    no FP8.
    """
    sizes, batch, canvas = SHAPES[shape], row["batch"], row["canvas"]
    width = sizes["d_model"]
    attention, feed_forward, head = 4 * width**2, 3 * width * sizes["mlp_hidden_size"], width * sizes["vocab_size"]
    seconds = 0.0
    for rows, wanted in ROWS[row["name"]]:
        count = batch * (canvas if rows is None else rows)
        read = 2 * (layers * attention + feed_forward + head) + (layers - 1) * feed_forward
        read += 0 if rows is None else 4 * width * layers * batch * canvas
        fp8 = 2 * count * (layers - 1) * feed_forward
        flops = 2 * count * (layers * attention + feed_forward) + 2 * batch * wanted * head
        flops += 4 * count * canvas * width * layers + fp8
        least = card.floor(read, flops, fp8)
        if least is None:
            return None
        seconds += least
    return 1e3 * seconds
