"""The nvidia-uvm.ko to boot, stock or patched, built from Debian's source or from the cache."""

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
    """A built nvidia-uvm.ko without debug information, and the tree with its headers."""

    version: str
    module: Path
    tree: Path


def build(fetched: debian.Fetched, kernel: Kernel, cache: Path, *, patched: bool) -> Driver:
    """Build the module of a suite's driver. Raises Unavailable, KmodError."""
    jobs = len(os.sched_getaffinity(0))
    shop = Workshop(fetched, modules.kernel(kernel.release), cache, jobs)
    module = shop.uvm(patched=patched)
    if not shop.folder.is_dir():
        # The cache kept the module, but not the tree in which it was compiled.
        with shop.bench() as bench:
            bench.uvm(patched=patched)
    tree = find(shop.folder)
    return Driver(tree.version, module, tree.root)
