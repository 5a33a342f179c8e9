# SPDX-License-Identifier: Apache-2.0
"""`bisect` finds nothing where nothing is wrong, and names the layer where a fault was planted."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
import torch
from torch import Tensor

import dllm_compile
from dllm_compile import CompileConfig, DecodingConfig
from dllm_compile.errors import ConfigError, PromptError
from dllm_compile.kernels import (
    add_rms_norm_quant,
    cached_attention,
    facache,
    qkv_rope_cache_write,
    rope,
    row_attention,
)
from dllm_compile.passes import pack_gate_up, quantize_ffn_fp8
from dllm_compile.runtime.cache import dual, lacache, row_subset
from tests.conftest import tiny_model
from tests.real import prompts_of

PLAIN = CompileConfig(compile=False)
SHORT = DecodingConfig(max_new_tokens=8, block_length=4)
FP8 = CompileConfig(compile=False, precision="fp8")
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def find(decoding: DecodingConfig, config: CompileConfig = PLAIN, **changes) -> dllm_compile.BisectResult:
    return dllm_compile.bisect(tiny_model(**changes), prompts_of(6)[0], config, decoding)


def wide_model() -> dict[str, int | float]:
    """Widths that groups of 128 divide, two groups each, so that a scale can be taken for another one's."""
    return {"d_model": 256, "mlp_hidden_size": 256, "init_std": 0.05}


# --- nothing is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decoding",
    [
        SHORT,
        SHORT.replace(cache="dual", threshold=0.5, suffix="window", suffix_window=4),
        SHORT.replace(cache="prefix", refresh_interval=3),
        SHORT.replace(cache="vicinity", warmup_steps=1),
        SHORT.replace(cache="dkv"),
        SHORT.replace(cache="lacache", temperature=0.5, cfg_scale=0.5),
        SHORT.replace(cache="lacache", lacache_layers="wide"),
        DecodingConfig(max_new_tokens=8, cache="flash", window_length=4, lookahead=1, track=2),
        DecodingConfig(max_new_tokens=8, cache="flash", window_length=4, commit="flash_verify", threshold=0.5),
    ],
    ids=lambda decoding: f"{decoding.cache}-{decoding.rule}",
)
def test_no_fault_where_there_is_none(decoding):
    result = find(decoding)
    assert result.fault is None, result
    names = [finding.layer for finding in result.findings]
    assert names[:3] == ["capture", "normalize_norm", "normalize_attention"]
    assert {"pack_qkv", "flatten_rows in forward", "fuse_head_confidence in step", "decode loop"} <= set(names)
    if decoding.cache not in ("none", "flash"):
        assert any(name.startswith(f"cache {decoding.cache}") for name in names)
    exact = [one for one in result.findings if one.changed is not None and not one.by_design]
    assert exact
    assert all(one.changed == 0 and one.tokens == 8 for one in exact)


def test_what_changes_tokens_by_design_is_said_and_is_no_fault():
    result = find(SHORT.replace(cache="dual"))
    assert result.fault is None
    assert result.first is not None
    assert result.first.layer == "cache dual, as configured"
    assert result.first.verdict == "by design"
    assert "first difference (by design): cache dual, as configured changes" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["first"] == "cache dual, as configured"


@needs_torchao
def test_fp8_is_within_its_bound():
    result = find(SHORT.replace(cache="dual"), FP8, **wide_model())
    assert result.fault is None, result
    quantized = next(one for one in result.findings if one.layer == "quantize_ffn_fp8")
    assert 1e-3 < quantized.error < quantized.bound
    assert "fuse_quantization in cached_step" in {one.layer for one in result.findings}


def test_bf16_tokens_may_round():
    """Random bf16 weights: the logits hold to what rounding explains; a token that flips is no fault."""
    model = tiny_model(dtype=torch.bfloat16)
    result = dllm_compile.bisect(model, prompts_of(6)[0], PLAIN, SHORT.replace(cache="lacache"))
    assert result.fault is None, result
    assert all(one.by_design for one in result.findings if one.changed is not None)


def test_disabled_passes_are_left_out():
    result = find(SHORT, PLAIN.replace(disable=("pack_qkv", "inline_references")))
    names = {finding.layer for finding in result.findings}
    assert "pack_gate_up" in names
    assert "pack_qkv" not in names
    assert not [name for name in names if name.startswith("inline_references")]


# --- five planted faults ---------------------------------------------------------------------------------------------


def assert_found(result: dllm_compile.BisectResult, layer: str) -> None:
    assert result.first is not None, result
    assert result.first.verdict == "FAULT"
    assert result.first.layer == layer, result
    assert result.findings[-1] is result.first, "nothing is compared above a fault"
    assert f"first fault: {layer}" in str(result)


