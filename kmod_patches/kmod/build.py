"""Build of nvidia.ko and nvidia-uvm.ko with the driver's own makefile.

Both in one run: all modules together define the list of the driver's kernel tests, so UVM alone would lack
some. The versions of symbols that UVM takes from nvidia.ko come from the build of that nvidia.ko.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kmod.changes import PCI_RESIZE, Change, read
from kmod.command import run_to
from kmod.errors import KmodError, Unavailable
from kmod.tree import Tree

MODULES = ("nvidia", "nvidia-uvm")
LIB_MODULES = Path("/lib/modules")
CALL = "pci_resize_resource"
PARAMETERS_WITH_EXCLUDED = 4
TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with installed headers: its release, and the folder of include/linux."""

    release: str
    headers: Path


def kernel(release: str = "", folder: Path = LIB_MODULES) -> Kernel:
    """Return the named kernel; by default the running one, else the newest with headers. Raises
    Unavailable."""
    wanted = [release] if release else [os.uname().release, *releases(folder)]
    for name in wanted:
        # Some distributions keep the headers that all flavours share under `source`.
        for headers in (folder / name / "source", folder / name / "build"):
            if (headers / "include/linux/pci.h").is_file() and (folder / name / "build").is_dir():
                return Kernel(name, headers)
    raise Unavailable(f"no kernel headers for {release or 'any kernel'} below {folder}")


def releases(folder: Path = LIB_MODULES) -> list[str]:
    """Return the kernels with modules or headers in the folder, the newest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def mends(tree: Tree, for_kernel: Kernel) -> list[Change]:
    """Return changes that this source needs for this kernel, besides those of its own tests."""
    declared = _arguments(read(for_kernel.headers / "include/linux/pci.h"))
    return possible_mends(tree) if declared == PARAMETERS_WITH_EXCLUDED else []


def possible_mends(tree: Tree) -> list[Change]:
    """Return the changes that the source needs for some kernels."""
    source = tree.original(PCI_RESIZE.file)
    called = _arguments(read(source)) if source.is_file() else None
    return [PCI_RESIZE] if called == PARAMETERS_WITH_EXCLUDED - 1 else []


def _arguments(text: str) -> int | None:
    """Return the number of arguments at the function's first mention; None without one or under a test."""
    if f"NV_{CALL.upper()}" in text:
        return None
    match = re.search(rf"\b{CALL}\s*\(", text)
    if match is None:
        return None
    depth, count = 1, 1
    for character in text[match.end() :]:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return count
        count += character == "," and depth == 1
    return None


def build(tree: Tree, for_kernel: Kernel, log: Path, *, jobs: int, deadline_s: float) -> list[Path]:
    """Build and return the modules. The compiler's output goes to `log`. Raises KmodError with its end."""
    command = ["make", f"-j{jobs}", f"KERNEL_UNAME={for_kernel.release}"]
    command += [f"NV_KERNEL_MODULES={' '.join(MODULES)}", "modules"]
    status = run_to(log, command, deadline_s=deadline_s, cwd=tree.root)
    built = [tree.root / f"{name}.ko" for name in MODULES]
    if status or not all(path.is_file() for path in built):
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
        raise KmodError(f"the build failed ({log}):\n{tail or 'no output; check for free disk space'}")
    return built
