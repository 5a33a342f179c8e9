# SPDX-License-Identifier: Apache-2.0
"""FP8 products that every correct kernel computes exactly, so that no error is small enough to pass.

Codes are integers up to 4 and scales powers of 2: a product of codes is at most 16, the sum of a group of 128 at most
2^11, which even the 14 bits of FP8 tensor cores hold, and the sum of all groups is an integer below 2^24.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_compile.kernels.fp8_format import FP8, empty_scales

LARGEST = 4


def exact_inputs(
    rows: int, outs: int, width: int, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes [M, K], scales, weight codes [N, K], weight scales, in groups of 128; scales differ from group to group."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(*size: int) -> Tensor:
        return torch.randint(-LARGEST, LARGEST + 1, size, generator=generator, device=device).float().to(FP8)

    def powers(*size: int) -> Tensor:
        return 2.0 ** torch.randint(0, 3, size, generator=generator, device=device)

    codes = integers(rows, width)
    scales = empty_scales(codes, 128).copy_(powers(rows, width // 128))
    return codes, scales, integers(outs, width), powers(-(-outs // 128), width // 128)


def exact_product(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> Tensor:
    """(M, N) fp32, the product in fp64; every partial sum of it is an integer below 2^24, in whatever order."""
    x = codes.double() * scales.double().repeat_interleave(128, 1)
    weight = weight_codes.double() * weight_scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    product = x @ weight.T
    assert (x.abs() @ weight.abs().T).max() < 2**24
    assert torch.equal(product.float().double(), product)
    return product.float()
