# SPDX-License-Identifier: Apache-2.0
"""Editing graphs: what is inserted or copied calls what was meant, with all of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dllm_compile.passes.graph import aten, call, copy_region, find, remove_dead_code


def keywords(x: Tensor, y: Tensor) -> Tensor:
    """Calls whose meaning lies in keyword arguments."""
    summed = torch.add(x.to(torch.float64), y, alpha=3)
    return torch.div(summed, 2, rounding_mode="floor")


def test_a_copied_region_keeps_keyword_arguments():
    x, y, z = torch.arange(5.0), torch.ones(5), torch.full((5,), 7.0)
    gm = make_fx(keywords, tracing_mode="fake")(x, y)
    (quotient,) = find(gm, aten.div.Tensor_mode)
    _, of_y = (node for node in gm.graph.nodes if node.op == "placeholder")
    other = call(gm, aten.mul.Tensor, (of_y, 7), like=quotient)
    (again,) = copy_region(gm, [quotient], {of_y: other}, before=quotient)
    assert again.kwargs == quotient.kwargs
    quotient.replace_all_uses_with(again)
    remove_dead_code(gm)
    gm.recompile()
    assert torch.equal(gm(x, y), keywords(x, z))
    assert gm(x, y).dtype == again.meta["val"].dtype == torch.float64
