# SPDX-License-Identifier: Apache-2.0
"""The comparison of every operator with a second device sees what is wrong there; both devices are the CPU here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dllm_compile.kernels.fp8_format import FP8
from tests.gpu.op_by_op import OpByOp


class Wrong(OpByOp):
    """What the second device gives, or wrote to its operands, is spoilt."""

    spoil = staticmethod(lambda x: x)

    def _compare(self, name: str, expected: Tensor, found: Tensor) -> None:
        super()._compare(name, expected, self.spoil(found.clone()))


def wrong(spoil):
    mode = Wrong("cpu", products=1e-4, numbers=1e-5)
    mode.spoil = spoil
    return mode


def test_equal_devices_agree():
    with torch.no_grad(), OpByOp("cpu", products=0.0, numbers=0.0) as mode:
        x = torch.arange(12.0).view(3, 4).log()  # -inf among them
        (x @ x.T.nan_to_num()).softmax(-1).to(FP8)
        torch.zeros(0, 4).sum(-1)
        torch.ones(4, 0) + 1
    assert {"aten.mm.default", "aten._softmax.default", "aten._to_copy.default"} <= set(mode.calls)
    assert set(mode.apart.values()) == {0.0}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 1.001], ids=["not a number", "infinite", "a thousandth of one number off"]
)
def test_one_wrong_number_is_seen(value):
    def spoil(found: Tensor) -> Tensor:
        found[..., 0] *= value
        return found

    with wrong(spoil), pytest.raises(AssertionError, match=r"aten\.add"):
        torch.ones(4, 8) + 1


def test_a_finite_number_in_the_place_of_an_infinite_one_is_seen():
    with wrong(lambda found: found.clamp(max=9.0)), pytest.raises(AssertionError, match=r"aten\.div"):
        torch.ones(4, 8) / 0


def test_codes_two_steps_off_are_seen():
    def spoil(found: Tensor) -> Tensor:
        return (found.view(torch.uint8) + 2).view(FP8) if found.dtype == FP8 else found

    with wrong(spoil), pytest.raises(AssertionError, match="_to_copy"):
        torch.ones(4, 8).to(FP8)


def test_operands_that_an_operator_writes_to_are_compared():
    x = torch.ones(4, 8)
    with OpByOp("cpu", products=0.0, numbers=0.0) as mode:
        x.add_(1)
    assert mode.calls["aten.add_.Tensor"] == 1
    with wrong(lambda found: found + 1), pytest.raises(AssertionError, match="add_"):
        x.add_(1)