def test_wrong_rope_offset_of_cached_keys(monkeypatch):
    """Keys alone are rotated one position too far where they are written to the cache."""
    right = rope.rope_reference

    def wrong(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int) -> Tensor:
        return right(x, cos, sin, positions + (heads == 2), heads)

    monkeypatch.setattr(qkv_rope_cache_write, "rope_reference", wrong)
    assert_found(find(SHORT.replace(cache="dual")), "insert_kv_cache in cached_step")


def test_wrong_rope_offset_everywhere(monkeypatch):
    """The pass's own certificate refuses the regions, and says by how much they differ."""
    right = rope.rope_reference
    monkeypatch.setattr(rope, "rope_reference", lambda x, cos, sin, p, heads: right(x, cos, sin, p + heads // 4, heads))
    result = find(SHORT)
    assert_found(result, "normalize_attention")
    assert "computes something else than rope and attention" in result.first.reason


def test_swapped_gate_and_up(monkeypatch):
    right = pack_gate_up.merge_linears
    monkeypatch.setattr(pack_gate_up, "merge_linears", lambda gm, linears, path: swapped(right, gm, linears, path))
    assert_found(find(SHORT), "pack_gate_up")


def swapped(right, gm, linears, path):
    """Gate and up exchange their halves of the packed product."""
    gate, up = linears
    (activation,) = gate.users
    activation.args = (up, gate)
    return right(gm, linears, path)


def test_stale_facache_of_a_policy(monkeypatch):
    """The state of the first block is used in the second: blocks do not make a sample due."""
    monkeypatch.setattr(lacache.LaCacheRule, "due", lambda self, moves, ended, state: torch.zeros_like(moves))
    assert_found(find(SHORT.replace(cache="lacache")), "cache lacache, layer 0")


def test_stale_facache_of_an_operator(monkeypatch):
    """`first` keeps nothing, so that `step` merges with what was there before."""
    right = facache.facache_first_reference

    def wrong(q, k, v, m, den, num, tiles, tile_rows):
        return right(q, k, v, m.clone(), den.clone(), num.clone(), tiles, tile_rows)

    original = lacache.allocate

    def cleared(*arguments):
        return {name: buffer.zero_() for name, buffer in original(*arguments).items()}

    monkeypatch.setattr(facache, "facache_first_reference", wrong)
    monkeypatch.setattr("dllm_compile.bisection.cases.allocate_state", cleared)
    assert_found(find(SHORT.replace(cache="lacache")), "insert_lacache_step in lacache_step")


@needs_torchao
def test_wrong_scale_layout_of_weights(monkeypatch):
    """Scales of the 128 x 128 blocks are stored by column of blocks."""
    right = quantize_ffn_fp8.quantize_weight

    def wrong(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
        codes, scales = right(weight, group)
        return codes, scales.flatten().view(scales.shape[::-1]).t().contiguous()

    monkeypatch.setattr(quantize_ffn_fp8, "quantize_weight", wrong)
    model = wide_model() | {"mlp_hidden_size": 512}
    uneven = tiny_model(**model)
    with torch.no_grad():
        for name, weight in uneven.named_parameters():
            if "ff_proj" in name or "up_proj" in name:
                weight[128:] *= 8  # blocks of very different sizes, as trained weights have
    result = dllm_compile.bisect(uneven, prompts_of(6)[0], FP8, SHORT)
    assert_found(result, "quantize_ffn_fp8")
    assert "dB of its output in FP8" in result.first.reason


@needs_torchao
def test_wrong_scale_layout_of_activations(monkeypatch):
    """The fused norm writes the scales of a row's two groups in the wrong order."""
    right = add_rms_norm_quant.add_rms_norm_quant_reference

    def wrong(*arguments):
        added, codes, scales = right(*arguments)
        return added, codes, scales.flip(1)

    monkeypatch.setattr(add_rms_norm_quant, "add_rms_norm_quant_reference", wrong)
    model = tiny_model(**wide_model())
    with torch.no_grad():
        model.model.transformer.blocks[1].ff_norm.weight[:128] *= 16
    result = dllm_compile.bisect(model, prompts_of(6)[0], FP8, SHORT)
    assert_found(result, "fuse_quantization in forward")


def test_off_by_one_key_range_of_an_operator(monkeypatch):
    right = row_attention.row_attention_reference

    def wrong(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
        return right(q, k, v, tiles - torch.tensor([0, 0, 0, 1], dtype=torch.int32), tile_rows)

    monkeypatch.setattr(row_attention, "row_attention_reference", wrong)
    assert_found(find(SHORT), "flatten_rows in forward")


def test_off_by_one_key_range_of_a_policy(monkeypatch):
    """Programs are right; the table that the cache policy makes ends one key too early."""
    right = row_subset.tiles_of
    monkeypatch.setattr(row_subset, "tiles_of", lambda picked, begin, end, rows: right(picked, begin, end - 1, rows))
    assert_found(find(SHORT.replace(cache="dual")), "cache dual, every row")


def test_off_by_one_key_range_of_the_cached_operator(monkeypatch):
    right = cached_attention.row_attention_reference

    def wrong(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_rows: int) -> Tensor:
        return right(q, k, v, tiles + torch.tensor([0, 0, 1, 0], dtype=torch.int32), tile_rows)

    monkeypatch.setattr(cached_attention, "row_attention_reference", wrong)
    assert_found(find(SHORT.replace(cache="prefix")), "insert_kv_cache in cached_step")


# --- more faults, and wrong use ---------------------------------------------------------------------------------------


def test_a_wrong_rule_of_a_policy_is_by_design_only(monkeypatch):
    """What a stale cache may differ by is no fault: the limit of what can be told from outside."""
    rows = dual.BlockRule.rows
    narrow = lambda rule, *arguments: rows(dataclasses.replace(rule, behind=-1), *arguments)  # noqa: E731
    monkeypatch.setattr(dual.BlockRule, "rows", narrow)
    result = find(SHORT.replace(cache="dual"))
    assert result.fault is None
    assert result.first.layer == "cache dual, as configured"


def test_an_operator_that_raises_is_named(monkeypatch):
    def wrong(*_):
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(qkv_rope_cache_write, "qkv_rope_cache_write_reference", wrong)
    result = find(SHORT.replace(cache="dual"))
    assert_found(result, "insert_kv_cache in cached_step")
    assert result.first.reason == "RuntimeError: no such kernel second line"


def test_go_on_after_a_fault(monkeypatch):
    monkeypatch.setattr(lacache.LaCacheRule, "due", lambda self, moves, ended, state: torch.zeros_like(moves))
    decoding = SHORT.replace(cache="lacache", threshold=0.5)
    result = dllm_compile.bisect(tiny_model(), prompts_of(6)[0], PLAIN, decoding, stop=False)
    assert result.fault.layer == "cache lacache, layer 0"
    assert result.findings[-1].layer == "commit threshold"


def test_a_model_without_row_programs_is_said():
    from tests.passes.pieces import Mini

    model = Mini(attend="causal")
    result = dllm_compile.bisect(model, torch.arange(5), PLAIN.replace(strict=False), SHORT)
    assert result.fault is None
    assert any("one by one" in reason for reason in result.skipped)


def test_an_optimized_model_and_a_string(small_tokenizer):
    fast = dllm_compile.optimize(dllm_compile.models.load_small(), PLAIN)
    text = "Tom has 3 pens. Tom buys 4 more. How many pens does Tom have now?"
    result = dllm_compile.bisect(fast, text, decoding=SHORT, tokenizer=small_tokenizer, threshold=0.9)
    assert result.fault is None, result
    assert result.findings[-1].layer == "commit threshold"
    ids = small_tokenizer(text)["input_ids"]
    assert fast.generate([ids], SHORT).sequences.shape == (1, len(ids) + 8), "it is as usable as before"


def test_wrong_use_is_refused():
    model = tiny_model()
    with pytest.raises(PromptError, match="one prompt, not 2"):
        dllm_compile.bisect(model, prompts_of(3, 4), PLAIN, SHORT)
    with pytest.raises(ConfigError, match="disable names flatten_rows"):
        dllm_compile.bisect(model, [1, 2], PLAIN.replace(disable="flatten_rows"), SHORT)
    with pytest.raises(ConfigError, match="no option 'blocks'|no option blocks"):
        dllm_compile.bisect(model, [1, 2], PLAIN, SHORT, blocks=3)


def test_progress_names_each_layer(capsys):
    dllm_compile.bisect(tiny_model(), [1, 2, 3], PLAIN, SHORT, progress=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "comparing eager model"
    assert "comparing fuse_head_confidence in step" in shown


@pytest.mark.slow
@pytest.mark.skipif(not dllm_compile._compat.has_cxx_compiler(), reason="needs a C++ compiler")
def test_compiled_code(monkeypatch):
    """Right code is found right; code that was made of something else is found."""
    from dllm_compile.runtime import programs

    result = find(SHORT, CompileConfig(compile=True))
    assert result.fault is None, result
    assert {"torch.compile of step", "torch.compile of forward", "decode loop, compiled"} <= {
        finding.layer for finding in result.findings
    }
    right = programs.compile_program

    def wrong(gm, device):
        run, graphs = right(gm, device)

        def moved(**inputs):
            return run(**{**inputs, "positions": inputs["positions"] ** 2 % 7})

        return moved, graphs

    monkeypatch.setattr(programs, "compile_program", wrong)
    assert_found(find(SHORT, CompileConfig(compile=True)), "torch.compile of forward")
