"""Build of a driver's modules for a kernel in a folder of the cache, which keeps compiled objects.

Builds with and without the patch share one folder: applying or reversing the patch recompiles only the files
that it touches. Results are kept under a digest of all their inputs.
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
# Files of the kernel's headers that tell how the headers were made.
KERNEL_IS = ("include/generated/autoconf.h", "include/generated/uapi/linux/version.h", "Module.symvers")
RECIPE = (Path(__file__), Path(changes.__file__))
DIGEST_DIGITS = 16
TAIL_LINES = 20
BUSY = ".mpsd-busy"
UVM = f"{MODULES[-1]}.ko"


@dataclass(frozen=True, slots=True)
class Built:
    """The patched modules, and the build time; `kept`: some objects were compiled before."""

    modules: tuple[Path, ...]
    seconds: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Workshop:
    """Build folder of a suite's driver for a kernel, with a number of cores."""

    fetched: debian.Fetched
    kernel: Kernel
    cache: Path
    jobs: int

    @property
    def headers(self) -> Path:
        """Folder of the kernel's own build."""
        return LIB_MODULES / self.kernel.release / "build"

    @property
    def folder(self) -> Path:
        """Build folder; another compiler or other headers have another one."""
        parts = [run([COMPILER, "--version"], deadline_s=STRIP_DEADLINE_S).encode()]
        parts += [(self.headers / name).read_bytes() for name in KERNEL_IS]
        return self.cache / "build" / f"{self.fetched.version}-{self.kernel.release}-{_digest(parts)}"

    def uvm(self, *, patched: bool) -> Path:
        """Return nvidia-uvm.ko without debug information, from the cache if possible. Raises KmodError.

        It has no versions of nvidia.ko's symbols unless that was built before: usable with the stub, not on a
        real machine.
        """
        module = self.kept_uvm(patched=patched)
        if not module.is_file():
            with self.bench() as bench:
                return bench.uvm(patched=patched)
        return module

    def kept_uvm(self, *, patched: bool) -> Path:
        """Return its path in the cache, whether or not it exists."""
        parts = [path.read_bytes() for path in RECIPE]
        if patched:
            parts.append(self.patch(find(self.fetched.tree)).digest().encode())
        kind = "patched" if patched else "stock"
        return self.cache / "uvm" / f"{self.folder.name}-{kind}-{_digest(parts)}" / UVM

    def patch(self, tree: Tree) -> hooks.Patch:
        return hooks.whole_patch(mends(tree, self.kernel))

    @contextmanager
    def bench(self) -> Iterator[Bench]:
        """Yield the folder with its lock held. An interrupted build in it starts again."""
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
    """The tree of a workshop while its lock is held; `kept`: it existed before."""

    shop: Workshop
    tree: Tree
    kept: bool

    @property
    def log(self) -> Path:
        return self.tree.root.with_name(f"{self.tree.root.name}.log")

    def both(self) -> Built:
        """Build patched nvidia.ko and nvidia-uvm.ko with the driver's own makefile."""
        began = time.monotonic()
        hooks.apply(self.tree, self.shop.patch(self.tree))
        shop = self.shop
        modules = build(self.tree, shop.kernel, self.log, jobs=shop.jobs, deadline_s=BUILD_DEADLINE_S)
        return Built(tuple(modules), time.monotonic() - began, self.kept)

    def one(self) -> Built:
        """Build like both(), without nvidia.ko."""
        began = time.monotonic()
        return Built((self.uvm(patched=True),), time.monotonic() - began, self.kept)

    def uvm(self, *, patched: bool) -> Path:
        """Build Workshop.uvm's result here."""
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
        """Return the command of the driver's makefile for one module, so that both ways share objects.

        All modules together define the list of the driver's kernel tests, so both modules are named.
        """
        shop = self.shop
        return [
            *("make", f"-j{shop.jobs}", "-C", shop.headers, f"M={self.tree.root}", "ARCH=x86_64"),
            *(f"NV_KERNEL_SOURCES={shop.kernel.headers}", f"NV_KERNEL_OUTPUT={shop.headers}"),
            *(f"NV_KERNEL_MODULES={' '.join(MODULES)}", "NV_SPECTRE_V2=0", "KBUILD_MODPOST_WARN=1", UVM),
        ]


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:DIGEST_DIGITS]
