# SPDX-License-Identifier: Apache-2.0
"""The folder of a dump: which files in it are the dump's own, and what must stay as it is.

A dump leaves an inventory behind, by which the next one into the same folder knows what it may replace.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from ..errors import DllmCompileError, DumpError

INVENTORY = "dump.json"
"""Name of the file with the names of all others."""

_MAKER = "dllm_compile.dump_graphs"


class DumpFolder:
    """Hands out the paths to write to, and remembers them.

    Attributes:
        root: the folder.
    """

    def __init__(self, root: Path, names: Iterable[str], folders: Iterable[str]) -> None:
        self.root = root
        self._names = frozenset(names)
        self._folders = frozenset(folders)
        self._written: dict[str, None] = {}

    def path(self, name: str) -> Path:
        """Where the file of that name is written, which must be one of those that were announced."""
        assert name in self._names, name
        self._written[name] = None
        return self.root / name

    def subfolder(self, name: str) -> Path:
        """Where another tool writes files of its own naming; `found` remembers them."""
        assert name in self._folders, name
        return self.root / name

    def found(self, name: str) -> list[Path]:
        """What lies in a subfolder now."""
        paths = sorted(path for path in (self.root / name).rglob("*") if path.is_file())
        self._written |= dict.fromkeys(path.relative_to(self.root).as_posix() for path in paths)
        return paths

    @property
    def written(self) -> list[Path]:
        """What was written so far, the inventory last."""
        return [*(self.root / name for name in self._written if (self.root / name).is_file()), self.root / INVENTORY]

    def write_inventory(self, names: Iterable[str] | None = None) -> None:
        """Note what is the dump's: `names`, or what was written."""
        files = sorted(self._written if names is None else names)
        (self.root / INVENTORY).write_text(json.dumps({"made by": _MAKER, "files": files}, indent=1), encoding="utf-8")


@contextmanager
def dump_folder(
    directory: str | os.PathLike[str], names: Iterable[str], folders: Iterable[str]
) -> Iterator[DumpFolder]:
    """A folder to write a dump to. An earlier dump in it is removed first.

    Args:
        directory: made where it does not exist.
        names: of the files that will be written.
        folders: names of folders in it whose files another tool names.

    Raises:
        DumpError: it is no folder and cannot be made, cannot be written to, or holds files under these names that are
            of no earlier dump. These are found before anything is written or removed.
    """
    if not isinstance(directory, str | os.PathLike) or "\0" in str(directory):
        raise DumpError(f"dump_graphs needs the path of a folder, not {directory!r}")
    root, names, folders = Path(directory), frozenset(names), frozenset(folders)
    folder = DumpFolder(root, names, folders)
    try:
        root.mkdir(parents=True, exist_ok=True)
        earlier = _inventory(root)
        _refuse_others(root, names, folders, earlier)
        folder.write_inventory(earlier | names)  # whatever happens next, all of these are ours
        _remove(root, earlier)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):  # the error of the dump itself is the one to see
                folder.write_inventory()
    except DllmCompileError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DumpError(
            f"{root} cannot be written to, {reason}: give dump_graphs the path of another folder"
        ) from error


def _inventory(root: Path) -> frozenset[str]:
    """Names of an earlier dump's files; none where there is no inventory of one."""
    try:
        content: Any = json.loads((root / INVENTORY).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return frozenset()
    if not isinstance(content, dict) or content.get("made by") != _MAKER or not isinstance(content.get("files"), list):
        return frozenset()
    return frozenset({INVENTORY, *(name for name in content["files"] if _is_inside(root, name))})


def _is_inside(root: Path, name: Any) -> bool:
    """Whether a name in an inventory, which anyone may have edited, is that of something below the folder."""
    if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return False
    return (root / name).parent.resolve().is_relative_to(root.resolve())


def _refuse_others(root: Path, names: frozenset[str], folders: frozenset[str], earlier: frozenset[str]) -> None:
    """Refuse to replace what no earlier dump has written."""
    wanted = {root / name for name in (*names, INVENTORY)}
    wanted |= {path for name in folders for path in (root / name).rglob("*") if not path.is_dir()}
    others = [path for path in sorted(wanted) if os.path.lexists(path)]
    others = [path for path in others if path.relative_to(root).as_posix() not in earlier or path.is_dir()]
    if others:
        raise DumpError(
            f"{root} holds {len(others)} files that the dump would replace and that no earlier dump has written, the "
            f"first is {others[0].name}: give dump_graphs another folder, or move them away"
        )


def _remove(root: Path, names: Iterable[str]) -> None:
    """Remove files, and the folders that they leave empty."""
    places = set()
    for name in names:
        path = root / name
        if name != INVENTORY and os.path.lexists(path) and not path.is_dir():
            path.unlink()
            places |= {place for place in path.parents if root in place.parents}
    for place in sorted(places, reverse=True):  # a folder after those in it
        if not any(place.iterdir()):
            place.rmdir()
