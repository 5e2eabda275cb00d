"""The patched modules' files below the kernels' folders: in place, disabled, or where dkms installed them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from kmod.command import undisturbed
from kmod.dkms import PREFIX
from kmod.machine import OURS, Machine

LEFT_OVER = re.compile(rf"{PREFIX}nvidia[\w-]*\.ko(\.\w+)?")
ASIDE = ".off"
"""Suffix of a disabled module's file: depmod ignores it."""


def kernels(machine: Machine) -> list[str]:
    """Return kernels that have files of ours, or a modules.dep that still names them."""
    if not machine.modules.is_dir():
        return []
    return sorted(
        folder.name
        for folder in machine.modules.iterdir()
        if folder.is_dir() and (files(machine, folder.name) or _named(folder / "modules.dep"))
    )


def put_aside(machine: Machine, release: str) -> None:
    """Disable our modules, so that depmod finds the driver's own. Does nothing without ours."""
    if not files(machine, release):
        return
    with undisturbed():
        for path in machine.ours(release).glob("*.ko*"):
            if path.suffix != ASIDE:
                path.rename(path.with_name(path.name + ASIDE))
        machine.depmod(release)


def files(machine: Machine, release: str) -> list[Path]:
    """Return our files below a kernel's folder: in place, or where dkms installed them."""
    kernel = machine.modules / release
    found = [machine.ours(release)] if machine.ours(release).exists() else []
    for part in ("updates", "extra"):
        for path in (kernel / part).rglob(f"{PREFIX}nvidia*"):
            if LEFT_OVER.fullmatch(path.name):
                found.append(path)
    return found


def remove_files(machine: Machine, releases: Iterable[str]) -> None:
    for release in releases:
        for path in files(machine, release):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _named(modules_dep: Path) -> bool:
    try:
        text = modules_dep.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f"{OURS}/" in text or f"/{PREFIX}nvidia" in text
