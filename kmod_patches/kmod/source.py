"""Finds the driver's source where the distribution or the driver's installer put it for DKMS."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kmod.changes import read
from kmod.command import run
from kmod.errors import KmodError, UnknownTree, program
from kmod.machine import Machine
from kmod.tree import Tree, find

PACKAGE = "mpsd-nvidia"
"""DKMS knows what we build by this name; its source folder is PACKAGE-VERSION."""

PROPRIETARY = re.compile(r'MODULE_LICENSE\s*\(\s*"NVIDIA"\s*\)')
CORE_MODULE = re.compile(r"nvidia(?!fb|[-_](wmi|fs)\b)(?!.*[-_](uvm|modeset|drm|peermem))[\w.-]*\.ko(\.\w+)?")
"""nvidia.ko under the names that distributions give it: nvidia-current-open.ko, nvidia-tesla.ko.xz ..."""

MODINFO_DEADLINE_S = 30.0
CORE = Path("nvidia/nv-kernel.o_binary")
WHERE = (
    "install the driver's open kernel modules with their source (Debian: nvidia-open-kernel-dkms; the "
    "driver's installer: --kernel-module-type=open), or name a folder: install --tree FOLDER"
)


def candidates(machine: Machine) -> list[Tree]:
    """Every driver source below /usr/src but ours, proprietary ones too."""
    found = []
    folders = sorted(machine.sources.glob("nvidia*")) if machine.sources.is_dir() else []
    for folder in folders:
        try:
            found.append(find(folder))
        except UnknownTree:
            continue
    return found


def proprietary(tree: Tree) -> bool:
    """Whether its nvidia.ko says it is: to a module that hangs on such a one the kernel denies symbols."""
    return any(PROPRIETARY.search(read(path)) for path in sorted((tree.root / "nvidia").glob("*.c")))


def loaded_version(machine: Machine) -> str:
    """The version of the nvidia.ko that is loaded, or ""."""
    try:
        return (machine.sys / "module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def stock_versions(machine: Machine, release: str) -> set[str]:
    """Of the driver's own nvidia.ko for a kernel, whatever the distribution calls it; empty without one."""
    found = set()
    for path in sorted((machine.modules / release).rglob("nvidia*.ko*")):
        # Links of other kernels' modules (weak-updates) count: they are what modprobe loads.
        if path.parent == machine.ours(release) or not CORE_MODULE.fullmatch(path.name):
            continue
        try:
            found.add(run(["modinfo", "-F", "version", path], deadline_s=MODINFO_DEADLINE_S).strip())
        except KmodError:
            continue  # Half written, or no module: modprobe would not load it either.
    return found - {""}


def require_same_driver(machine: Machine, tree: Tree, release: str) -> None:
    """Raises KmodError where the driver that is installed is another one: its libraries refuse this one."""
    found = stock_versions(machine, release)
    if found and tree.version not in found:
        raise KmodError(
            f"{tree.root} is driver {tree.version}, and what is installed for {release} is "
            f"{_listed(found)}: CUDA would not work with the patched modules; install driver "
            f"{tree.version} first, or name the source of the one that is installed"
        )


def require_fit(machine: Machine, version: str, release: str) -> None:
    """The same of the patched modules that are there. Raises KmodError."""
    found = stock_versions(machine, release)
    if found and version not in found:
        raise KmodError(
            f"the patched modules are driver {version}, and what is installed for {release} is "
            f"{_listed(found)}: CUDA would not work with them; `{program()} install` makes them anew"
        )


def _listed(versions: Iterable[str]) -> str:
    return ", ".join(sorted(versions))


def choose(machine: Machine, release: str, named: Path | None = None) -> Tree:
    """The source to patch. Raises KmodError, which lists what there is."""
    tree = find(named) if named else _only(machine, release)
    if proprietary(tree):
        raise KmodError(
            f"{tree.root} is the proprietary flavour of driver {tree.version}, the patch is for the open "
            f"one; {WHERE}"
        )
    if not (tree.root / CORE).is_file():
        raise KmodError(
            f"{tree.root} lacks {CORE}, which the vendor compiles: it comes with the driver's packages, and "
            "in a published source `make modules` makes it once"
        )
    return tree


def _only(machine: Machine, release: str) -> Tree:
    """The one of the driver that is installed, else of the one that is loaded; without any, the only one.

    After an upgrade what is loaded may be patched modules of the old driver, whose source has gone.
    """
    found = candidates(machine)
    installed, loaded = stock_versions(machine, release), {loaded_version(machine)} - {""}
    # Of several that are installed, the one that is loaded is the one that modprobe takes.
    wanted = installed & loaded or installed or loaded
    usable = [tree for tree in found if not proprietary(tree)] or found
    if wanted:
        usable = [tree for tree in usable if tree.version in wanted]
    if len(usable) == 1:
        return usable[0]
    listed = ", ".join(f"{tree.root} ({tree.version})" for tree in found)
    if not found:
        raise KmodError(f"no driver source below {machine.sources}: {WHERE}")
    if wanted and not usable:
        how = f"installed for {release}" if installed else "loaded"
        raise KmodError(f"driver {_listed(wanted)} is {how} and its source is not here ({listed}): {WHERE}")
    raise KmodError(f"several driver sources: {listed}; say which: {program()} install --tree FOLDER")
