# SPDX-License-Identifier: Apache-2.0
"""`insert_verify`: the verify program by its definition, on packed and other projections, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import dllm_compile
from dllm_compile.costs import program_costs
from dllm_compile.passes.graph import operator_counts
from dllm_compile.runtime.row_programs import StepInputs, VerifyInputs
from tests.conftest import tiny_model
from tests.kernels.verify_cases import sees
from tests.reference.llada_rows import LladaRows
from tests.reference.stale_rows import dense_attention

MASK = 127
# Two samples, 12 rows each: context, candidates, and the positions of all.
LENGTHS, ROWS = (30, 17), 12
CONTEXT = ([3, 0, 11, 20], [2, 9])
CANDIDATES = ([25, 22, 28], [14])


def verify_inputs(shape, seed=0):
    """Random tokens, a random cache, and both passes' arguments; row kinds and positions for the reference."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS) + 1
    caches = {
        f"{kind}_cache_{i}": torch.randn(total, shape.kv_heads, shape.head_dim, generator=generator)
        for i in range(shape.layers)
        for kind in "kv"
    }
    tokens = torch.randint(0, 120, (sum(LENGTHS),), generator=generator)
    kinds, positions, ids, views, wanted, tiles = [], [], [], [], [], []
    hidden = torch.zeros(total, dtype=torch.bool)
    for i, (context, candidates) in enumerate(zip(CONTEXT, CANDIDATES, strict=True)):
        base, top = sum(LENGTHS[:i]), len(candidates) + 1
        first = len(kinds)
        kinds += [("context", 0)] * len(context)
        kinds += [("draft", j) for j in range(len(candidates))] + [("mask", j) for j in range(len(candidates))]
        positions += [*context, *candidates, *candidates]
        ids += [int(tokens[base + p]) for p in (*context, *candidates)] + [MASK] * len(candidates)
        views += [(0, 0, top)] * len(context)
        views += [(j + 1, j + 1, top) for j in range(len(candidates))] + [(j, 0, j + 1) for j in range(len(candidates))]
        wanted += [first + len(context) + len(candidates) + j for j in range(len(candidates))]
        hidden[[base + p for p in (*context, *candidates)]] = True
        padding = first + ROWS - len(kinds)
        kinds += [("padding", 0)] * padding
        positions, ids, views = positions + [0] * padding, ids + [5] * padding, views + [(-1, 0, 0)] * padding
        tiles.append((first, first + ROWS, base, base + LENGTHS[i]))
    inputs = StepInputs(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        tiles=torch.tensor(tiles, dtype=torch.int32),
        wanted=torch.tensor(wanted),
        banned=torch.tensor([-1]),
    )
    verify = VerifyInputs(
        caches=caches,
        views=torch.tensor(views, dtype=torch.int32),
        hidden=hidden,
        given=torch.randint(0, 120, (len(wanted),), generator=generator),
        own_rows=torch.arange(2 * ROWS),
        own=tuple(torch.zeros(2 * ROWS, shape.kv_heads, shape.head_dim) for _ in range(2)),
        tile_rows=ROWS,
    )
    return inputs, verify, kinds


def reference(model, inputs, verify, kinds):
    """Logits of every row, a row at a time over the list of keys that it sees."""
    layer = 0

    def attend(q, k, v):
        nonlocal layer
        keys, values = verify.caches[f"k_cache_{layer}"], verify.caches[f"v_cache_{layer}"]
        out = torch.zeros_like(q)
        for q_begin, q_end, k_begin, k_end in inputs.tiles.tolist():
            cached = [row for row in range(k_begin, k_end) if not verify.hidden[row]]
            for row in range(q_begin, q_end):
                own = [other for other in range(q_begin, q_end) if sees(kinds[row], kinds[other])]
                if own:
                    both = (torch.cat((old[cached], new[own])) for old, new in ((keys, k), (values, v)))
                    out[row] = dense_attention(q[row : row + 1], *both)[0]
        layer += 1
        return out

    rows = LladaRows(model)
    return rows.logits(rows.hidden(inputs.ids, inputs.positions, attend))


