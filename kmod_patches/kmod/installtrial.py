"""Trial of an install: install a fetched driver below a folder, as mpsd-kmod install does, and remove it.

Uses the real dkms, depmod and modprobe, and loads nothing. The modules that the trial built before take the
place of the stock modules, under the names and in the folder that dkms gives them.
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
from kmod.install import InstallRequest, check, perform, plan_install, plan_uninstall, require, resolved
from kmod.machine import Machine
from kmod.tree import Tree, find

STOCK = Path("updates/dkms")


def try_install(source: Tree, for_kernel: Kernel, stock: Sequence[Path], folder: Path) -> str:
    """Run the trial and return its result as a sentence. Raises Unavailable, KmodError."""
    if os.geteuid() != 0:
        raise Unavailable("dkms installs only as root")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="install-", dir=folder) as made:
        machine = Machine(Path(made))
        wish = InstallRequest(_stocked(machine, source, for_kernel, stock), for_kernel)
        require(machine, wish)
        return _there_and_back(machine, wish)


def furnish(machine: Machine, release: str) -> Path:
    """Create what dkms and depmod need of a kernel below the root, and return the kernel's folder."""
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


def _there_and_back(machine: Machine, wish: InstallRequest) -> str:
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
        raise KmodError("after the install, a second install has steps left")
    perform(plan_uninstall(machine), lambda text: None)
    _expect(machine, release, stock)
    if plan_uninstall(machine):
        raise KmodError("after the uninstall, a second uninstall has steps left")
    return (
        f"installed through dkms in {took:.0f} s: {len(ours)} modules before the stock ones, {agreeing} "
        "symbols of nvidia.ko in nvidia-uvm.ko with its versions; uninstalled: the stock ones are found again"
    )


def _expect(machine: Machine, release: str, stock: dict[str, Path]) -> None:
    for name, path in stock.items():
        found = resolved(machine, release, name)
        if found != path:
            raise KmodError(f"modprobe finds {found} for {name} instead of the stock {path}")
