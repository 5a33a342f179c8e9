# SPDX-License-Identifier: Apache-2.0
"""What importing the package costs, and which part may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dllm_compile

PACKAGE = Path(dllm_compile.__file__).parent

# Runs in a fresh interpreter in which the named packages are not there.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import dllm_compile
{statements}
loaded = [name for name in {absent!r} if name in sys.modules]
assert not loaded, loaded
print("imported")
"""
EVERY_NAME = "[getattr(dllm_compile, name) for name in dllm_compile.__all__]"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)


def modules_of(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything `path` imports, wherever in the file the import stands."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = parts[:-1]  # also right for __init__.py, whose own package is its folder
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(
    ("absent", "statements"),
    [
        (("torchao", "depyf", "triton", "tqdm", "rich", "numpy"), "dllm_compile.DecodingConfig()"),
        # transformers itself needs tqdm, numpy and more; rich only where something is shown.
        (("torchao", "depyf", "triton", "rich"), EVERY_NAME),
        (("torchao", "depyf", "triton", "rich"), "import dllm_compile.cli; dllm_compile.cli.build_parser()"),
    ],
)
def test_import_without_optional_packages(absent: tuple[str, ...], statements: str):
    done = run_python(WITHOUT.format(absent=absent, statements=statements))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported"


def test_absent_packages_are_really_absent():
    done = run_python(WITHOUT.format(absent=("rich",), statements="import rich"))
    assert "No module named 'rich'" in done.stderr


def test_import_touches_no_device():
    code = (
        "import torch, dllm_compile\n"
        f"{EVERY_NAME}\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["torch.float32", "True"]


def test_a_plain_import_loads_no_submodule_with_work_in_it():
    code = "import sys, dllm_compile\nprint(*[name for name in sys.modules if name.startswith('dllm_compile.')])"
    assert run_python(code).stdout.split() == []


def test_presets_and_passes_need_no_import_of_their_own():
    code = "import dllm_compile\nprint(dllm_compile.presets.PRESETS['dkv'].cache, *dllm_compile.passes.OPTIONAL)"
    assert run_python(code).stdout.split()[:2] == ["dkv", "pack_qkv"]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = dllm_compile.optimise


def test_dir_lists_the_public_names():
    assert set(dllm_compile.__all__) <= set(dir(dllm_compile))


@pytest.mark.parametrize("path", modules_of("kernels"), ids=lambda path: path.name)
def test_kernels_import_only_compat(path: Path):
    ours = {name for name in imported_modules(path) if name.startswith("dllm_compile.")}
    allowed = ("dllm_compile.kernels", "dllm_compile._compat")
    assert not [name for name in ours if not name.startswith(allowed)]


@pytest.mark.parametrize("path", modules_of("passes"), ids=lambda path: path.name)
def test_passes_do_not_import_the_runtime(path: Path):
    assert not [name for name in imported_modules(path) if name.startswith("dllm_compile.runtime")]


def test_the_layering_check_sees_a_relative_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "dllm_compile"
    (package / "passes").mkdir(parents=True)
    bad = package / "passes" / "bad.py"
    bad.write_text("def f():\n    from ..runtime import engine\n", encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", package)
    assert "dllm_compile.runtime.engine" in imported_modules(bad)


@pytest.mark.parametrize("name", ["passes", "kernels", "runtime"])
def test_nothing_imports_through_the_links(name: str):
    for path in PACKAGE.rglob("*.py"):
        assert name not in {module.partition(".")[0] for module in imported_modules(path)}, path


def test_a_package_named_kernels_that_is_looked_for_registers_no_operator_twice():
    """At the repository's top `import kernels` finds the link; transformers does that to look for a package."""
    code = """
import torch, dllm_compile.kernels as ours
before = {name: getattr(torch.ops.dllm, name).default for name in ("embed", "rms_norm", "row_attention")}
from transformers.utils import import_utils
import_utils.is_kernels_available()
import kernels
assert kernels is ours, kernels
assert all(getattr(torch.ops.dllm, name).default is op for name, op in before.items())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
