# SPDX-License-Identifier: Apache-2.0
"""`dllm::running_sum` and `dllm::running_log_sum`: sums up to each rank, by the kernel that torch launches.

In compiled steps a generated kernel would add in another order: a token whose sum lies at a rule's bar would change.
"""

from __future__ import annotations

import torch
from torch import Tensor


def running_sum(values: Tensor) -> Tensor:
    """(S, w) fp32 -> its sums up to each rank, compiled or not by the same kernel."""
    return _running_sum(values) if torch.compiler.is_compiling() else values.cumsum(-1)  # type: ignore[no-any-return]


def running_log_sum(values: Tensor) -> Tensor:
    """(S, w) fp32 -> logarithms of its products up to each rank; as `running_sum`."""
    return _running_log_sum(values) if torch.compiler.is_compiling() else values.log().cumsum(-1)  # type: ignore[no-any-return]


@torch.library.custom_op("dllm::running_sum", mutates_args=())
def _running_sum(values: Tensor) -> Tensor:
    return values.cumsum(-1)


@torch.library.custom_op("dllm::running_log_sum", mutates_args=())
def _running_log_sum(values: Tensor) -> Tensor:
    return values.log().cumsum(-1)


@_running_sum.register_fake
@_running_log_sum.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)
