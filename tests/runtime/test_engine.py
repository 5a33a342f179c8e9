# SPDX-License-Identifier: Apache-2.0
"""What the loop promises whatever the rule: batches, looks of the host, counts, seeds, no read inside a step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError, DllmCompileError, PromptError, PromptTooLongError
from dllm_compile.runtime.cache.uncached import Uncached
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.layout import Layout, Sample, tile_table
from dllm_compile.runtime.state import CanvasState
from dllm_compile.runtime.step import StepConstants, decode_step

from .tiny import EOS, FACTS, MASK, DensePrograms, FlatPrograms, ScriptedPrograms, TinyModel, canvases, prompts_of

CONFIGS = {
    "quota": DecodingConfig(max_new_tokens=18, block_length=8),
    "threshold": DecodingConfig(max_new_tokens=18, block_length=8, threshold=0.5),
    "factor, sampled": DecodingConfig(max_new_tokens=18, block_length=4, factor=1.0, temperature=0.8, seed=3),
    "frechet, first": DecodingConfig(max_new_tokens=18, block_length=8, frechet_margin=0.1, eos="first"),
    "random, guided": DecodingConfig(max_new_tokens=10, block_length=5, remasking="random", cfg_scale=0.5, steps=6),
    "eos last": DecodingConfig(max_new_tokens=18, block_length=6, threshold=0.4, confidence_eos_eot_inf=True),
}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(seed=2, eos_bias=3.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_sixteen_together_equal_sixteen_alone(model, name):
    """G4 and counters (section 23, T3): tokens, forwards and work do not depend on the batch."""
    config = CONFIGS[name]
    prompts = prompts_of(*(1 + 5 * i % 13 for i in range(16)), seed=3)
    together = decode(DensePrograms(model), FACTS, prompts, config)
    rows = canvases(together, prompts, config)
    alone = [
        decode(DensePrograms(model), FACTS, [prompt], config.replace(seed=config.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    assert rows == [one.sequences[0].tolist() for one in alone]
    assert torch.equal(together.tokens_per_forward, torch.cat([one.tokens_per_forward for one in alone]))
    stats = [one.stats for one in alone]
    assert together.stats.forwards_per_row == tuple(one.forwards for one in stats)
    assert together.stats.answer_tokens == sum(one.answer_tokens for one in stats)
    assert together.stats.canvas_tokens == sum(one.canvas_tokens for one in stats)
    assert together.stats.row_forwards == sum(one.row_forwards for one in stats)
    assert together.stats.forwards == max(one.forwards for one in stats)
    assert len(set(together.stats.forwards_per_row)) > 1 or name in ("quota", "random, guided")


def test_order_of_the_prompts_is_kept(model):
    prompts = prompts_of(9, 2, 5, 7, seed=4)
    config = CONFIGS["threshold"]
    rows = canvases(decode(DensePrograms(model), FACTS, prompts, config), prompts, config)
    swapped = canvases(decode(DensePrograms(model), FACTS, prompts[::-1], config), prompts[::-1], config)
    assert rows == swapped[::-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_looks_of_the_host_do_not_change_tokens(model, name):
    """G8: k steps between two looks; finished samples idle until the next one."""
    prompts = prompts_of(3, 9, 1, 6, seed=5)
    outputs = {k: decode(DensePrograms(model), FACTS, prompts, CONFIGS[name].replace(check_every=k)) for k in (1, 3, 8)}
    for k, output in outputs.items():
        assert torch.equal(output.sequences, outputs[1].sequences)
        assert output.stats.forwards_per_row == outputs[1].stats.forwards_per_row
        assert outputs[1].stats.forwards <= output.stats.forwards < outputs[1].stats.forwards + 2 * k
        assert output.stats.row_forwards >= outputs[1].stats.row_forwards


def test_idle_forwards_are_counted(model):
    """A block a step, and a look after eight: five of them find nothing left to do."""
    config = DecodingConfig(max_new_tokens=9, block_length=3, check_every=8, eos="none", threshold=0.0)
    programs = DensePrograms(model)
    output = decode(programs, FACTS, prompts_of(4), config)
    assert output.stats.forwards_per_row == (3,)
    assert output.stats.forwards == len(programs.calls) == 8
    assert output.stats.row_forwards == 8 * 13


def test_no_more_steps_than_masks(model):
    """With one token a step nothing is idle, however seldom the host looks."""
    config = DecodingConfig(max_new_tokens=9, block_length=3, check_every=8, eos="none")
    assert decode(DensePrograms(model), FACTS, prompts_of(4), config).stats.forwards == 9


@pytest.mark.parametrize("name", CONFIGS)
def test_committed_tokens_never_change(model, name):
    """G6 and G7: prompts stay, each forward of a row adds a token, and what was added stays."""
    programs = DensePrograms(model)
    prompt = prompts_of(6, seed=6)[0]
    config = CONFIGS[name]
    output = decode(programs, FACTS, [prompt], config)
    trace = [ids[: 6 + config.max_new_tokens] for ids in programs.ids] + [output.sequences[0]]
    for before, after in itertools.pairwise(trace):
        known = before != MASK
        assert torch.equal(before[known], after[known])
        assert (after != MASK).sum() > known.sum()
        assert torch.equal(after[:6], prompt)
    assert not (output.sequences == MASK).any()
    assert output.stats.forwards_per_row[0] <= config.max_new_tokens * (2 if config.cfg_scale else 1)


def test_one_token_a_step_needs_as_many_forwards_as_tokens(model):
    for block_length in (1, 5, 32):
        config = DecodingConfig(max_new_tokens=17, block_length=block_length, eos="none")
        output = decode(DensePrograms(model), FACTS, prompts_of(3, 8), config)
        assert output.stats.forwards_per_row == (17, 17)
        assert output.stats.forwards == 17


def test_threshold_above_one_equals_one_token_a_step(model):
    """Section 3, T3."""
    prompts = prompts_of(3, 8, seed=1)
    base = DecodingConfig(max_new_tokens=17, block_length=8)
    one = decode(DensePrograms(model), FACTS, prompts, base)
    never = decode(DensePrograms(model), FACTS, prompts, base.replace(threshold=1.5))
    assert torch.equal(one.sequences, never.sequences)
    assert one.stats.forwards_per_row == never.stats.forwards_per_row


def test_rows_of_each_forward(model):
    """G3: finished samples leave the axis; every step wants one block of each sample."""
    programs = DensePrograms(model)
    config = CONFIGS["threshold"]
    output = decode(programs, FACTS, prompts_of(3, 9, 1, seed=5), config)
    rows = [len(ids) for ids in programs.ids]
    assert rows[0] == 3 + 9 + 1 + 3 * 18
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]
    assert sum(rows) == output.stats.row_forwards
    for call in programs.calls:
        assert len(call.wanted) == 8 * len(call.tiles)


def test_guided_rows(model):
    """The second half repeats the first with the given prompt masked, and nothing else."""
    programs = DensePrograms(model)
    prompts = prompts_of(4, 6, seed=5)
    prompts[1][2] = MASK
    config = DecodingConfig(max_new_tokens=6, block_length=3, cfg_scale=1.0, infill=True, eos="none")
    output = decode(programs, FACTS, prompts, config)
    for call, ids in zip(programs.calls, programs.ids, strict=True):
        half = len(ids) // 2
        assert torch.equal(call.unconditional, call.wanted + half)
        assert torch.equal(call.positions[:half], call.positions[half:])
        first, second = ids[:half], ids[half:]
        if half == 22:
            assert (second[:4] == MASK).all()
            assert torch.equal(second[4:10], first[4:10])
            assert (second[[10, 11, 13, 14, 15]] == MASK).all()
            assert second[12] == first[12], "what was filled into the prompt is seen by both halves"
    assert output.stats.row_forwards == sum(len(ids) for ids in programs.ids)


# --- noise -------------------------------------------------------------------------------------------------------


def test_seeds(model):
    """G10: same seed, same tokens; sample i has seed + i; the global generator is neither used nor moved."""
    prompts = [prompts_of(5, seed=7)[0]] * 3
    config = DecodingConfig(max_new_tokens=16, block_length=8, temperature=1.0, seed=20, eos="none")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = decode(DensePrograms(model), FACTS, prompts, config)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    again = decode(DensePrograms(model), FACTS, prompts, config)
    assert torch.equal(first.sequences, again.sequences)
    assert len({tuple(row.tolist()) for row in first.sequences}) == 3, "equal prompts get samples of their own"
    later = decode(DensePrograms(model), FACTS, prompts, config.replace(seed=21))
    assert torch.equal(first.sequences[1:], later.sequences[:2])
    huge = decode(DensePrograms(model), FACTS, prompts, config.replace(seed=20 + 2**80))
    assert torch.equal(first.sequences, huge.sequences), "the low 32 bits count"


def test_two_threads_and_two_models_do_not_disturb_each_other():
    """G10."""
    models = [TinyModel(seed=i, eos_bias=2.0) for i in (1, 2)]
    config = DecodingConfig(max_new_tokens=20, block_length=8, temperature=0.7, factor=1.0)
    prompts = prompts_of(4, 9, seed=8)

    def run(model: TinyModel) -> torch.Tensor:
        return decode(DensePrograms(model), FACTS, prompts, config).sequences

    alone = [run(model) for model in models]
    got: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    threads = [threading.Thread(target=lambda i=i: got[i].extend(run(models[i]) for _ in range(5))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(got[i]) == 5
        assert all(torch.equal(one, alone[i]) for one in got[i])


# --- the device side -------------------------------------------------------------------------------------------------


class _NoHostRead(TorchDispatchMode):
    """Refuses what reads a value on the host or gives a shape that depends on data."""

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "item", "equal"}, (
            name
        )
        if name in {"index", "index_put", "index_put_"}:
            assert all(one is None or one.dtype != torch.bool for one in args[1]), "boolean-mask indexing"
        return func(*args, **(kwargs or {}))


def test_the_dispatch_guard_works():
    x = torch.arange(4)
    for read in (lambda: x[x > 1], lambda: bool(x.sum() > 1), lambda: x.sum().item()):
        with pytest.raises(AssertionError), _NoHostRead():
            read()


@pytest.mark.parametrize("eos", ["block", "first", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 6},
        {"threshold": 0.5},
        {"factor": 1.0, "last_rank": "released"},
        {"frechet_margin": 0.2},
        {"temperature": 0.5, "cfg_scale": 1.0},
        {"remasking": "random"},
        {"confidence_eos_eot_inf": True},
    ],
    ids=str,
)
def test_a_step_reads_nothing_on_the_host(eos, options):
    """G8: only tensor operations with static shapes, on buffers that stay where they are."""
    config = DecodingConfig(max_new_tokens=9, block_length=4, eos=eos, infill=True, **options)
    prompts = prompts_of(3, 5, seed=9)
    prompts[0][1] = MASK
    tokens = [7, 3, 9, 11, EOS, 5, 6, 2, EOS, 4, 8, 12, 13, 14]
    programs = ScriptedPrograms(tokens, [0.1 * (i * 7 % 10) for i in range(14)])
    constants, cache = StepConstants.of(config, FACTS, programs.device), Uncached(programs)
    samples = [Sample.plan(i, prompt, config, MASK) for i, prompt in enumerate(prompts)]
    layout = Layout.of(samples, mask_token_id=MASK, tile_rows=None, guided=config.cfg_scale > 0, device=programs.device)
    state = CanvasState.begin(layout, layout.initial_tokens(MASK))
    addresses = [getattr(state, name).data_ptr() for name in CanvasState.__dataclass_fields__]
    with _NoHostRead():
        for _ in range(12):
            decode_step(cache, constants, layout, state)
    assert addresses == [getattr(state, name).data_ptr() for name in CanvasState.__dataclass_fields__]
    assert state.done.all()
    finished = state.tokens[:-1].clone()
    expected = decode(ScriptedPrograms(tokens, programs.confidence.tolist()), FACTS, prompts, config)
    assert finished.tolist() == list(itertools.chain(*canvases(expected, prompts, config)))
    decode_step(cache, constants, layout, state)
    assert torch.equal(finished, state.tokens[:-1]), "samples that are done stay as they are"


@pytest.mark.parametrize("tile_rows", [None, 1, 3, 64])
def test_tiles_cover_every_row_once(tile_rows):
    lengths = torch.tensor([5, 1, 12, 64, 3])
    tiles = tile_table(lengths, tile_rows)
    assert tiles.dtype == torch.int32
    rows = [(row, k_begin, k_end) for q_begin, q_end, k_begin, k_end in tiles.tolist() for row in range(q_begin, q_end)]
    starts = (lengths.cumsum(0) - lengths).tolist()
    expected = [
        (row, start, start + n)
        for start, n in zip(starts, lengths.tolist(), strict=True)
        for row in range(start, start + n)
    ]
    assert rows == expected
    widths = tiles[:, 1] - tiles[:, 0]
    assert (widths > 0).all()
    assert tile_rows is None or (widths <= tile_rows).all()


# --- results and refusals --------------------------------------------------------------------------------------------


def test_results_can_be_trained_on(model):
    """Not inference tensors: they may be saved for a backward pass."""
    output = decode(DensePrograms(model), FACTS, prompts_of(3), CONFIGS["quota"])
    assert not output.sequences.is_inference()
    weight = torch.ones(40, 2, requires_grad=True)
    torch.nn.functional.embedding(output.sequences, weight).sum().backward()
    assert weight.grad is not None


def test_prompts_are_not_changed(model):
    prompts = prompts_of(4, 5)
    copies = [prompt.clone() for prompt in prompts]
    decode(DensePrograms(model), FACTS, prompts, CONFIGS["quota"])
    assert all(torch.equal(a, b) for a, b in zip(prompts, copies, strict=True))


def test_refusals_come_before_any_work(model):
    programs = DensePrograms(model)
    config = CONFIGS["quota"]
    with pytest.raises(PromptTooLongError):
        decode(programs, FACTS, prompts_of(3, 90), config)
    with pytest.raises(PromptError, match="no prompts"):
        decode(programs, FACTS, [], config)
    with pytest.raises(ConfigError, match="vocabulary"):
        decode(programs, FACTS, prompts_of(3), config.replace(eos_token_id=40))
    with pytest.raises(ConfigError, match="mask token"):
        decode(programs, FACTS, prompts_of(3), config.replace(eos_token_id=(EOS, MASK)))
    assert programs.calls == []


def test_a_model_that_proposes_masks_is_named_and_does_not_loop():
    programs = ScriptedPrograms([MASK] * 12, [0.5] * 12)
    with pytest.raises(DllmCompileError, match="does not advance"):
        decode(programs, FACTS, prompts_of(4), DecodingConfig(max_new_tokens=8, block_length=4))
    assert programs.steps == 1


@pytest.mark.parametrize("options", [{}, {"threshold": 0.5}, {"remasking": "random"}], ids=str)
def test_logits_that_are_not_finite_are_named_and_not_committed(options):
    programs = ScriptedPrograms([3] * 12, [float("nan")] * 12)
    with pytest.raises(DllmCompileError, match="NaN"):
        decode(programs, FACTS, prompts_of(4), DecodingConfig(max_new_tokens=8, block_length=4, **options))


def test_progress_bar_counts_tokens(model, capsys):
    config = CONFIGS["threshold"]
    decode(DensePrograms(model), FACTS, prompts_of(4, 7), config, progress=True)
    assert "36/36" in capsys.readouterr().err
    decode(DensePrograms(model), FACTS, prompts_of(4), config)
    assert capsys.readouterr().err == ""


def test_flat_programs_agree_with_dense_ones_in_a_batch():
    """Two independent ways of computing rows give the same tokens in fp64."""
    model = TinyModel(seed=4, dtype=torch.float64, eos_bias=2.0)
    prompts = prompts_of(8, 3, 10, 1, 6, seed=2)
    for config in CONFIGS.values():
        dense = decode(DensePrograms(model), FACTS, prompts, config)
        flat = decode(FlatPrograms(model, tile_rows=4), FACTS, prompts, config)
        assert torch.equal(dense.sequences, flat.sequences)
