# SPDX-License-Identifier: Apache-2.0
"""Searching sorted boundaries: counted one by one, views included, and never left to a code generator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dllm_compile
from dllm_compile._compat import generated_sources
from dllm_compile.kernels.upper_bound import upper_bound

RUNNING = torch.tensor([0, 0, 1, 1, 2, 3, 3])
CASES = {
    "a view": (RUNNING[1:], torch.arange(5)),
    "values in two dimensions": (RUNNING[1:], torch.arange(6).view(2, 3)),
    "rows": (torch.tensor([[0, 1, 1, 4], [2, 2, 3, 3]]), torch.tensor([[0, 1, 9], [2, 1, 3]])),
    "columns of a table": (torch.tensor([[0, 9], [1, 9], [2, 9]])[:, 0], torch.tensor([1])),
}


def counted(boundaries: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if boundaries.dim() == 1:
        return torch.tensor([int((boundaries <= value).sum()) for value in values.flatten()]).view(values.shape)
    return torch.stack([counted(*pair) for pair in zip(boundaries, values, strict=True)])


@pytest.mark.parametrize("case", CASES)
def test_counts_boundaries(case: str):
    assert torch.equal(upper_bound(*CASES[case]), counted(*CASES[case]))
    torch.library.opcheck(torch.ops.dllm.upper_bound.default, CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_compiled_code_calls_the_operator(case: str):
    boundaries, values = CASES[case]
    whole = torch.cat((boundaries[:1] - 1, boundaries))
    with generated_sources() as sources:
        found = torch.compile(lambda whole, values: upper_bound(whole[1:], values + 0), dynamic=True)(whole, values)
    assert torch.equal(found, counted(boundaries, values))
    assert any("dllm.upper_bound" in source for source in sources)


def test_nothing_else_searches():
    """A search anywhere else may be compiled, and then reads its boundaries from the wrong place (torch 2.11, CUDA)."""
    package = Path(dllm_compile.__file__).parent
    callers = [
        path.name
        for path in package.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in ("searchsorted(", "bucketize("))
    ]
    assert callers == ["upper_bound.py"]
