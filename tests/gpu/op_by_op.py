# SPDX-License-Identifier: Apache-2.0
"""Runs every operator of a computation on a second device too, on the same operands, and compares what they give.

Errors do not add up: each operator starts from what the first device gave to it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from dllm_compile.kernels.fp8_format import FP8
from tests.kernels.fp8_cases import value_steps


class OpByOp(TorchDispatchMode):
    """Inside this mode each operator is called a second time, on `device`, and must give the same.

    Args:
        device: of the second call.
        products: how far a row of an FP8 product may be off, as a share of the row's norm.
        numbers: the same for every other floating-point result.

    Attributes:
        calls: how often each operator was compared.
        apart: the largest share by which a row was off, for each operator.
    """

    def __init__(self, device: str, products: float, numbers: float) -> None:
        super().__init__()
        self.device, self.products, self.numbers = torch.device(device), products, numbers
        self.calls: Counter[str] = Counter()
        self.apart: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The first device's result."""
        kwargs = kwargs or {}
        copies, more = tree_map(self._there, (args, kwargs))  # before the call: an operator may write to its operands
        expected = func(*args, **kwargs)
        if not any(isinstance(one, Tensor) for one in tree_flatten((args, kwargs))[0]):
            return expected
        name, found = str(func), func(*copies, **more)
        pairs = [(expected, found)]
        if func._schema.is_mutable:
            pairs.append(((args, kwargs), (copies, more)))
        for one, other in zip(*(tree_flatten(values)[0] for values in zip(*pairs, strict=True)), strict=True):
            if isinstance(one, Tensor):
                self._compare(name, one, other.to(one.device))
            else:
                assert one == other or isinstance(one, torch.device), name
        self.calls[name] += 1
        return expected

    def _there(self, value: Any) -> Any:
        """A copy on the second device; strides are kept, those of padded rows too."""
        if isinstance(value, torch.device):
            return self.device
        if not isinstance(value, Tensor):
            return value
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        return whole.to(self.device, copy=True).as_strided(value.size(), value.stride(), value.storage_offset())

    def _compare(self, name: str, expected: Tensor, found: Tensor) -> None:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        if expected.dtype == FP8:
            steps = value_steps(found, expected)  # what they are codes of may differ in its last bits
            assert (steps <= 1).all(), name
            assert (steps > 0).sum() <= 2 + steps.numel() / 10_000, name
        elif expected.is_floating_point():
            finite = expected.isfinite()
            assert found.isfinite().equal(finite), name
            assert ((found == expected) | found.isnan() & expected.isnan())[~finite].all(), name
            expected, found = (torch.where(finite, x, 0).double() for x in (expected, found))
            off = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
            share = off.nan_to_num(0.0, math.inf).amax().item() if off.numel() else 0.0  # 0 / 0: rows of zeros
            self.apart[name] = max(share, self.apart.get(name, 0.0))
            assert share <= (self.products if "fp8" in name else self.numbers), (name, share)
        else:
            assert torch.equal(found, expected), name
