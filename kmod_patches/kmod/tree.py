"""A driver source: the folders of its modules, and its version."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from kmod.errors import UnknownTree

VERSION = re.compile(r'-DNV_VERSION_STRING=\\"([0-9]+(?:\.[0-9]+)+)\\"')
BUILD_LIST = Path("nvidia-uvm/nvidia-uvm-sources.Kbuild")
KEPT = Path("nvidia-uvm/.mpsd-kmod")
ORIGINALS = KEPT / "originals"
"""Folder in which hooks keeps the driver's original files."""

SMALL = ("nvidia-uvm", "Kbuild", "nvidia/nv-pci.c")
"""Files of a tree that hooks and mends read."""

TESTED = ("535.261.03", "550.163.01", "555.58.02")
"""Versions for which scripts/test-kmod counts the hooks; the headers of the semantic patches list them
too."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A source. `root` holds Kbuild, nvidia and nvidia-uvm; `version`: as the driver prints it."""

    root: Path
    version: str

    @property
    def tested(self) -> bool:
        return self.version in TESTED

    def original(self, file: str) -> Path:
        """Return a driver file in its original state, whether or not the patch is applied."""
        kept = self.root / ORIGINALS / file
        return kept if kept.is_file() else self.root / file


def find(folder: Path) -> Tree:
    """Return the tree in a folder or in its kernel-open. Raises UnknownTree with what is missing."""
    for root in (folder, folder / "kernel-open"):
        if (root / "nvidia-uvm" / "uvm.c").is_file():
            return Tree(root, _version(root))
    raise UnknownTree(
        f"{folder} is not a source of the open kernel modules: it has neither nvidia-uvm/uvm.c nor "
        "kernel-open/nvidia-uvm/uvm.c. Name the folder that contains nvidia-uvm, for example the driver's "
        "folder below /usr/src."
    )


def _version(root: Path) -> str:
    missing = [str(name) for name in (Path("Kbuild"), BUILD_LIST) if not (root / name).is_file()]
    if missing:
        raise UnknownTree(f"{root} has nvidia-uvm/uvm.c, but not {' and '.join(missing)}")
    match = VERSION.search((root / "Kbuild").read_text(encoding="utf-8", errors="replace"))
    if match is None:
        raise UnknownTree(f"{root / 'Kbuild'} does not contain the driver's version")
    return match[1]


def copy(tree: Tree, target: Path, *, whole: bool) -> Tree:
    """Copy a tree to `target`, which must not exist. Not `whole`: only the files that the hooks read."""
    if whole:
        shutil.copytree(tree.root, target, symlinks=True)
        return find(target)
    target.mkdir(parents=True)
    for name in SMALL:
        source = tree.root / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)
        elif source.is_file():
            shutil.copy2(source, target / name)
    return find(target)
