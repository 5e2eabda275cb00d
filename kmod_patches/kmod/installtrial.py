"""Installs a fetched driver as mpsd-kmod install does, below a folder of its own, and takes it out again.

The real dkms, depmod and modprobe do it, and nothing is loaded. What stands for the stock modules are those
that the trial has built before, under the names and in the folder that dkms gives them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kmod import symbols
from kmod.build import LIB_MODULES, MODULES, Kernel
from kmod.dkms import module_set
from kmod.errors import KmodError, Unavailable
from kmod.install import Wish, check, perform, plan_install, plan_uninstall, require, resolved
from kmod.machine import Machine
from kmod.tree import Tree, find

STOCK = Path("updates/dkms")


def try_install(source: Tree, for_kernel: Kernel, stock: Sequence[Path], folder: Path) -> str:
    """What was seen, in a sentence. Raises Unavailable for what is missing here, KmodError."""
    if os.geteuid() != 0:
        raise Unavailable("dkms installs for root only")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="install-", dir=folder) as made:
        machine = Machine(Path(made))
        wish = Wish(_stocked(machine, source, for_kernel, stock), for_kernel)
        require(machine, wish)
        return _there_and_back(machine, wish)


def furnish(machine: Machine, release: str) -> Path:
    """Below its root, what dkms and depmod need of a kernel whose headers are here; the kernel's folder."""
    kernel = machine.modules / release
    for needed in (kernel / STOCK, machine.dkms_tree, machine.sources, machine.root / "etc"):
        needed.mkdir(parents=True)
    for name in ("modules.order", "modules.builtin"):
        (kernel / name).write_text("")
    for name in ("build", "source"):
        link = LIB_MODULES / release / name
        if link.exists():
            (kernel / name).symlink_to(link.resolve())
    return kernel


def _stocked(machine: Machine, source: Tree, for_kernel: Kernel, stock: Sequence[Path]) -> Tree:
    kernel = furnish(machine, for_kernel.release)
    for path in stock:
        shutil.copy(path, kernel / STOCK)
    root = machine.sources / f"nvidia-{source.version}"
    shutil.copytree(source.root, root, symlinks=True)
    machine.depmod(for_kernel.release)
    return find(root)


def _there_and_back(machine: Machine, wish: Wish) -> str:
    release = wish.kernel.release
    stock = {name: machine.modules / release / STOCK / f"{name}.ko" for name in MODULES}
    _expect(machine, release, stock)
    began = time.monotonic()
    perform(plan_install(machine, wish), lambda text: None)
    took = time.monotonic() - began
    modules = module_set(wish.tree)
    check(machine, release, modules)
    ours = {module.built: machine.ours(release) / f"{module.installed}.ko" for module in modules}
    agreeing, _ = symbols.disagreements(ours["nvidia"], ours["nvidia-uvm"])
    if not agreeing:
        raise KmodError("the patched nvidia-uvm takes no symbol from the patched nvidia")
    if plan_install(machine, wish):
        raise KmodError("installed, and an install finds something left to do")
    perform(plan_uninstall(machine), lambda text: None)
    _expect(machine, release, stock)
    if plan_uninstall(machine):
        raise KmodError("uninstalled, and an uninstall finds something left to do")
    return (
        f"installed through dkms in {took:.0f} s: {len(ours)} modules before the stock ones, {agreeing} "
        "symbols of nvidia.ko in nvidia-uvm.ko with its versions; uninstalled: the stock ones are found again"
    )


def _expect(machine: Machine, release: str, stock: dict[str, Path]) -> None:
    for name, path in stock.items():
        found = resolved(machine, release, name)
        if found != path:
            raise KmodError(f"modprobe finds {found} for {name} and not the stock {path}")
