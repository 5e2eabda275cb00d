"""Search for the driver's source, where the distribution or the driver's installer put it for DKMS."""

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
"""Name of our package for DKMS; its source folder is PACKAGE-VERSION."""

PROPRIETARY = re.compile(r'MODULE_LICENSE\s*\(\s*"NVIDIA"\s*\)')
CORE_MODULE = re.compile(r"nvidia(?!fb|[-_](wmi|fs)\b)(?!.*[-_](uvm|modeset|drm|peermem))[\w.-]*\.ko(\.\w+)?")
"""Names of nvidia.ko in distributions: nvidia-current-open.ko, nvidia-tesla.ko.xz ..."""

MODINFO_DEADLINE_S = 30.0
CORE = Path("nvidia/nv-kernel.o_binary")
WHERE = (
    "install the driver's open kernel modules with their source (Debian: nvidia-open-kernel-dkms; the "
    "driver's installer: --kernel-module-type=open), or name a folder: install --tree FOLDER"
)


def candidates(machine: Machine) -> list[Tree]:
    """Return every driver source below /usr/src except ours, proprietary ones too."""
    found = []
    folders = sorted(machine.sources.glob("nvidia*")) if machine.sources.is_dir() else []
    for folder in folders:
        try:
            found.append(find(folder))
        except UnknownTree:
            continue
    return found


def proprietary(tree: Tree) -> bool:
    """Return whether nvidia.ko is proprietary: the kernel denies symbols to modules that depend on it."""
    return any(PROPRIETARY.search(read(path)) for path in sorted((tree.root / "nvidia").glob("*.c")))


def loaded_version(machine: Machine) -> str:
    """Return the version of the loaded nvidia.ko, or ""."""
    try:
        return (machine.sys / "module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def stock_versions(machine: Machine, release: str) -> set[str]:
    """Return the versions of a kernel's stock nvidia.ko under any distribution's name; empty without one."""
    found = set()
    for path in sorted((machine.modules / release).rglob("nvidia*.ko*")):
        # Includes links to other kernels' modules (weak-updates), because modprobe loads them.
        if path.parent == machine.ours(release) or not CORE_MODULE.fullmatch(path.name):
            continue
        try:
            found.add(run(["modinfo", "-F", "version", path], deadline_s=MODINFO_DEADLINE_S).strip())
        except KmodError:
            continue  # Incomplete or not a module: modprobe would not load it either.
    return found - {""}


def require_same_driver(machine: Machine, tree: Tree, release: str) -> None:
    """Raise KmodError if the installed driver is another version: its libraries refuse these modules."""
    found = stock_versions(machine, release)
    if found and tree.version not in found:
        raise KmodError(
            f"{tree.root} is driver {tree.version}, but {_listed(found)} is installed for {release}: "
            f"CUDA would not work with the patched modules; install driver {tree.version} first, or name "
            "the source of the installed driver"
        )


def require_fit(machine: Machine, version: str, release: str) -> None:
    """Raise KmodError if the existing patched modules have another version than the driver."""
    found = stock_versions(machine, release)
    if found and version not in found:
        raise KmodError(
            f"the patched modules are driver {version}, but {_listed(found)} is installed for {release}: "
            f"CUDA would not work with them; run `{program()} install` to build them again"
        )


def _listed(versions: Iterable[str]) -> str:
    return ", ".join(sorted(versions))


def choose(machine: Machine, release: str, named: Path | None = None) -> Tree:
    """Return the source to patch. Raises KmodError with a list of the sources found."""
    tree = find(named) if named else _only(machine, release)
    if proprietary(tree):
        raise KmodError(
            f"{tree.root} is the proprietary variant of driver {tree.version}, but the patch needs the open "
            f"variant; {WHERE}"
        )
    if not (tree.root / CORE).is_file():
        raise KmodError(
            f"{tree.root} lacks {CORE}, which the vendor compiles: it is part of the driver's packages; in "
            "a published source, `make modules` builds it"
        )
    return tree


def _only(machine: Machine, release: str) -> Tree:
    """Return the source of the installed driver, else of the loaded one, else the only source.

    After an upgrade, the loaded modules may be patched ones of the old driver, without a source.
    """
    found = candidates(machine)
    installed, loaded = stock_versions(machine, release), {loaded_version(machine)} - {""}
    # Of several installed drivers, modprobe takes the loaded one.
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
        raise KmodError(f"driver {_listed(wanted)} is {how}, but its source is missing ({listed}): {WHERE}")
    raise KmodError(f"several driver sources: {listed}; choose one: {program()} install --tree FOLDER")
