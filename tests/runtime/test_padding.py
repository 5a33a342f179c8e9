# SPDX-License-Identifier: Apache-2.0
"""Sizes 0 and 1 become 2, and what is added changes nothing."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile.passes.insert_kv_cache import cache_names
from dllm_compile.runtime.padding import at_least_two
from dllm_compile.runtime.row_programs import CacheInputs, StepInputs
from tests.conftest import tiny_model


def test_tables_gain_entries_that_do_nothing():
    inputs = {
        "ids": torch.arange(5),
        "wanted": torch.tensor([3]),
        "unconditional": torch.zeros(0, dtype=torch.int64),
        "tiles": torch.tensor([[0, 5, 0, 5]], dtype=torch.int32),
        "block_tiles": torch.tensor([[0, 5, 0, 5, 1, 2]], dtype=torch.int32),
        "banned": torch.tensor([7]),
        "window": torch.tensor([[4]]),
        "spans": torch.tensor([[0, 5]], dtype=torch.int32),
        "temperature": torch.tensor(0.5),
    }
    out = at_least_two(inputs)
    assert out["ids"] is inputs["ids"]
    assert out["temperature"] is inputs["temperature"]
    assert out["wanted"].tolist() == [3, 3]
    assert out["unconditional"].tolist() == [0, 0]
    assert out["tiles"].tolist() == [[0, 5, 0, 5], [5, 5, 5, 5]]
    assert out["block_tiles"].tolist() == [[0, 5, 0, 5, 1, 2], [5] * 6]
    assert out["banned"].tolist() == [7, -1]
    assert out["window"].tolist() == [[4, -1], [-1, -1]]
    assert out["spans"].tolist() == [[0, 5], [0, 0]]
    assert all(out[name].dtype == value.dtype for name, value in inputs.items())


def test_a_second_row_sees_what_the_first_sees():
    tiles = torch.tensor([[0, 1, 20, 29], [1, 1, 0, 0]], dtype=torch.int32)
    out = at_least_two({"ids": torch.tensor([5]), "cache_rows": torch.tensor([22]), "tiles": tiles})
    assert out["ids"].tolist() == [5, 5]
    assert out["cache_rows"].tolist() == [22, 22]
    assert out["tiles"].tolist() == [[0, 1, 20, 29], [1, 1, 0, 0], [1, 2, 20, 29], [2, 2, 0, 0]]


@pytest.mark.parametrize("name", ["k_cache_0", "scores", "num_0"])
def test_a_buffer_is_never_copied(name):
    with pytest.raises(ValueError, match="two or more"):
        at_least_two({"ids": torch.arange(5), name: torch.zeros(1, 2)})


def test_one_row_writes_to_the_caches_what_it_writes_unpadded():
    """Every layer: from the second on, a row that saw other keys would write something else to the same place."""
    programs = dllm_compile.optimize(tiny_model(), compile=False).programs
    shape = programs.shape
    size = (9, shape.kv_heads, shape.head_dim)
    generator = torch.Generator().manual_seed(1)
    filled = {name: torch.randn(size, generator=generator) for name in cache_names(shape.layers)}
    inputs = StepInputs(
        ids=torch.tensor([5]),
        positions=torch.tensor([3]),
        tiles=torch.tensor([[0, 1, 0, 8], [1, 1, 0, 0]], dtype=torch.int32),
        wanted=torch.tensor([0]),
        banned=torch.tensor([-1]),
    )
    padded, plain = ({name: cache.clone() for name, cache in filled.items()} for _ in range(2))
    rows = torch.tensor([3])
    token, confidence = programs.cached_step(inputs, CacheInputs(padded, rows))
    (program,) = programs.built
    given = {name: value for name, value in vars(inputs).items() if value is not None}
    expected_token, expected_confidence = program.gm(**given, **plain, cache_rows=rows)
    assert torch.equal(token, expected_token)
    torch.testing.assert_close(confidence, expected_confidence)
    for name, cache in padded.items():
        torch.testing.assert_close(cache, plain[name], msg=name)
        assert not torch.equal(cache[3], filled[name][3])
