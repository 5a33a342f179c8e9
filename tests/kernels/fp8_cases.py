# SPDX-License-Identifier: Apache-2.0
"""Inputs and slow definitions that the tests of the FP8 operators share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllm_compile.kernels.fp8_format import FP8, quantize_activation, quantize_weight

# `opcheck` compares the arguments before and after a call, which torch does not do for FP8: operators that take codes
# leave that part out, and their tests look at the bytes themselves.
WITH_CODES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def finite_codes() -> tuple[Tensor, Tensor]:
    """The bytes and the values (fp64) of all finite codes, in the order of their values; -0 is left out."""
    numbers = [byte for byte in range(256) if byte & 0x7F != 0x7F and byte != 0x80]
    # S EEEE MMM, bias 7: written out, so that nothing depends on torch's own conversion.
    values = []
    for byte in numbers:
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(-magnitude if byte & 0x80 else magnitude)
    order = sorted(range(len(numbers)), key=lambda i: values[i])
    return torch.tensor([numbers[i] for i in order]), torch.tensor([values[i] for i in order], dtype=torch.float64)


def nearest_code(values: Tensor) -> Tensor:
    """Value (fp64) of the code nearest to each number, of two equally near ones the even one; ends saturate."""
    numbers, codes = finite_codes()
    distance = (values.double().unsqueeze(-1) - codes).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = nearest & (numbers % 2 == 0)
    return codes[torch.where(even.any(-1), even.int().argmax(-1), nearest.int().argmax(-1))]


def value_steps(codes: Tensor, others: Tensor) -> Tensor:
    """By how many steps of the format two tensors of codes differ; -0 and 0 are one code, NaN equals NaN only."""

    def place(x: Tensor) -> Tensor:
        byte = x.view(torch.uint8).int()
        magnitude = byte & 0x7F
        return torch.where(magnitude == 0x7F, 10_000, torch.where(byte >= 0x80, -magnitude, magnitude))

    return (place(codes) - place(others)).abs()


def is_a_tie(scaled: Tensor, tolerance: float = 2.0**-20) -> Tensor:
    """Whether a number lies half way between two codes, to a few units in the last place of fp32."""
    _, codes = finite_codes()
    middles = ((codes[1:] + codes[:-1]) / 2).to(scaled.device)
    index = torch.searchsorted(middles, scaled.double().contiguous()).clamp(max=len(middles) - 1)
    near = torch.stack([middles[index], middles[(index - 1).clamp(min=0)]])
    return ((near - scaled.double()).abs() <= tolerance * near.abs()).any(0)


def exact_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and norm weight for which every sum is exact in any order, in bf16 too: small integers, powers of 2.

    Rows differ in magnitude. The last row is zero, and so is the first group of the first.
    """
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randint(-20, 21, (2, rows, width), generator=generator).float()
    magnitude = 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    weight = 2.0 ** torch.randint(-2, 3, (width,), generator=generator)
    x, residual = x * magnitude, residual * magnitude
    if rows > 1:
        x[-1], residual[-1] = 0, 0
    x[0, :128], residual[0, :128] = 0, 0
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def exact_gates(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """gate and up, column slices of one matrix, whose gated product is known without computing an exponential.

    silu(g) is g to fp32 for g >= 32, and -0 or 0 for g <= -256 and g = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(rows, 2 * width, generator=generator)
    gates = torch.tensor([0.0, -512.0, 32.0, 48.0, 77.0, 160.0, 2000.0])
    packed[:, :width] = gates[torch.randint(0, len(gates), (rows, width), generator=generator)]
    packed[0, :128] = 0
    packed = packed.to(dtype)
    return packed[:, :width], packed[:, width:]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of `exact_gates`."""
    return torch.where(gate > 0, gate, torch.zeros_like(gate)) * up


def spread(blocks: Tensor, like: Tensor, lines: int) -> Tensor:
    """A number a block of `lines` x 128, repeated over the block, cut to the shape of `like`."""
    repeated = blocks.repeat_interleave(lines, 0).repeat_interleave(128, 1)
    return repeated[: like.shape[0], : like.shape[1]]


def linear_inputs(
    rows: int, outs: int, width: int, group: int = 128, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes, scales, weight codes and weight scales of random numbers whose groups differ in magnitude."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, device=device)
    weight = torch.randn(outs, width, generator=generator, device=device)
    x *= 2.0 ** spread(torch.randint(-4, 5, (rows, -(-width // 128)), generator=generator, device=device), x, 1)
    blocks = torch.randint(-3, 4, (-(-outs // 128), -(-width // 128)), generator=generator, device=device)
    weight *= 2.0 ** spread(blocks, weight, 128)
    return *quantize_activation(x, group), *quantize_weight(weight, group)


def dense_linear(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> Tensor:
    """The definition in fp64: the sum over groups of (codes product) * scale * scale."""
    (rows, width), outs = codes.shape, weight_codes.shape[0]
    result = torch.zeros(rows, outs, dtype=torch.float64, device=codes.device)
    piece = math.gcd(128, width)
    for start in range(0, width, piece):
        group = slice(start, start + piece)
        column = start // 128 if scales.shape[1] > 1 else 0
        row_scale = scales[:, column].double().expand(rows)
        block = weight_scales[:, start // 128 if weight_scales.shape[1] > 1 else 0].double()
        out_scale = block.repeat_interleave(outs // len(block))
        product = codes[:, group].double() @ weight_codes[:, group].double().T
        result += product * row_scale[:, None] * out_scale[None, :]
    return result


def row_errors(got: Tensor, expected: Tensor) -> Tensor:
    """Largest error of each row relative to the row's largest magnitude."""
    return (got.double() - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1e-30)


def byte_copies(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies of the bytes of contiguous or transposed tensors, to see whether a call changes them."""
    return [(x.view(torch.uint8) if x.dtype == FP8 else x).clone() for x in tensors]
