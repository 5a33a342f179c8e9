# SPDX-License-Identifier: Apache-2.0
"""`warm_up`, `free_buffers` and cancelling, as a user calls them on a machine without a card."""

from __future__ import annotations

import pytest
import torch

import dllm_compile
from dllm_compile._compat import can_compile
from dllm_compile.errors import ConfigError, PromptTooLongError, UnknownOptionError
from tests.conftest import tiny_model


@pytest.fixture(scope="module")
def fast() -> dllm_compile.OptimizedModel:
    return dllm_compile.optimize(tiny_model(), compile=False)


@pytest.mark.parametrize("cache", ["none", "dual", "flash", "lacache"])
def test_a_warm_up_builds_the_programs_and_changes_no_tokens(cache):
    fast = dllm_compile.optimize(tiny_model(), compile=False)
    options = {"cache": cache, "max_new_tokens": 12, "block_length": 6, "threshold": 0.5}
    done = fast.warm_up([3, 5], **options)
    built = [program.name for program in fast.programs.built]
    assert built
    assert done.graphs == 0
    assert "graphs captured" in str(done)
    warm = fast.generate([[3, 4, 5], [7, 8]], **options)
    assert [program.name for program in fast.programs.built] == built
    cold = dllm_compile.optimize(tiny_model(), compile=False).generate([[3, 4, 5], [7, 8]], **options)
    assert torch.equal(warm.sequences, cold.sequences)
    fast.free_buffers()


def test_a_bar_over_sizes_and_what_it_cost(fast, capsys):
    done = fast.warm_up([3, 5], progress=True, cache="dual", max_new_tokens=12, block_length=6)
    shown = capsys.readouterr().err
    assert "warming up" in shown
    assert "100%" in shown
    assert done.seconds > 0
    assert (done.graphs, done.capture_seconds, done.bytes) == (0, 0.0, 0)
    assert str(done) == f"0 graphs captured in 0.0 s, {done.seconds:.1f} s in all, 0.00 GiB reserved"
    fast.warm_up([3, 5], cache="dual", max_new_tokens=12, block_length=6)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
def test_nothing_is_compiled_after_a_warm_up():
    """Every way of decoding that it was told of, for other lengths and batches, and with a queue."""
    fast = dllm_compile.optimize(tiny_model(n_layers=3), compile=True)
    configs = [
        {"cache": "none", "threshold": 0.4},
        {"cache": "dual", "threshold": 0.4},
        {"cache": "lacache"},
        {"cache": "flash", "commit": "flash_verify", "threshold": 0.4, "gamma": 0.1, "window_length": 4},
    ]
    options = {"max_new_tokens": 12, "block_length": 6}
    for config in configs:
        fast.warm_up([3, 5], **config, **options)
    built = fast.programs.built
    assert all(program.compiled for program in built)
    with torch.compiler.set_stance("fail_on_recompile"):
        for config in configs:
            for lengths, slots in (((7, 2), None), ((1,), None), ((30, 4, 9, 2, 11), 2)):
                prompts = [torch.arange(3, 3 + length) for length in lengths]
                output = fast.generate(prompts, slots=slots, **config, **options)
                assert not (output.sequences == fast.facts.mask_token_id).any()
    assert fast.programs.built == built


def test_a_warm_up_refuses_what_generate_would(fast):
    with pytest.raises(PromptTooLongError):
        fast.warm_up([4000])
    with pytest.raises(UnknownOptionError):
        fast.warm_up([4], blocks=3)


def test_cancelled_between_steps(fast):
    answers = iter([False, True])
    output = fast.generate([[3, 4, 5]], max_new_tokens=8, eos="none", cancelled=lambda: next(answers))
    assert output.stats.forwards == 2
    assert int((output.sequences == fast.facts.mask_token_id).sum()) == 6


def test_graphs_need_a_card():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="CUDA"):
        dllm_compile.optimize(tiny_model(), cuda_graphs=True)


@pytest.mark.parametrize("options", [{"cuda_graphs": 1}, {"new_shapes": "maybe"}], ids=str)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        dllm_compile.CompileConfig(**options)
