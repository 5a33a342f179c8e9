# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel once on small odd shapes, to be run under a memory checker.

compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck python tests/gpu/sanitize.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dllm_compile import kernels as _kernels  # noqa: F401  (registers the operators)
from dllm_compile.kernels import fp8_format
from dllm_compile.kernels.cached_attention import ARRIVALS
from dllm_compile.runtime.block_tiles import block_tile_table
from dllm_compile.runtime.layout import tile_table

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def run_fp8(draw: Callable[..., torch.Tensor]) -> None:
    """The FP8 operators by each of their routes for few rows, and the library's."""
    ops = torch.ops.dllm
    gain = draw(384)
    weight = fp8_format.quantize_weight(draw(384, 2048), 128)
    for rows in (1, 19, 50, 101, 130):
        residual = draw(rows, 384)
        total, codes, scales = ops.add_rms_norm_quant(draw(rows, 384), residual, gain, 1e-5, 128)
        ops.fp8_linear(codes, scales, *fp8_format.quantize_weight(draw(8192, 384), 128), residual.dtype)
        activated = ops.swiglu_quant(draw(rows, 2048), draw(rows, 2048), 128)
        ops.fp8_linear(*activated, *weight, residual.dtype)
        ops.fp8_linear_add_rms_norm(*activated, *weight, total, gain, 1e-5)
        ops.linear_add_rms_norm(draw(rows, 1100), draw(384, 1100), total, gain, 1e-5)
        ops.linear_add_rms_norm_quant(draw(rows, 1024), draw(384, 1024), total, gain, 1e-5, 128)
        ops.quantize(draw(rows, 640), 128)


def attend(draw: Callable[..., torch.Tensor], rows_of: list[int], keys_of: list[int], heads: int) -> None:
    """Attention over caches, with and without scores."""
    rows, keys = torch.tensor(rows_of), torch.tensor(keys_of)
    total, key_end = int(rows.sum()), keys.cumsum(0)
    q = draw(total, heads, HEAD_DIM)
    k, v = (draw(int(keys.sum()) + 1, heads // 2, HEAD_DIM) for _ in range(2))
    tiles = tile_table(rows, 128)
    sample = (tiles[:, None, 0] >= rows.cumsum(0)).sum(1)
    tiles = torch.stack((tiles[:, 0], tiles[:, 1], (key_end - keys)[sample], key_end[sample]), 1).int()
    empty = torch.tensor([[total, total, 0, 0]] * (total // 128 + len(rows) + 1 - len(tiles)), dtype=torch.int32)
    tiles = torch.cat((tiles, empty)).cuda()
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")
    torch.ops.dllm.cached_attention(q, k, v, tiles, 128, arrived)
    window = (rows.cumsum(0)[:, None] - torch.tensor([3, 9, 12])).cuda()
    spans = torch.stack((key_end - keys, key_end), 1).int().cuda()
    scores = torch.zeros(heads, len(k), device="cuda")
    torch.ops.dllm.row_attention_scored(q, k, v, tiles, 128, window, spans, scores, arrived)
    assert arrived.count_nonzero() == 0, "a counter was not reset"
    assert scores.isfinite().all()


def verify(draw: Callable[..., torch.Tensor], samples: int, heads: int) -> None:
    """A verify pass of 11 context rows, 8 drafts and 5 padding rows a sample, over keys of which some are hidden."""
    rows, keys, size = 32 * samples, 333, torch.arange(samples, device="cuda")
    q, k, v = draw(rows, heads, HEAD_DIM), *(draw(rows, heads // 2, HEAD_DIM) for _ in range(2))
    caches = [draw(keys * samples + 1, heads // 2, HEAD_DIM) for _ in range(2)]
    tiles = torch.stack((32 * size, 32 * size + 32, keys * size, keys * size + keys), 1).int()
    ranks = [[j + 1, j + 1, 9] for j in range(8)] + [[j, 0, j + 1] for j in range(8)]
    views = torch.tensor(([[0, 0, 9]] * 11 + [[-1, 0, 0]] * 5 + ranks) * samples, dtype=torch.int32, device="cuda")
    hidden = torch.arange(keys * samples + 1, device="cuda") % 17 == 3
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda")
    torch.ops.dllm.verify_attention(q, k, v, *caches, tiles, views, hidden, 32, arrived)
    assert arrived.count_nonzero() == 0, "a counter was not reset"


def main() -> None:
    """Run each operator for two ragged samples; sizes are no multiples of any tile."""
    ops = torch.ops.dllm
    torch.manual_seed(0)
    lengths = torch.tensor([77, 19])
    rows = int(lengths.sum())
    for dtype in (torch.bfloat16, torch.float32):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        packed = draw(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        q, k, v = (part.unflatten(1, (-1, HEAD_DIM)) for part in packed.split([256, 128, 128], dim=1))
        ops.row_attention(q, k, v, tile_table(lengths, 64).cuda(), 64)

        start = lengths.cumsum(0) - lengths
        blocks = torch.tensor([[33, 48], [77, 80]])
        tiles = block_tile_table(start, lengths, blocks, 64, 77).cuda()
        state = [torch.zeros(rows, HEADS, device="cuda") for _ in range(2)]
        state.append(torch.zeros(rows, HEADS, HEAD_DIM, device="cuda"))
        ops.facache_first(q, k, v, *state, tiles, 64)
        ops.facache_step(q, k, v, *state, tiles, 64)

        angles = torch.rand(128, HEAD_DIM, device="cuda")
        caches = [draw(rows + 1, KV_HEADS, HEAD_DIM) for _ in range(2)]
        positions = torch.arange(rows, device="cuda")
        rotated = ops.qkv_rope_cache_write(
            packed, angles.cos(), angles.sin(), positions, positions, *caches, HEADS, KV_HEADS
        )
        window = torch.tensor([[0, 3, -1], [80, 81, 82]], device="cuda")
        spans = torch.tensor([[0, 77], [77, 96]], dtype=torch.int32, device="cuda")
        ops.row_scores(rotated, window, caches[0], spans, torch.zeros(rows + 1, device="cuda"))

        # Few rows, whose programs share keys; then tiles of 128 rows and more programs than a card has processors.
        attend(draw, [17, 15], [700, 555], 4)
        attend(draw, [128, 97, 130] * 2, [160, 97, 211] * 2, 64)

        # Programs that share keys, and one for each head and sample.
        verify(draw, 1, 4)
        verify(draw, 9, 32)

        x, weight = draw(13, 128), draw(1001, 128)
        banned = torch.tensor([5], device="cuda")
        seeds, temperature = torch.arange(13, device="cuda"), torch.tensor(0.7, device="cuda")
        ops.head_confidence(x, weight, 1.0, 7, banned, None, None)
        ops.head_confidence(x, weight, 1.0, 7, banned, seeds, temperature)
        ops.head_verify(x, weight, 1.0, 7, banned, torch.arange(13, device="cuda") * 77)
        if torch.cuda.get_device_capability() >= (8, 9):
            run_fp8(draw)
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
