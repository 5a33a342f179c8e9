# SPDX-License-Identifier: Apache-2.0
"""Logits are reduced to a token and its confidence as they are made.

    head(x, W, scale) -> output
    =>  head_confidence(x, W, scale, mask_id, banned, seeds, temperature) -> (token, confidence)

A commit rule reads two numbers a row, so no [rows, V] array of logits or probabilities is kept. Exact: one running
maximum and log-sum-exp instead of a softmax.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import GraphModule, Node

from .framework import GraphPass, Level, Outcome
from .graph import call, fake_mode_of, find, output_node
from .inputs import add_input, symbolic


def fuse_head_confidence(gm: GraphModule, mask_token_id: int, sampled: bool) -> Outcome:
    """Add inputs `banned [n]` (and, sampled, `seeds [W]` and `temperature []`) and return (token, confidence)."""
    outcome = Outcome()
    mode = fake_mode_of(gm)
    for head in find(gm, torch.ops.dllm.head.default):
        x = head.args[0]
        device = x.meta["val"].device  # type: ignore[union-attr]
        banned = add_input(gm, "banned", symbolic(mode, torch.zeros(3, dtype=torch.int64, device=device), 0))
        noise: tuple[Node | None, Node | None] = (None, None)
        if sampled:
            with mode:
                seeds = x.meta["val"].new_empty((x.meta["val"].shape[0],), dtype=torch.int64)  # type: ignore[union-attr]
                temperature = torch.empty((), dtype=torch.float32, device=device)
            noise = (add_input(gm, "seeds", seeds), add_input(gm, "temperature", temperature))
        operator = torch.ops.dllm.head_confidence.default
        both = call(gm, operator, (*head.args, mask_token_id, banned, *noise), like=head)
        output = output_node(gm)
        output.args = (tuple(call(gm, getitem, (both, i), like=head, before=output) for i in range(2)),)
        outcome.accept()
    return outcome


def fuse_head_confidence_pass(mask_token_id: int, sampled: bool) -> GraphPass:
    """The pass for a model's mask id, greedy or sampled."""
    return GraphPass(
        "fuse_head_confidence",
        Level.EXACT,
        lambda gm: fuse_head_confidence(gm, mask_token_id, sampled),
        required=lambda layers: 1,
        saves="the [rows, V] arrays of logits and probabilities",
    )
