# SPDX-License-Identifier: Apache-2.0
"""Dumped graphs are modules that run: they give what the programs give, on the inputs recorded beside them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import dllm_compile
from dllm_compile import DecodingConfig, api
from dllm_compile.errors import CheckpointError, MissingPackageError
from dllm_compile.inspection import decompiled, dump, examples
from dllm_compile.inspection.dumped import recorded_outputs, tensors_of
from dllm_compile.passes import FUSE, NORMALIZE
from tests.conftest import tiny_model
from tests.passes.pieces import Mini
from tests.real import prompts_of

SHORT = DecodingConfig(max_new_tokens=6, block_length=3)
# Every kind of program: caches, LaCache's two, a scored step, a verify pass, sampled and guided steps.
KINDS = (
    SHORT,
    SHORT.replace(cache="dual"),
    SHORT.replace(cache="lacache"),
    DecodingConfig(max_new_tokens=6, cache="flash", window_length=4, commit="flash_verify", threshold=0.5),
    SHORT.replace(cache="dual", temperature=0.5, cfg_scale=1.0),
)


def load_module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs_of(module, inputs) -> list[torch.Tensor]:
    out = module.forward(**inputs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


@pytest.fixture(scope="module")
def fast():
    fast = dllm_compile.optimize(tiny_model(), compile=False)
    for config in KINDS:
        fast.generate(prompts_of(4, 2), config)
    return fast


@pytest.fixture(scope="module")
def folder(fast, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump") / "new" / "folder"
    fast.dump_graphs(folder)
    return folder


def test_files_are_numbered_in_the_order_of_the_passes(fast, folder):
    files = sorted(folder.glob("graph_*.py"))
    labels = [re.match(r"# (\S+): \d+ calls", file.read_text(encoding="utf-8")).group(1) for file in files]
    assert [file.name[:9] for file in files] == [f"graph_{i:02d}_" for i in range(len(files))]
    assert labels[:8] == ["captured", *(one.name for one in (*NORMALIZE, *FUSE))]
    assert {"step.flatten_rows", "step.fuse_head_confidence", "verify_step.insert_verify"} <= set(labels)
    assert {path.stem for path in folder.glob("program_*.py")} == {
        "program_" + program.name.replace("-", "_") for program in fast.programs.built
    }
    assert [path.name for path in fast.dump_graphs(folder)[:2]] == ["index.html", "graph_00_captured.py"]


def test_captured_and_canonical(folder):
    captured = (folder / "graph_00_captured.py").read_text(encoding="utf-8")
    last = (folder / "graph_07_pack_gate_up.py").read_text(encoding="utf-8")
    assert "torch.ops.aten.scaled_dot_product_attention.default(" in captured
    assert "torch.ops.dllm.attention.default(" not in captured
    assert "torch.ops.dllm.attention.default(" in last
    assert "scaled_dot_product_attention" not in last
    assert "# f32[64, 64][64, 1]" in captured, "dtypes, sizes and strides are shown"
    assert "    # --- transformer.blocks.1.ff_out\n" in last, "and modules"


def test_every_program_reproduces_its_outputs(fast, folder):
    """By the recorded file, and against the program itself with what it writes in place."""
    for program in fast.programs.built:
        path = folder / f"program_{program.name.replace('-', '_')}.py"
        module = load_module(path)
        expected, actual = recorded_outputs(folder, path.stem), outputs_of(module, module.example())
        assert len(expected) == len(actual) > 0
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)), program.name
        assert all(value.isfinite().all() for value in actual)
        own, theirs = module.example(), module.example()
        again, mine = outputs_of(module, own), program(**theirs)
        for a, b in zip(again, [mine] if isinstance(mine, torch.Tensor) else mine, strict=True):
            assert torch.equal(a, b), program.name
        assert all(torch.equal(own[name], theirs[name]) for name in own), f"{program.name}: what is written in place"


def test_every_stage_runs(folder):
    """Rewrites of the canonical graph keep its logits; of a program the stages lead to what it returns."""
    for path in sorted(folder.glob("graph_*.py")):
        module = load_module(path)
        example = re.search(r"recorded\(__file__, '(\w+)'", path.read_text(encoding="utf-8")).group(1)
        actual, expected = outputs_of(module, module.example()), recorded_outputs(folder, example)
        if example == "graph":
            torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
        else:
            assert actual[0].isfinite().all(), path.name


def test_weights_of_another_model(fast, folder, tmp_path):
    """`load` takes an optimized model, or tensors by name, in place of the file."""
    other = dllm_compile.optimize(tiny_model(seed=5), compile=False)
    module = load_module(folder / "program_forward.py")
    recorded = outputs_of(module, module.example())[0]
    module.load(other)
    assert not torch.allclose(outputs_of(module, module.example())[0], recorded)
    expected = other.programs.forward_program()(**module.example())
    assert torch.equal(outputs_of(module, module.example())[0], expected)
    module.load(tensors_of(fast))
    assert torch.equal(outputs_of(module, module.example())[0], recorded)
    with pytest.raises(CheckpointError, match=r"\d+ weights are missing"):
        module.load({"rope_cos": torch.zeros(1)})


def test_large_weights_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "MOST_WEIGHTS", 1000)
    fast = dllm_compile.optimize(tiny_model(n_layers=1), compile=False)
    fast.dump_graphs(tmp_path)
    assert not (tmp_path / "weights.safetensors").exists()
    assert "are not written: load(fast)" in (tmp_path / "index.html").read_text(encoding="utf-8")
    module = load_module(tmp_path / "program_forward.py")
    with pytest.raises(CheckpointError, match=r"call load\(fast\) or load\(mapping\)"):
        module.forward(**module.example())
    module.load(fast)
    assert torch.equal(outputs_of(module, module.example())[0], recorded_outputs(tmp_path, "program_forward")[0])


def test_an_input_nobody_knows_costs_its_example_only(tmp_path, monkeypatch):
    fast = dllm_compile.optimize(tiny_model(n_layers=1), compile=False)
    monkeypatch.setattr(examples._Maker, "_block_tiles", None, raising=False)
    original = examples.example_inputs

    def refuse(gm, *arguments, **options):
        if "tiles" in {node.name for node in gm.graph.nodes}:
            raise KeyError("no example is known for the input tiles")
        return original(gm, *arguments, **options)

    monkeypatch.setattr(dump, "example_inputs", refuse)
    fast.dump_graphs(tmp_path)
    assert "def example(" not in (tmp_path / "program_forward.py").read_text(encoding="utf-8")
    assert "no example is known for the input tiles" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_model_without_row_programs(tmp_path):
    fast = dllm_compile.optimize(Mini(attend="causal"), strict=False, compile=False)
    files = fast.dump_graphs(tmp_path)
    assert files[0].name == "index.html"
    assert "left as it was - normalize_attention" in files[0].read_text(encoding="utf-8")
    module = load_module(files[1])
    assert outputs_of(module, module.example())[0].isfinite().all()


# --- the page -------------------------------------------------------------------------------------------------------

VOID = {"meta", "link", "rect", "path", "br"}


class Page(HTMLParser):
    """Checks that every element is closed, and collects what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.references += [value for name, value in attributes if name in ("href", "src", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_and_loads_nothing(fast, folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.count["svg"] == 2 * (1 + len(fast.programs.built))
    assert "script" not in page.count
    assert "url(" not in text
    assert "@import" not in text
    links = [reference for reference in page.references if reference != "data:,"]
    assert all((folder / unquote(link)).is_file() for link in links)
    assert {path.name for path in folder.glob("*.py")} == set(map(unquote, links))
    for name in ("normalize_attention", "pack_qkv", "insert_kv_cache", "insert_verify", "facache_step"):
        assert name in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def open_in_browser(page: Path, folder: Path) -> tuple[str, Path]:
    """What the browser's console says, and a picture of the page; no name can be looked up."""
    picture = folder / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=1600,2600"]
    done = subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line), picture


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_page_in_a_browser(folder, tmp_path):
    console, picture = open_in_browser(folder / "index.html", tmp_path)
    assert console == ""
    assert picture.stat().st_size > 50_000, "something is drawn"
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('seen')</script><img src='https://example.invalid/x.png'>")
    assert "seen" in open_in_browser(broken, tmp_path)[0], "the check sees what a page says"


def test_block_before_and_after(fast, folder):
    """The drawings hold the block's calls: what was many pointwise calls is few operators afterwards."""
    text = (folder / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    before, after = (re.findall(r'<text [^>]*text-anchor="middle">([^<]+)<', picture) for picture in pictures[:2])
    assert before.count("linear") == 7
    assert before.count("scaled_dot_product_attention") == 1
    assert before.count("rsqrt") == 2
    assert sorted(one for one in after if one.startswith("dllm.")) == [
        "dllm.attention",
        "dllm.rms_norm",
        "dllm.rms_norm",
        "dllm.rope",
        "dllm.rope",
        "dllm.swiglu",
    ]
    assert after.count("linear") == 4
    assert "blocks.1, " in text


def test_page_is_the_same_every_time(fast, folder, tmp_path):
    fast.dump_graphs(tmp_path)
    assert (tmp_path / "index.html").read_text() == (folder / "index.html").read_text()


# --- compiled code --------------------------------------------------------------------------------------------------


def test_depyf_that_is_not_there_is_said(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "has_depyf", lambda: False)
    with pytest.raises(MissingPackageError, match=r"pip install -e '\.\[debug\]'"):
        fast.dump_graphs(tmp_path, decompile=True)


def test_depyf_that_fails_costs_its_files_only(fast, tmp_path, monkeypatch):
    import types

    broken = types.ModuleType("depyf")

    def prepare_debug(folder):
        raise RuntimeError("bytecode it does not know")

    broken.prepare_debug = prepare_debug
    monkeypatch.setitem(sys.modules, "depyf", broken)
    reason = decompiled.decompile(fast.programs.built[0], tmp_path / "depyf", torch.device("cpu"))
    assert reason == "depyf failed on step: RuntimeError: bytecode it does not know"


@pytest.mark.slow
@pytest.mark.skipif(not api.can_compile(torch.device("cpu")), reason="needs a C++ compiler")
def test_generated_code_is_counted_and_written(tmp_path):
    fast = dllm_compile.optimize(tiny_model(n_layers=4), compile=True)
    prompts = prompts_of(4, 2)
    expected = fast.generate(prompts, SHORT).sequences
    report = next(program for program in fast.report().programs if program.name == "step")
    # q, k, v packed; output; gate and up packed; down: a product each, in four layers. Attention and head are ours.
    assert report.launches.library == 16
    assert report.launches.operators == 5
    assert report.launches.generated > 0
    with_depyf = decompiled.has_depyf()
    fast.programs._programs = {"step": next(program for program in fast.programs.built if program.name == "step")}
    fast.programs._compiled = False  # the dump builds `forward`, which need not be compiled here
    files = fast.dump_graphs(tmp_path)
    sources = sorted(tmp_path.glob("inductor_step_*.py"))
    assert len(sources) == report.graphs
    assert all("async_compile" in path.read_text(encoding="utf-8") for path in sources)
    assert set(sources) <= set(files)
    assert bool(list((tmp_path / "depyf" / "step").glob("*.py"))) == with_depyf
    assert torch.equal(fast.generate(prompts, SHORT).sequences, expected), "looking on changed nothing"
    Page((tmp_path / "index.html").read_text(encoding="utf-8"))
