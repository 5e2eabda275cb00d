"""Builds the modules of a driver's source for a kernel in a folder of the cache, and keeps what was compiled.

With and without the patch in one folder: when it is put in or taken out, only the files that it touches are
compiled again. What comes out is kept under a digest of all that it was made from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kmod import changes, debian, hooks
from kmod.alone import alone
from kmod.build import LIB_MODULES, MODULES, Kernel, build, mends
from kmod.caching import making
from kmod.command import run, run_to
from kmod.errors import KmodError
from kmod.tree import Tree, copy, find

BUILD_DEADLINE_S = 3000.0
STRIP_DEADLINE_S = 120.0
LOCK_DEADLINE_S = 1800.0
COMPILER = "gcc"
# What of the kernel's headers says how they were made.
KERNEL_IS = ("include/generated/autoconf.h", "include/generated/uapi/linux/version.h", "Module.symvers")
RECIPE = (Path(__file__), Path(changes.__file__))
DIGEST_DIGITS = 16
TAIL_LINES = 20
BUSY = ".mpsd-busy"
UVM = f"{MODULES[-1]}.ko"


@dataclass(frozen=True, slots=True)
class Built:
    """The modules, patched, and how long it took; `kept`: some of it had been compiled before."""

    modules: tuple[Path, ...]
    seconds: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where a suite's driver is built for a kernel, on so many cores."""

    fetched: debian.Fetched
    kernel: Kernel
    cache: Path
    jobs: int

    @property
    def headers(self) -> Path:
        """The folder in which the kernel's own build was."""
        return LIB_MODULES / self.kernel.release / "build"

    @property
    def folder(self) -> Path:
        """What was compiled with another compiler or other headers lies elsewhere."""
        parts = [run([COMPILER, "--version"], deadline_s=STRIP_DEADLINE_S).encode()]
        parts += [(self.headers / name).read_bytes() for name in KERNEL_IS]
        return self.cache / "build" / f"{self.fetched.version}-{self.kernel.release}-{_digest(parts)}"

    def uvm(self, *, patched: bool) -> Path:
        """nvidia-uvm.ko without debug information, from the cache if that holds it. Raises KmodError.

        It has no versions of nvidia.ko's symbols unless that was built before: good for the stub, not for a
        real machine.
        """
        module = self.kept_uvm(patched=patched)
        if not module.is_file():
            with self.bench() as bench:
                return bench.uvm(patched=patched)
        return module

    def kept_uvm(self, *, patched: bool) -> Path:
        """Where the cache has it, if it has it."""
        parts = [path.read_bytes() for path in RECIPE]
        if patched:
            parts.append(self.patch(find(self.fetched.tree)).digest().encode())
        kind = "patched" if patched else "stock"
        return self.cache / "uvm" / f"{self.folder.name}-{kind}-{_digest(parts)}" / UVM

    def patch(self, tree: Tree) -> hooks.Patch:
        return hooks.whole_patch(mends(tree, self.kernel))

    @contextmanager
    def bench(self) -> Iterator[Bench]:
        """The folder, for nobody else meanwhile. A build that was broken off in it is begun anew."""
        folder = self.folder
        with alone(folder.with_name(f"{folder.name}.lock"), LOCK_DEADLINE_S):
            if (folder / BUSY).exists():
                shutil.rmtree(folder)
            kept = folder.is_dir()
            if not kept:
                with making(folder, "the driver's source") as made:
                    os.rename(copy(find(self.fetched.tree), made / "tree", whole=True).root, folder)
            (folder / BUSY).touch()
            try:
                yield Bench(self, find(folder), kept)
            except KmodError:
                (folder / BUSY).unlink()
                raise
            (folder / BUSY).unlink()


@dataclass(frozen=True, slots=True)
class Bench:
    """The tree in which a workshop builds, while it is ours; `kept`: it was there before."""

    shop: Workshop
    tree: Tree
    kept: bool

    @property
    def log(self) -> Path:
        return self.tree.root.with_name(f"{self.tree.root.name}.log")

    def both(self) -> Built:
        """nvidia.ko and nvidia-uvm.ko with the patch in, as the driver's own makefile builds them."""
        began = time.monotonic()
        hooks.apply(self.tree, self.shop.patch(self.tree))
        shop = self.shop
        modules = build(self.tree, shop.kernel, self.log, jobs=shop.jobs, deadline_s=BUILD_DEADLINE_S)
        return Built(tuple(modules), time.monotonic() - began, self.kept)

    def one(self) -> Built:
        """As both(), without nvidia.ko."""
        began = time.monotonic()
        return Built((self.uvm(patched=True),), time.monotonic() - began, self.kept)

    def uvm(self, *, patched: bool) -> Path:
        """Workshop.uvm's, made here."""
        if patched:
            hooks.apply(self.tree, self.shop.patch(self.tree))
        else:
            hooks.reverse(self.tree)
        if run_to(self.log, self._make_uvm(), deadline_s=BUILD_DEADLINE_S):
            said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise KmodError("\n".join([f"the build of {UVM} failed ({self.log}):", *said[-TAIL_LINES:]]))
        target = self.shop.kept_uvm(patched=patched)
        with making(target.parent, UVM) as made:
            strip: list[str | Path] = ["objcopy", "--strip-debug", self.tree.root / UVM, made / UVM]
            run(strip, deadline_s=STRIP_DEADLINE_S)
            os.rename(made, target.parent)
        return target

    def _make_uvm(self) -> list[str | Path]:
        """What the driver's makefile would ask of the kernel's, for one module: so objects serve both.

        The driver's tests of the kernel are listed by all modules together, so both are named.
        """
        shop = self.shop
        return [
            *("make", f"-j{shop.jobs}", "-C", shop.headers, f"M={self.tree.root}", "ARCH=x86_64"),
            *(f"NV_KERNEL_SOURCES={shop.kernel.headers}", f"NV_KERNEL_OUTPUT={shop.headers}"),
            *(f"NV_KERNEL_MODULES={' '.join(MODULES)}", "NV_SPECTRE_V2=0", "KBUILD_MODPOST_WARN=1", UVM),
        ]


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:DIGEST_DIGITS]
