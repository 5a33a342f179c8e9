# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `dllm::head_confidence` and `dllm::head_verify`; imported only where Triton is.

A GEMM whose epilogue keeps five numbers a row and vocabulary tile (best candidate, its id, its logit, largest logit,
sum of exponentials) and a second kernel that merges them in a fixed order. The vocabulary is the first operand of the
product: it then fills the 64-row side of the tensor cores' instruction however few rows x has. The logit of a given
token lies in one tile, which alone stores it.
"""

# Triton reads a kernel's annotations as code, so its arguments have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dllm_compile.kernels import _launch
from dllm_compile.kernels.counter_rng import gumbel_noise
from dllm_compile.kernels.head_merge_triton import merge_kernel

_NO_ID = tl.constexpr(2147483647)
_NEG_INF = tl.constexpr(float("-inf"))
_FINITE_MIN = tl.constexpr(torch.finfo(torch.float32).min)


class Tiling(NamedTuple):
    """Launch configuration: rows x ids x width of a step, pipeline stages, warps, programs a multiprocessor.

    `resident` = 0 starts one program a tile; otherwise that many programs a multiprocessor walk over the tiles.
    """

    rows: int
    ids: int
    width: int
    stages: int
    warps: int
    resident: int


def choose_tiling(dtype: torch.dtype, rows: int) -> Tiling:
    """Launch configuration by shape, from H200 measurements with V = 126,464 and C = 4,096 (up to 32 rows).

    Args:
        dtype: of x and weight.
        rows: W.

    Returns:
        The tiling. Few rows are bound by reading the weights: small tiles, so that several programs share a
        multiprocessor and one's epilogue hides behind another's loads.
    """
    if dtype == torch.float32:
        return Tiling(16, 32, 32, 2, 4, 0)
    if rows <= 16:
        return Tiling(16, 64, 128, 5, 4, 2)
    if rows <= 32:
        return Tiling(32, 64, 64, 6, 4, 0)
    if rows <= 64:
        return Tiling(64, 128, 64, 4, 4, 0)
    return Tiling(128, 128, 64, 4, 8, 0)


@triton.jit
def tile_kernel(
    x,
    weight,
    x_blocks,
    weight_blocks,
    banned,
    seeds,
    temperature,
    given,
    best,
    best_id,
    best_logit,
    peak,
    total,
    given_logit,
    rows,
    vocabulary,
    width,
    x_row,
    weight_row,
    banned_count,
    mask_id,
    scale,
    row_tiles,
    id_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    SAMPLED: tl.constexpr,
    GIVEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Logits of one tile (ids x rows) at a time and their five numbers a row, stored at [row, id tile].

    The logit of the row's given token goes to `given_logit` [row] (both None unless GIVEN).
    """
    for tile in tl.range(tl.program_id(0), row_tiles * id_tiles, tl.num_programs(0)):
        # Row tiles are fastest, so that the programs that share a piece of the weight run together.
        id_tile = tile // row_tiles
        row_begin = (tile % row_tiles) * BLOCK_ROWS
        id_begin = id_tile * BLOCK_IDS
        row = row_begin + tl.arange(0, BLOCK_ROWS)
        ids = id_begin + tl.arange(0, BLOCK_IDS)
        acc = tl.zeros((BLOCK_IDS, BLOCK_ROWS), tl.float32)
        for step in tl.range(0, tl.cdiv(width, BLOCK_WIDTH), num_stages=STAGES):
            start = step * BLOCK_WIDTH
            if DESCRIBED:
                w = weight_blocks.load([id_begin, start])
                xs = x_blocks.load([row_begin, start])
            else:
                column = start + tl.arange(0, BLOCK_WIDTH)
                inside = (column < width)[None, :]
                w_pointers = weight + ids.to(tl.int64)[:, None] * weight_row + column[None, :]
                x_pointers = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
                w = tl.load(w_pointers, mask=(ids < vocabulary)[:, None] & inside, other=0.0)
                xs = tl.load(x_pointers, mask=(row < rows)[:, None] & inside, other=0.0)
            acc = tl.dot(w, xs.T, acc, input_precision="ieee")

        # The roundings a head in x's dtype would make.
        z = acc.to(x.dtype.element_ty).to(tl.float32)
        if SCALED:
            z = (z * scale).to(x.dtype.element_ty).to(tl.float32)
        allowed = ids < vocabulary
        for index in range(banned_count):
            allowed = allowed & (ids != tl.load(banned + index))
        z = tl.where(allowed[:, None], z, _NEG_INF)
        if GIVEN:
            asked = tl.load(given + row, mask=row < rows, other=-1)
            is_asked = ids[:, None] == asked[None, :]
            asked_logit = tl.sum(tl.where(is_asked, z, 0.0), 0)
            tl.store(given_logit + row, asked_logit, mask=(asked >= id_begin) & (asked < id_begin + BLOCK_IDS))

        candidates = z
        if SAMPLED:
            seed = tl.load(seeds + row, mask=row < rows, other=0)
            candidates = z + tl.load(temperature) * gumbel_noise(seed[None, :], ids[:, None])
        candidates = tl.where((ids != mask_id)[:, None], candidates, _NEG_INF)
        top = tl.max(candidates, 0)
        top_id = tl.min(tl.where(candidates == top[None, :], ids[:, None], _NO_ID), 0)
        top_logit = tl.sum(tl.where(ids[:, None] == top_id[None, :], z, 0.0), 0)
        largest = tl.max(z, 0)
        exponentials = tl.sum(tl.exp(z - tl.maximum(largest, _FINITE_MIN)[None, :]), 0)

        place = row.to(tl.int64) * id_tiles + id_tile
        tl.store(best + place, top, mask=row < rows)
        tl.store(best_id + place, top_id, mask=row < rows)
        tl.store(best_logit + place, top_logit, mask=row < rows)
        tl.store(peak + place, largest, mask=row < rows)
        tl.store(total + place, exponentials, mask=row < rows)


