"""A driver source: where its modules' folders are, and which version it is."""

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
"""Where hooks keeps the driver's files as they were."""

SMALL = ("nvidia-uvm", "Kbuild", "nvidia/nv-pci.c")
"""What of a tree the hooks and mends look at."""

TESTED = ("535.261.03", "550.163.01", "555.58.02")
"""Versions whose hooks scripts/test-kmod counts; the headers of the semantic patches say them too."""


@dataclass(frozen=True, slots=True)
class Tree:
    """`root` holds Kbuild and the folders nvidia and nvidia-uvm; `version` is as the driver prints it."""

    root: Path
    version: str

    @property
    def tested(self) -> bool:
        return self.version in TESTED

    def original(self, file: str) -> Path:
        """A file of the driver's as the driver had it, whether the patch is applied or not."""
        kept = self.root / ORIGINALS / file
        return kept if kept.is_file() else self.root / file


def find(folder: Path) -> Tree:
    """The tree in a folder or in its kernel-open. Raises UnknownTree, which says what is missing."""
    for root in (folder, folder / "kernel-open"):
        if (root / "nvidia-uvm" / "uvm.c").is_file():
            return Tree(root, _version(root))
    raise UnknownTree(
        f"{folder} is no source of the open kernel modules: neither nvidia-uvm/uvm.c nor "
        "kernel-open/nvidia-uvm/uvm.c is there. Name the folder that has nvidia-uvm in it, for example "
        "the driver's below /usr/src."
    )


def _version(root: Path) -> str:
    missing = [str(name) for name in (Path("Kbuild"), BUILD_LIST) if not (root / name).is_file()]
    if missing:
        raise UnknownTree(f"{root} has nvidia-uvm/uvm.c, but not {' and '.join(missing)}")
    match = VERSION.search((root / "Kbuild").read_text(encoding="utf-8", errors="replace"))
    if match is None:
        raise UnknownTree(f"{root / 'Kbuild'} does not say which version of the driver this is")
    return match[1]


def copy(tree: Tree, target: Path, *, whole: bool) -> Tree:
    """A copy to work on; not `whole`: only what the hooks look at. `target` must not exist."""
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