def check(fast, model, compiled=False):
    inputs, verify, kinds = verify_inputs(fast.programs.shape)
    before = {name: cache.clone() for name, cache in verify.caches.items()}
    token, confidence, probability = fast.programs.verify_step(inputs, verify)
    with torch.no_grad():
        z = reference(model, inputs, verify, kinds)[inputs.wanted].double()
    share = z.softmax(-1)
    expected = z.index_fill(1, torch.tensor([MASK]), -torch.inf).argmax(-1)
    assert token.tolist() == expected.tolist()
    torch.testing.assert_close(confidence.double(), share.gather(1, token[:, None]).squeeze(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        probability.double(), share.gather(1, verify.given[:, None]).squeeze(1), rtol=0, atol=1e-5
    )
    for name, cache in verify.caches.items():
        assert torch.equal(cache, before[name]), f"{name} was written"


@pytest.mark.parametrize("disable", [(), ("pack_qkv",)], ids=["packed", "apart"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_definition(kv_heads, disable):
    """T1 and T3 at depth three: an eager masked reference, and caches bit for bit as before."""
    model = tiny_model(seed=3, n_layers=3, n_kv_heads=kv_heads)
    check(dllm_compile.optimize(model, compile=False, disable=disable), model)


def test_equals_the_definition_in_one_layer_as_whole_sequences():
    """T1: with one layer and a cache filled by a dense forward each mask row is a full sequence of its own."""
    model = tiny_model(seed=5, n_layers=1)
    fast = dllm_compile.optimize(model, compile=False)
    length, context, candidates = 26, [24, 3, 10], [21, 19, 25, 20]
    generator = torch.Generator().manual_seed(1)
    canvas = torch.randint(0, 120, (length,), generator=generator)
    canvas[candidates] = MASK
    drafts = torch.randint(0, 120, (len(candidates),), generator=generator)
    rows, shape = LladaRows(model), fast.programs.shape
    caches = {}

    def attend(q, k, v):
        # Keys of layer 0 depend on token and position alone: these are never stale.
        caches["k_cache_0"], caches["v_cache_0"] = torch.cat((k, k[:1])), torch.cat((v, v[:1]))
        return dense_attention(q, k, v)

    n, size = len(candidates), 16
    with torch.no_grad():
        rows.hidden(canvas, torch.arange(length), attend)
        expected = []
        for i, position in enumerate(candidates):
            filled = canvas.clone()
            filled[candidates[:i]] = drafts[:i]
            expected.append(rows.forward(filled[None])[0, position].double().softmax(-1))
    padding = size - len(context) - 2 * n
    views = [(0, 0, n + 1)] * len(context) + [(-1, 0, 0)] * padding
    views += [(j + 1, j + 1, n + 1) for j in range(n)] + [(j, 0, j + 1) for j in range(n)]
    hidden = torch.zeros(length + 1, dtype=torch.bool)
    hidden[context + candidates] = True
    inputs = StepInputs(
        ids=torch.cat((canvas[context], torch.zeros(padding, dtype=torch.int64), drafts, torch.full((n,), MASK))),
        positions=torch.tensor([*context, *[0] * padding, *candidates, *candidates]),
        tiles=torch.tensor([[0, size, 0, length]], dtype=torch.int32),
        wanted=torch.arange(size - n, size),
        banned=torch.tensor([-1]),
    )
    own = tuple(torch.zeros(size, shape.kv_heads, shape.head_dim) for _ in range(2))
    verify = VerifyInputs(
        caches, torch.tensor(views, dtype=torch.int32), hidden, drafts, torch.arange(size), own, tile_rows=size
    )
    token, confidence, probability = fast.programs.verify_step(inputs, verify)
    for i, share in enumerate(expected):
        torch.testing.assert_close(probability[i].double(), share[drafts[i]], rtol=0, atol=1e-6)
        torch.testing.assert_close(confidence[i].double(), share[token[i]], rtol=0, atol=1e-6)
        assert token[i] == share.index_fill(0, torch.tensor([MASK]), -1).argmax()


@pytest.mark.slow
def test_compiled_program_copies_no_cache():
    """One program for all sizes, and generated code without a copy of cache size."""
    model = tiny_model(seed=3, n_layers=3)
    fast = dllm_compile.optimize(model, compile=True)
    fast.programs.verify_step(*verify_inputs(fast.programs.shape)[:2])
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(fast, model)
    inputs, verify, _ = verify_inputs(fast.programs.shape)
    _, sources = run_and_get_code(fast.programs.verify_step, inputs, verify)
    assert sources, "nothing was compiled"
    code = "\n".join(sources)
    assert "torch.ops.dllm.verify_attention.default(" in code
    assert "clone" not in code
    assert not [line for line in code.splitlines() if "copy_(" in line]


@pytest.mark.parametrize("disable", [(), ("pack_qkv",)], ids=["packed", "apart"])
def test_what_is_rewritten(disable):
    fast = dllm_compile.optimize(tiny_model(n_layers=3), compile=False, disable=disable)
    fast.programs.verify_step(*verify_inputs(fast.programs.shape)[:2])
    (program,) = (one for one in fast.programs.built if one.name == "verify_step")
    (result,) = (one for one in program.passes if one.name == "insert_verify")
    counts = operator_counts(program.gm)
    assert result.matches == 3
    assert counts["dllm.verify_attention"] == 3
    assert counts["dllm.head_verify"] == 1
    assert counts["dllm.row_attention"] == 0
    assert counts["dllm.qkv_rope_cache_write"] == (0 if disable else 3)
    caches = set(verify_inputs(fast.programs.shape)[1].caches)
    for node in program.gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for value, argument in zip(node.args, node.target._schema.arguments, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                assert not (written and value.target in caches)


def test_cost_of_attention_counts_own_rows_and_the_keys_of_the_tiles():
    fast = dllm_compile.optimize(tiny_model(n_layers=1), compile=False)
    shape = fast.programs.shape
    inputs, verify, _ = verify_inputs(shape)
    fast.programs.verify_step(inputs, verify)
    (program,) = (one for one in fast.programs.built if one.name == "verify_step")
    names = ("ids", "positions", "tiles", "wanted", "banned")
    given = {name: getattr(inputs, name) for name in names} | {
        name: getattr(verify, name) for name in ("views", "hidden")
    }
    given |= {"given": verify.given, "own_rows": verify.own_rows, "own_k": verify.own[0], "own_v": verify.own[1]}
    costs = program_costs(program.gm, given | dict(verify.caches))
    (cost,) = (one for one in costs if one.operator == "dllm.verify_attention")
    keys, width, own = sum(LENGTHS), shape.heads * shape.head_dim, 2 * ROWS
    assert cost.flops == 4 * width * ROWS * (keys + own)
    kv_width = shape.kv_heads * shape.head_dim
    assert cost.bytes == 4 * (2 * own * width + 2 * own * kv_width + 2 * keys * kv_width)
