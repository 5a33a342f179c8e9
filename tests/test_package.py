# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the wheel's content and the layout of the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dllm_compile

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("passes", "kernels", "runtime")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """File names in a wheel built from a copy of the tree, by setuptools alone and without a network."""
    tree = tmp_path_factory.mktemp("tree") / "source"
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_wheel_holds_the_package_only(wheel_names: set[str]):
    top = {name.partition("/")[0] for name in wheel_names}
    assert top == {"dllm_compile", f"dllm_compile-{dllm_compile.__version__}.dist-info"}


def test_wheel_holds_every_module(wheel_names: set[str]):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dllm_compile").rglob("*.py")}
    assert modules <= wheel_names


def test_wheel_holds_the_data(wheel_names: set[str]):
    assert "dllm_compile/py.typed" in wheel_names
    checkpoint = ROOT / "dllm_compile" / "models" / "small" / "checkpoint"
    data = {path.relative_to(ROOT).as_posix() for path in checkpoint.iterdir() if path.is_file()}
    assert {Path(name).name for name in data} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert data <= wheel_names


def test_wheel_holds_licence_and_entry_point(wheel_names: set[str]):
    info = f"dllm_compile-{dllm_compile.__version__}.dist-info"
    assert {f"{info}/entry_points.txt", f"{info}/licenses/LICENSE"} <= wheel_names


@pytest.mark.parametrize("name", LINKS)
def test_the_top_level_links_lead_into_the_package(name: str):
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("dllm_compile", name)  # relative, so that it holds in every clone
    assert (link / "__init__.py").is_file()


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in (ROOT / "dllm_compile").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_module_names_its_licence():
    files = [*(ROOT / "dllm_compile").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert [
        path for path in files if not path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier:")
    ] == []


def test_the_makefile_pins_a_supported_torch():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pinned = re.search(r"^TORCH\s*\?=\s*torch==(\d+)\.(\d+)", makefile, re.MULTILINE)
    assert pinned is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bounds,) = (line for line in project["dependencies"] if line.startswith("torch>"))
    low, high = (tuple(int(part) for part in pair) for pair in re.findall(r"[<>]=?(\d+)\.(\d+)", bounds))
    assert low <= (int(pinned[1]), int(pinned[2])) < high


def test_messages_name_extras_that_can_be_installed():
    """The package is on no index: extras are installed from the checkout."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = set()
    for folder in ("dllm_compile", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for hint in re.findall(r"pip install ([^\n]*)", path.read_text(encoding="utf-8")):
                command = re.match(r"-e '\.\[(\w+)\]'", hint)
                assert command is not None, f"{path}: pip install {hint}"
                named.add(command[1])
    assert {"fp8", "debug", "plot"} <= named <= set(extras)
