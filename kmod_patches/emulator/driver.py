"""The nvidia-uvm.ko that is booted, stock or patched, built from Debian's source or from the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from emulator.kernel import Kernel
from kmod import build as modules
from kmod import debian
from kmod.tree import find
from kmod.workshop import Workshop


@dataclass(frozen=True, slots=True)
class Driver:
    """A built nvidia-uvm.ko, without debug information, and the tree whose headers fit it."""

    version: str
    module: Path
    tree: Path


def build(fetched: debian.Fetched, kernel: Kernel, cache: Path, *, patched: bool) -> Driver:
    """The module of a suite's driver. Raises Unavailable, KmodError."""
    jobs = len(os.sched_getaffinity(0))
    shop = Workshop(fetched, modules.kernel(kernel.release), cache, jobs)
    module = shop.uvm(patched=patched)
    if not shop.folder.is_dir():
        # The module was kept, and the tree that it was compiled in was not.
        with shop.bench() as bench:
            bench.uvm(patched=patched)
    tree = find(shop.folder)
    return Driver(tree.version, module, tree.root)