def plan_tiles(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None,
    temperature: Tensor | None,
    partials: tuple[Tensor, ...],
    tiling: Tiling,
    given: Tensor | None = None,
    given_logit: Tensor | None = None,
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Tiles, positional arguments and compile-time arguments of the first launch (`tile_kernel[grid](...)`)."""
    (rows, width), vocabulary = x.shape, weight.shape[0]
    row_tiles, id_tiles = -(-rows // tiling.rows), -(-vocabulary // tiling.ids)
    described = x.element_size() == 2 and _launch.describable(x) and _launch.describable(weight)
    described = described and _launch.has_tensor_descriptors(x.device)
    x_blocks, weight_blocks = (
        TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [block, tiling.width]) if described else None
        for matrix, block in ((x, tiling.rows), (weight, tiling.ids))
    )
    sizes = (rows, vocabulary, width, x.stride(0), weight.stride(0), banned.shape[0], mask_id)
    inputs = (x, weight, x_blocks, weight_blocks, banned, seeds, temperature, given)
    arguments = (*inputs, *partials, given_logit, *sizes, scale)
    constants = {
        "BLOCK_ROWS": tiling.rows,
        "BLOCK_IDS": tiling.ids,
        "BLOCK_WIDTH": tiling.width,
        "STAGES": tiling.stages,
        "SCALED": scale != 1.0,
        "SAMPLED": seeds is not None,
        "GIVEN": given is not None,
        "DESCRIBED": described,
        "num_warps": tiling.warps,
    }
    return row_tiles * id_tiles, (*arguments, row_tiles, id_tiles), constants


def head_confidence_triton(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None = None,
    temperature: Tensor | None = None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch both kernels (CUDA tensors, or CPU tensors under Triton's interpreter).

    Args:
        x, weight, scale, mask_id, banned, seeds, temperature: as in `head_confidence_reference`, 16- or 32-bit.
        tiling: launch configuration; chosen by shape if None.

    Returns:
        token (W,) int64 and confidence (W,) fp32.
    """
    token, confidence, _ = _launch_both(x, weight, scale, mask_id, banned, seeds, temperature, None, tiling)
    return token, confidence


def head_verify_triton(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    given: Tensor,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for `head_verify_reference`: token, its probability, and the probability (W,) fp32 of `given`."""
    token, confidence, probability = _launch_both(x, weight, scale, mask_id, banned, None, None, given, tiling)
    assert probability is not None
    return token, confidence, probability


def _launch_both(
    x: Tensor,
    weight: Tensor,
    scale: float,
    mask_id: int,
    banned: Tensor,
    seeds: Tensor | None,
    temperature: Tensor | None,
    given: Tensor | None,
    tiling: Tiling | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, vocabulary = x.shape[0], weight.shape[0]
    token = torch.empty(rows, dtype=torch.int64, device=x.device)
    confidence = torch.empty(rows, dtype=torch.float32, device=x.device)
    probability, given_logit = (None if given is None else torch.empty_like(confidence) for _ in range(2))
    if rows == 0:
        return token, confidence, probability
    x, weight = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (x, weight))
    banned = banned.contiguous()
    seeds, given = (None if one is None else one.contiguous() for one in (seeds, given))
    tiling = tiling or choose_tiling(x.dtype, rows)
    id_tiles = -(-vocabulary // tiling.ids)
    best, best_logit, peak, total = torch.empty((4, rows, id_tiles), dtype=torch.float32, device=x.device)
    best_id = torch.empty((rows, id_tiles), dtype=torch.int32, device=x.device)
    partials = (best, best_id, best_logit, peak, total)
    tiles, arguments, constants = plan_tiles(
        x, weight, scale, mask_id, banned, seeds, temperature, partials, tiling, given, given_logit
    )
    programs = min(tiles, tiling.resident * _launch.processors(x.device)) if tiling.resident else tiles
    tile_kernel[(programs,)](*arguments, **constants)
    merged = (*partials, given_logit, token, confidence, probability)
    merge_kernel[(rows,)](*merged, vocabulary, id_tiles, GIVEN=given is not None, BLOCK=1024)
    return token, confidence, probability
