# SPDX-License-Identifier: Apache-2.0
"""Logits are reduced to a token and its confidence as they are made.

    head(x, W, scale) -> output
    =>  head_confidence(x, W, scale, mask_id, banned, seeds, temperature) -> (token, confidence)

A commit rule reads two numbers a row, so no [rows, V] array of logits or probabilities is kept. Exact: one running
maximum and log-sum-exp instead of a softmax. A verify pass also asks for the probability of a given token:

    =>  head_verify(x, W, scale, mask_id, banned, given) -> (token, confidence, probability)
"""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import GraphModule, Node

from .framework import GraphPass, Level, Outcome
from .graph import call, fake_mode_of, find, output_node
from .inputs import add_input, symbolic


def fuse_head_confidence(gm: GraphModule, mask_token_id: int, sampled: bool, given: bool) -> Outcome:
    """Add inputs `banned [n]` (and, sampled, `seeds [W]` and `temperature []`) and return (token, confidence).

    With `given` tokens also adds `given [W]` and returns their probability as well.
    """
    outcome = Outcome()
    mode = fake_mode_of(gm)
    for head in find(gm, torch.ops.dllm.head.default):
        x = head.args[0]
        device = x.meta["val"].device  # type: ignore[union-attr]
        banned = add_input(gm, "banned", symbolic(mode, torch.zeros(3, dtype=torch.int64, device=device), 0))
        with mode:
            one_each = x.meta["val"].new_empty((x.meta["val"].shape[0],), dtype=torch.int64)  # type: ignore[union-attr]
            temperature = torch.empty((), dtype=torch.float32, device=device)
        operator, results = torch.ops.dllm.head_confidence.default, 2
        more: tuple[Node | None, ...] = (None, None)
        if sampled:
            more = (add_input(gm, "seeds", one_each), add_input(gm, "temperature", temperature))
        if given:
            operator, results, more = torch.ops.dllm.head_verify.default, 3, (add_input(gm, "given", one_each),)
        found = call(gm, operator, (*head.args, mask_token_id, banned, *more), like=head)
        output = output_node(gm)
        output.args = (tuple(call(gm, getitem, (found, i), like=head, before=output) for i in range(results)),)
        outcome.accept()
    return outcome


def fuse_head_confidence_pass(mask_token_id: int, sampled: bool, given: bool = False) -> GraphPass:
    """The pass for a model's mask id: greedy, sampled, or greedy with the probability of given tokens."""
    return GraphPass(
        "fuse_head_confidence",
        Level.EXACT,
        lambda gm: fuse_head_confidence(gm, mask_token_id, sampled, given),
        required=lambda layers: 1,
        saves="the [rows, V] arrays of logits and probabilities",
    )
