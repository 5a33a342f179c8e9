# SPDX-License-Identifier: Apache-2.0
"""Zeros, NaN and infinities through the FP8 kernels of a card, against the rule written out."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.special_values import CHECKS, GROUPS, VALUES, check_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with FP8"
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("check", CHECKS)
def test_special_values(check, value, group, dtype):
    CHECKS[check](VALUES[value], group, dtype, "cuda")


@pytest.mark.parametrize("rows", [16, 64, 128, 160, 1024])
@pytest.mark.parametrize("value", VALUES)
def test_products_at_every_size_a_kernel_is_chosen_by(value, rows):
    check_products(VALUES[value], 128, torch.bfloat16, "cuda", rows)
