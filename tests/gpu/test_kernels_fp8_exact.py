# SPDX-License-Identifier: Apache-2.0
"""FP8 products of integers on a card: equal to the definition for every row count and route, element by element."""

from __future__ import annotations

import pytest
import torch

from dllm_compile.kernels.fp8_linear import block_scaled_mm, fp8_linear
from dllm_compile.kernels.fp8_linear_add_rms_norm import fp8_linear_add_rms_norm
from dllm_compile.kernels.fp8_linear_triton import ANY_ROWS, fp8_linear_triton
from dllm_compile.kernels.fp8_support import has_block_scaled_mm
from tests.kernels.fp8_exact_cases import exact_inputs, exact_product
from tests.kernels.norm_checks import wrong_norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with FP8"
    ),
]

BF16 = torch.bfloat16
ROWS = [1, 3, 5, 16, 17, 33, 64, 100, 128, 129, 160, 256, 1000]
SHAPES = [(24576, 4096), (4096, 12288), (4096, 4096), (256, 256), (384, 640)]
EPS = 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_products(rows, shape):
    arguments = exact_inputs(rows, *shape, device="cuda", seed=rows)
    expected = exact_product(*arguments)
    for dtype in (BF16, torch.float32):
        assert torch.equal(fp8_linear(*arguments, dtype), expected.to(dtype))
    assert torch.equal(fp8_linear_triton(*arguments, torch.float32, ANY_ROWS), expected)
    if has_block_scaled_mm(torch.device("cuda", 0)):
        assert torch.equal(block_scaled_mm(*arguments), expected.to(BF16))


@pytest.mark.parametrize("shape", [(4096, 12288), (4096, 4096), (256, 640)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_product_add_and_norm(rows, shape):
    """The sum is known to the last bit: the product rounded to bf16, then the residual added."""
    arguments = exact_inputs(rows, *shape, device="cuda", seed=rows)
    generator = torch.Generator("cuda").manual_seed(1)
    residual = torch.randint(-99, 100, (rows, shape[0]), generator=generator, device="cuda").to(BF16)
    weight = (1 + torch.randn(shape[0], generator=generator, device="cuda") / 4).to(BF16)
    total, normed = fp8_linear_add_rms_norm(*arguments, residual, weight, EPS)
    assert torch.equal(total, residual + exact_product(*arguments).to(BF16))
    assert not wrong_norms(total, normed, weight, EPS).any()
