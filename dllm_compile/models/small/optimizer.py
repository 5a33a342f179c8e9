# SPDX-License-Identifier: Apache-2.0
"""Optimizer of the training script: orthogonalised momentum for the layers' matrices, AdamW for everything else.

Each matrix moves along the nearest (semi-)orthogonal matrix to its momentum, found by a Newton-Schulz iteration, scaled
so that an element's step has the size AdamW would give it. Matrices of one shape are stacked and treated in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Quintic iteration on the singular values; drives [0, 1] towards about 1 within five rounds.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_ADAM_RMS = 0.2  # root mean square of AdamW's steps in units of its learning rate


def orthogonalised(stack: Tensor) -> Tensor:
    """Nearly orthogonal matrices [n, rows, columns] with the singular vectors of those given; computed in bf16."""
    x = stack.to(torch.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(stack.dtype)


class MatrixMomentum(torch.optim.Optimizer):
    """Momentum with Nesterov's look-ahead, orthogonalised; decoupled weight decay. Matrices only."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        """`lr` is on AdamW's scale; all parameters must be 2-D."""
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in params:
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        groups = [{"params": members} for members in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter once."""
        for group in self.param_groups:
            members: list[Tensor] = group["params"]
            gradient = torch.stack([parameter.grad for parameter in members if parameter.grad is not None])
            state = self.state[members[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            state["momentum"].lerp_(gradient, 1 - group["momentum"])
            ahead = gradient.lerp_(state["momentum"], group["momentum"])
            scale = _ADAM_RMS * max(members[0].shape) ** 0.5
            update = orthogonalised(ahead) * (-group["lr"] * scale)
            torch._foreach_mul_(members, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(members, list(update.unbind(0)))
