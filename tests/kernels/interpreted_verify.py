# SPDX-License-Identifier: Apache-2.0
"""The kernels of the verify pass in Triton's interpreter; see `interpreted.py`."""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from dllm_compile.kernels.head_confidence_triton import Tiling, head_confidence_triton, head_verify_triton
from dllm_compile.kernels.row_attention_blocks import Blocks
from dllm_compile.kernels.verify_attention_triton import verify_attention_triton
from tests.kernels.cases import dense_head, exact_head
from tests.kernels.verify_cases import dense_verify, verify_case

# Samples as (context, candidates, padding, keys, hidden), heads, key heads, head dim; tile rows; blocks.
ATTENTION = {
    "one part": ([(16, 8, 0, 60, 24)], 4, 2, 16, 32, Blocks(32, 16, 2, 4, 1)),
    "four parts": ([(16, 8, 0, 75, 24)], 2, 2, 16, 32, Blocks(32, 16, 2, 4, 4)),
    "ragged, four parts": (
        [(16, 8, 0, 70, 24), (5, 3, 21, 9, 8), (30, 1, 0, 40, 31)],
        4,
        4,
        16,
        32,
        Blocks(32, 16, 2, 4, 4),
    ),
    "parts without keys": ([(4, 2, 8, 5, 2), (0, 0, 16, 20, 0)], 2, 1, 32, 16, Blocks(16, 16, 2, 4, 3)),
    "every key is hidden": ([(9, 3, 1, 32, 32), (2, 1, 12, 0, 0)], 4, 1, 16, 16, Blocks(16, 16, 2, 4, 2)),
    "head dim 128, 24 rows in a block of 32": ([(10, 6, 2, 50, 22)], 1, 1, 128, 24, Blocks(32, 32, 2, 4, 2)),
    "chosen blocks": ([(16, 8, 0, 70, 24), (5, 3, 21, 9, 8)], 4, 2, 16, 32, None),
}

# A name, then rows, vocabulary, width, scale, banned ids, tiling.
HEAD = {
    "one row": (1, 50, 16, 1.0, [-1], Tiling(16, 16, 16, 2, 4, 0)),
    "ragged everything": (19, 133, 37, 0.3, [5, -1, 77], Tiling(16, 32, 16, 2, 4, 0)),
    "persistent": (19, 133, 32, 1.0, [], Tiling(16, 16, 32, 2, 4, 3)),
}


def attention_errors() -> dict[str, dict[str, float]]:
    """Largest error against the fp64 definition, by case and dtype, and what should be zero: padding rows, counters."""
    errors: dict[str, dict[str, float]] = {}
    for name, (samples, heads, kv_heads, head_dim, tile_rows, blocks) in ATTENTION.items():
        for dtype in (torch.float32, torch.float16):
            case = verify_case(samples, heads, kv_heads, head_dim, dtype)
            arrived = torch.zeros(64, dtype=torch.int32)
            out = verify_attention_triton(*case.arguments, tile_rows, blocks, arrived=arrived)
            error = (out.double() - dense_verify(case)).abs().max().item()
            errors.setdefault(name, {})[str(dtype)] = error
            padding = [i for i, (kind, _) in enumerate(case.kinds) if kind == "padding"]
            errors[name][f"{dtype}, not zero"] = float(out[padding].count_nonzero() + arrived.count_nonzero())
    return errors


def attention_layouts() -> dict[str, bool]:
    """Keys whose heads lie outside, queries whose dims do, and rows of the cache that nobody may read."""
    case = verify_case([(16, 8, 0, 70, 24), (5, 3, 21, 9, 8)], 4, 2, 16)
    blocks = Blocks(32, 16, 2, 4, 2)

    def run(**changes: torch.Tensor) -> torch.Tensor:
        return verify_attention_triton(*case._replace(**changes).arguments, 32, blocks)

    out = run()
    outside = case.k_cache.clone()
    named = torch.zeros_like(case.hidden)
    for _, _, begin, end in case.tiles.tolist():
        named[begin:end] = True
    outside[case.hidden] = 1e4
    outside[~named] = torch.nan
    return {
        "heads outside": torch.equal(run(k_cache=case.k_cache.transpose(0, 1).contiguous().transpose(0, 1)), out),
        "dims outside": torch.equal(run(q=case.q.transpose(1, 2).contiguous().transpose(1, 2)), out),
        "rows nobody may read": torch.equal(run(k_cache=outside), out),
        "runs are equal": torch.equal(run(), out),
    }


def head_errors() -> dict[str, dict[str, float]]:
    """Tokens that differ from the plain kernel's, confidences that do, and the error of the given probability."""
    errors: dict[str, dict[str, float]] = {}
    for name, (rows, vocabulary, width, scale, banned, tiling) in HEAD.items():
        x, weight = exact_head(rows, vocabulary, width, torch.float32)
        bans = torch.tensor(banned, dtype=torch.int64)
        given = (torch.arange(rows) * 7 + vocabulary - 1) % vocabulary
        given[0] = max(banned, default=3) if max(banned, default=3) >= 0 else 3
        token, confidence, probability = head_verify_triton(x, weight, scale, 2, bans, given, tiling)
        plain = head_confidence_triton(x, weight, scale, 2, bans, tiling=tiling)
        *_, expected = dense_head(x, weight, scale, 2, bans)
        expected = expected.gather(1, given[:, None]).squeeze(1)
        errors[name] = {
            "token": float((token != plain[0]).sum()),
            "confidence": float((confidence != plain[1]).sum()),
            "given": ((probability.double() - expected).abs() / expected.clamp(min=1e-30)).max().item(),
        }
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({"attention": attention_errors(), "layouts": attention_layouts(), "head": head_errors()}, sys.stdout)
