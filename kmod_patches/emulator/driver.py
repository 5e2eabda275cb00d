"""Builds nvidia-uvm.ko alone, stock or patched, from Debian's source, and keeps it in the cache.

The driver's makefile lists its tests of the kernel from all modules together, so both modules are named to
it; asked for the file nvidia-uvm.ko only, the kernel's build leaves the larger nvidia.ko out. The result has
no symbol versions of nvidia.ko's: good for the stub, not for a real machine, for which kmod.build makes both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from emulator.kernel import Kernel
from kmod import debian, hooks
from kmod.caching import making
from kmod.command import run
from kmod.tree import copy, find

BUILD_DEADLINE_S = 1800.0
DIGEST_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Driver:
    """A built nvidia-uvm.ko, without debug information, and the tree whose headers fit it."""

    version: str
    module: Path
    tree: Path


def build(suite: str, kernel: Kernel, cache: Path, *, patched: bool) -> Driver:
    """The module of a suite's driver, from the cache if that holds it. Raises Unavailable, KmodError."""
    fetched = debian.fetch(suite, cache)
    kind = hooks.whole_patch().digest()[:DIGEST_DIGITS] if patched else "stock"
    folder = cache / "uvm" / f"{fetched.version}-{kernel.release}-{kind}"
    if not folder.is_dir():
        _build(fetched.tree, kernel, folder, patched=patched)
    tree = find(folder / "tree")
    return Driver(tree.version, folder / "nvidia-uvm.ko", tree.root)


def _build(source: Path, kernel: Kernel, folder: Path, *, patched: bool) -> None:
    with making(folder, "nvidia-uvm.ko") as made:
        tree = copy(find(source), made / "tree", whole=True)
        if patched:
            hooks.apply(tree, hooks.whole_patch())
        run(make_command(tree.root, kernel), deadline_s=BUILD_DEADLINE_S)
        built = tree.root / "nvidia-uvm.ko"
        run(["objcopy", "--strip-debug", built, made / "nvidia-uvm.ko"], deadline_s=BUILD_DEADLINE_S)
        for path in [built, *tree.root.rglob("*.o"), *tree.root.rglob("*.o_binary")]:
            path.unlink()
        os.rename(made, folder)


def make_command(tree: Path, kernel: Kernel) -> list[str | Path]:
    """What the driver's own makefile would ask of the kernel's, for one module, on the cores we may use."""
    return [
        *("make", f"-j{len(os.sched_getaffinity(0))}", "-C", kernel.headers, f"M={tree}", "ARCH=x86_64"),
        *(f"NV_KERNEL_SOURCES={kernel.sources}", f"NV_KERNEL_OUTPUT={kernel.headers}"),
        *("NV_KERNEL_MODULES=nvidia nvidia-uvm", "NV_SPECTRE_V2=0", "KBUILD_MODPOST_WARN=1"),
        "nvidia-uvm.ko",
    ]
