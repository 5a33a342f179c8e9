# SPDX-License-Identifier: Apache-2.0
"""What the FP8 operators mean by codes, scales and groups, in plain torch.

Codes are `float8_e4m3fn`, scales are fp32, a value is code * scale. Three groupings, of activations x [M, K] and
weights w [N, K]:

| group | one scale of x covers | scales of x | one scale of w covers | scales of w |
|---|---|---|---|---|
| 128 | 128 columns of a row | [M, K/128], strides (1, M) | 128 rows x 128 columns | [N/128, K/128] |
| 0 | a row | [M, 1] | a row | [N, 1] |
| -1 | everything | [1, 1] | everything | [1, 1] |

scale = largest magnitude / 448 in fp32, but at least the smallest normal number, and 1 for a group of zeros; code =
round to nearest even of clamp(value / scale, -448, 448). A group that holds NaN or an infinity has NaN codes throughout
and a scale that is not finite: every product with that row is NaN, nothing is silently cut off. Source: LaCache,
section 3.4, which gives the groups; format, rounding and edge cases are stated here.

torchao's `Float8Tensor.from_hp` divides in the dtype of the weight it is given, so the same scales and codes come from
`from_hp(w.float(), granularity=PerBlock([128, 128]))` only; of a bf16 weight its scales are rounded to bf16 (also
valid: codes saturate at 448). For a block of zeros it gives scale 0 and NaN codes: `mend_zero_groups` repairs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite code."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
GROUP, ROW, TENSOR = 128, 0, -1
_PADDED_TO = 4  # columns of the weight's scales, in the block-scaled library product


def check_group(op: str, group: int, **sizes: int) -> None:
    """Raise ValueError unless `group` is one of the three and, if it is 128, divides every size."""
    if group not in (GROUP, ROW, TENSOR):
        raise ValueError(f"{op}: group must be 128, 0 (a row) or -1 (the tensor), got {group}")
    for name, size in sizes.items():
        if group == GROUP and (size % GROUP != 0 or size == 0):
            raise ValueError(f"{op}: {name} = {size} is not a multiple of the group size 128")


def scale_shape(rows: int, width: int, group: int) -> tuple[int, int]:
    """Shape of the scales of activations [rows, width]."""
    return {GROUP: (rows, width // GROUP), ROW: (rows, 1), TENSOR: (1, 1)}[group]


def empty_scales(like: Tensor, group: int) -> Tensor:
    """Uninitialized scales for activations of the shape of `like`; groups of 128 have strides (1, M)."""
    lines, columns = scale_shape(like.shape[0], like.shape[1], group)
    if group == GROUP:
        return like.new_empty((columns, lines), dtype=torch.float32).t()
    return like.new_empty((lines, columns), dtype=torch.float32)


def scale_of(largest: Tensor) -> Tensor:
    """Scale of groups whose largest magnitudes are given, fp32."""
    # Divided by a tensor: on CUDA a division by a number is a product with its reciprocal, another rounding.
    scale = largest / torch.full_like(largest, LARGEST)
    return torch.where(largest == 0, 1.0, scale.clamp(min=SMALLEST_SCALE))


def encode(values: Tensor, scale: Tensor) -> Tensor:
    """Codes of fp32 values; `scale` broadcasts against them."""
    # The clamp comes first: what a cast makes of values beyond 448 depends on the torch version and on the device.
    scaled = torch.where(scale.isfinite(), values / scale, torch.nan).clamp(-LARGEST, LARGEST)
    return scaled.to(FP8)


def quantize_activation(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize rows.

    Args:
        x: [M, K], any floating dtype.
        group: 128, 0 or -1.

    Returns:
        codes [M, K] contiguous, and scales as the module says.
    """
    check_group("quantize_activation", group, K=x.shape[1])
    rows, width = x.shape
    scales = empty_scales(x, group)
    if x.numel() == 0:
        return torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format), scales.fill_(1.0)
    lines, columns = scale_shape(rows, width, group)
    grouped = x.float().reshape(lines, columns, -1)
    scale = scale_of(grouped.abs().amax(2))
    scales.copy_(scale)
    return encode(grouped, scale.unsqueeze(2)).view(rows, width), scales


def quantize_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize a weight in plain torch: the definition that torchao's result is compared with.

    Args:
        weight: [N, K], any floating dtype.
        group: 128, 0 or -1.

    Returns:
        codes [N, K] and scales, both contiguous.
    """
    outs, width = weight.shape
    check_group("quantize_weight", group, N=outs, K=width)
    lines, columns = (outs // GROUP, width // GROUP) if group == GROUP else scale_shape(outs, width, group)
    blocks = weight.float().reshape(lines, outs // lines, columns, width // columns)
    scale = scale_of(blocks.abs().amax((1, 3)))
    return encode(blocks, scale[:, None, :, None]).view(outs, width), scale


def mend_zero_groups(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Give blocks of zeros, which torchao leaves with scale 0 and NaN codes, scale 1 and codes 0."""
    lines, columns = scales.shape
    zero = (scales == 0)[:, None, :, None]
    blocks = codes.view(torch.uint8).view(lines, codes.shape[0] // lines, columns, codes.shape[1] // columns)
    mended = blocks.masked_fill(zero, 0).view(codes.shape).view(FP8)
    return mended, scales.masked_fill(scales == 0, 1.0)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times scales in fp32, for activations and weights of any grouping."""
    lines, columns = scales.shape
    if codes.numel() == 0:
        return codes.float()
    blocks = codes.float().reshape(lines, codes.shape[0] // lines, columns, codes.shape[1] // columns)
    return (blocks * scales[:, None, :, None]).view(codes.shape)


def padded_weight_scales(scales: Tensor) -> Tensor:
    """The same scales of 128 x 128 blocks in memory that the block-scaled library product reads without a copy.

    It wants rows of a multiple of 4 numbers. K = 512 n needs no padding: the argument is returned.

    Args:
        scales: [N/128, K/128] fp32.

    Returns:
        [N/128, K/128] with strides (K/128 rounded up to a multiple of 4, 1).
    """
    lines, columns = scales.shape
    length = -(-columns // _PADDED_TO) * _PADDED_TO
    if scales.stride() == (length, 1):
        return scales
    padded = scales.new_zeros((lines, length))
    padded[:, :columns] = scales
    return padded[:, :columns]


def library_weight_scales(scales: Tensor) -> Tensor:
    """Scales as that product's argument, [K/128 rounded up to a multiple of 4, N/128] with strides (1, its length)."""
    lines, columns = scales.shape
    length = -(-columns // _PADDED_TO) * _PADDED_TO
    enough = scales.untyped_storage().nbytes() // 4 - scales.storage_offset() >= lines * length
    if scales.stride() != (length, 1) or not enough:
        scales = padded_weight_scales(scales.clone(memory_format=torch.contiguous_format))
    return scales.as_strided((length, lines), (1, length))
