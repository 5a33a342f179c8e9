# SPDX-License-Identifier: Apache-2.0
"""A dump returns what it wrote, replaces an earlier dump as a whole, and leaves alone or refuses what is another's."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import dllm_compile
from dllm_compile import cli
from dllm_compile.errors import DllmCompileError, DumpError
from dllm_compile.inspection import dump
from dllm_compile.inspection.dump_folder import INVENTORY, dump_folder
from tests.conftest import tiny_model

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def fast():
    """With one program, `forward`, once it is dumped."""
    return dllm_compile.optimize(tiny_model(n_layers=1), compile=False)


@pytest.fixture(scope="module")
def larger():
    """Another name for a stage, and more programs."""
    model = dllm_compile.optimize(tiny_model(n_layers=1), compile=False, disable="pack_qkv")
    model.generate([[3, 4]], max_new_tokens=4, cache="dual", block_length=2)
    return model


# --- what is returned -----------------------------------------------------------------------------------------------

OTHERS = (
    "own.safetensors",
    "model-00001.safetensors",
    "notes.txt",
    "graph_99_own.py",
    "depyf/forward/own.py",
    "a/b.py",
)


def test_what_is_returned_is_what_was_written(fast, tmp_path):
    for name in OTHERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    returned = fast.dump_graphs(tmp_path)
    assert len(returned) == len(set(returned))
    assert set(returned) | {tmp_path / name for name in OTHERS} == set(files_of(tmp_path))
    assert not {tmp_path / name for name in OTHERS} & set(returned)
    assert all((tmp_path / name).read_text() == "mine" for name in OTHERS)
    assert {"index.html", "weights.safetensors", "graph.safetensors", "program_forward.py", INVENTORY} <= {
        path.name for path in returned
    }
    assert set(fast.dump_graphs(tmp_path)) == set(returned), "and a second time"
    assert all((tmp_path / name).read_text() == "mine" for name in OTHERS)


# --- an earlier dump ------------------------------------------------------------------------------------------------


def test_an_earlier_dump_is_replaced_as_a_whole(fast, larger, tmp_path):
    before = larger.dump_graphs(tmp_path / "both")
    returned = fast.dump_graphs(tmp_path / "both")
    alone = fast.dump_graphs(tmp_path / "alone")
    assert {path.name for path in before} - {path.name for path in returned}, "there was something to remove"
    assert set(files_of(tmp_path / "both")) == set(returned)
    assert {path.name for path in returned} == {path.name for path in alone}


def test_weights_of_an_earlier_dump_do_not_stay(fast, tmp_path, monkeypatch):
    """They would be read by graphs they do not belong to."""
    fast.dump_graphs(tmp_path)
    assert (tmp_path / "weights.safetensors").exists()
    monkeypatch.setattr(dump, "MOST_WEIGHTS", 1000)
    assert tmp_path / "weights.safetensors" not in fast.dump_graphs(tmp_path)
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_dump_that_failed_is_replaced_as_well(fast, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("dllm_compile.inspection.page.write_page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fast.dump_graphs(tmp_path)
    assert list(tmp_path.glob("graph_*.py"))
    assert set(fast.dump_graphs(tmp_path)) == set(files_of(tmp_path))


def test_files_of_another_tool(tmp_path):
    """In a folder of its own, under names that are not known beforehand."""
    with dump_folder(tmp_path, ["a.py"], ["depyf/one", "depyf/two"]) as folder:
        folder.path("a.py").write_text("")
        for name in ("depyf/one", "depyf/two"):
            folder.subfolder(name).mkdir(parents=True)
            (folder.subfolder(name) / "first.py").write_text("")
            assert [path.name for path in folder.found(name)] == ["first.py"]
    assert set(folder.written) == set(files_of(tmp_path))
    (tmp_path / "depyf" / "two" / "own.py").write_text("mine")
    with dump_folder(tmp_path, [], ["depyf/one"]):
        assert [path.relative_to(tmp_path).as_posix() for path in files_of(tmp_path)] == ["depyf/two/own.py", INVENTORY]
        assert not (tmp_path / "depyf" / "one").exists()
    with pytest.raises(DumpError, match=r"1 files .* the first is own\.py"), dump_folder(tmp_path, [], ["depyf/two"]):
        pytest.fail("written to")


@pytest.mark.parametrize("name", ["../outside.py", "a/../../outside.py", "{absolute}", "link/outside.py", 3])
def test_an_inventory_reaches_nothing_outside(tmp_path, name):
    (tmp_path / "outside.py").write_text("mine")
    folder = tmp_path / "dump"
    with dump_folder(folder, ["a.py"], []) as made:
        made.path("a.py").write_text("")
    (folder / "link").symlink_to(tmp_path)
    content = json.loads((folder / INVENTORY).read_text())
    content["files"].append(str(tmp_path / "outside.py") if name == "{absolute}" else name)
    (folder / INVENTORY).write_text(json.dumps(content))
    with dump_folder(folder, [], []):
        assert not (folder / "a.py").exists()
    assert (tmp_path / "outside.py").read_text() == "mine"


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    "name", ["index.html", "weights.safetensors", "graph.safetensors", "graph_00_captured.py", "program_forward.py"]
)
def test_files_of_others_are_not_replaced(fast, tmp_path, name, earlier):
    """Also beside an earlier dump, which then stays."""
    if earlier:
        with dump_folder(tmp_path, ["old.py"], []) as folder:
            folder.path("old.py").write_text("old")
    (tmp_path / name).write_text("mine")
    before = files_of(tmp_path)
    with pytest.raises(DumpError, match=rf"1 files .* the first is {name}: give dump_graphs another folder") as caught:
        fast.dump_graphs(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"made by": "another", "files": ["index.html"]}', "\xff"])
def test_an_inventory_of_another_kind_is_another_file(fast, tmp_path, text):
    (tmp_path / INVENTORY).write_text(text, encoding="latin-1")
    with pytest.raises(DumpError, match=rf"the first is {INVENTORY}"):
        fast.dump_graphs(tmp_path)
    assert (tmp_path / INVENTORY).read_text(encoding="latin-1") == text


def test_folders_and_links_in_the_way(fast, tmp_path):
    (tmp_path / "folder" / "index.html").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "index.html").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "folder", tmp_path / "link"):
        with pytest.raises(DumpError, match=r"the first is index\.html"):
            fast.dump_graphs(place)
    assert not (tmp_path / "nowhere").exists()


def make_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    return tmp_path / "file"


def make_unwritable(tmp_path: Path) -> Path:
    if ROOT:
        pytest.skip("everything can be written to")
    (tmp_path / "locked").mkdir(mode=0o500)
    return tmp_path / "locked"


def make_system(tmp_path: Path) -> Path:
    if not Path("/proc/self").is_dir():
        pytest.skip("needs /proc")
    return Path("/proc/self/dump")


@pytest.mark.parametrize(
    "make",
    [
        make_file,
        lambda tmp_path: make_file(tmp_path) / "below",
        make_unwritable,
        lambda tmp_path: make_unwritable(tmp_path) / "below",
        make_system,
        lambda tmp_path: tmp_path / ("x" * 300),
    ],
    ids=["a file", "below a file", "unwritable", "below unwritable", "no file system", "too long a name"],
)
def test_what_cannot_be_written_to(fast, tmp_path, make):
    path = make(tmp_path)
    with pytest.raises(
        DumpError, match="cannot be written to, .*: give dump_graphs the path of another folder"
    ) as caught:
        fast.dump_graphs(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("path", [None, 3, b"graphs", ["graphs"], "a\0b", Path("a\0b")], ids=repr)
def test_what_is_no_path(fast, path):
    with pytest.raises(DumpError, match="dump_graphs needs the path of a folder, not "):
        fast.dump_graphs(path)


@pytest.mark.parametrize("writer", ["write_text", "save_file"])
def test_a_disk_that_is_full(fast, tmp_path, monkeypatch, writer):
    from safetensors import SafetensorError

    def full(self, *_, **__):
        if writer == "save_file":
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        if self.name != INVENTORY:
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return 0

    monkeypatch.setattr(
        *((Path, "write_text", full) if writer == "write_text" else ("safetensors.torch.save_file", full))
    )
    with pytest.raises(DumpError, match=r"cannot be written to, .*No space left on device"):
        fast.dump_graphs(tmp_path)


@pytest.mark.parametrize("error", [ValueError("ours"), torch.OutOfMemoryError("full"), DllmCompileError("named")])
def test_other_errors_stay_what_they_are(tmp_path, error):
    with pytest.raises(type(error)) as caught, dump_folder(tmp_path, [], []):
        raise error
    assert caught.value is error


def test_the_command_says_it_in_a_line(tmp_path, capsys):
    (tmp_path / "index.html").write_text("mine")
    words = ["report", "--no-compile", "--device", "cpu", "--dump", str(tmp_path)]
    assert cli.main(words) == 1
    shown = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(tmp_path) in shown
    assert "the first is index.html: give dump_graphs another folder" in shown
