"""Loaded driver modules and their users, read from /proc and /sys."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kmod.command import run
from kmod.errors import KmodError
from kmod.machine import Machine

DEVICE = re.compile(r"/dev/nvidia[^ ]*")
DRIVER = "nvidia"
MODINFO_DEADLINE_S = 30.0

# The driver's modules. Others have similar names (nvidia_fs, nvidia_wmi_ec_backlight). Optional modules come
# last: they are loaded again only if they were loaded.
ORDER = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")
ALWAYS = ("nvidia", "nvidia_uvm")
OWN_PARAMETER = "parameters/uvm_mpsd_mode"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A line of /proc/modules: `count` users, of which `holders` are modules."""

    name: str
    count: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class User:
    """A process that has the driver's device files open or mapped."""

    pid: int
    uid: int
    command: str
    devices: tuple[str, ...]
    mapped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """Users of the driver. `others`: foreign modules that depend on it; `hidden`: unreadable processes."""

    loaded: tuple[Loaded, ...]
    others: tuple[Loaded, ...]
    users: tuple[User, ...]
    hidden: int
    ours: bool

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Modules in use by something that is neither a module nor a visible process."""
        if self.users:
            return ()
        return tuple(module.name for module in self.loaded if module.count > len(module.holders))

    @property
    def busy(self) -> bool:
        return bool(self.users or self.others or self.unexplained)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "unexplained": list(self.unexplained), "busy": self.busy}

    def lines(self) -> list[str]:
        """Return one fact per line for people; empty if nothing is loaded."""
        lines = [f"module {_counted(module)}" for module in self.loaded]
        lines += [f"held by module {_counted(module)}" for module in self.others]
        lines += [_of(user) for user in self.users]
        lines += [
            f"module {name} has users that are not visible here (another PID namespace, or the display)"
            for name in self.unexplained
        ]
        if self.hidden:
            lines.append(f"{self.hidden} processes are not readable: run as root to see all")
        return lines


def _counted(module: Loaded) -> str:
    used = f", used by {' '.join(module.holders)}" if module.holders else ""
    return f"{module.name}: {module.count} users{used}"


def _of(user: User) -> str:
    mapped = f" mapped: {' '.join(user.mapped)}" if user.mapped else ""
    opened = f" open: {' '.join(user.devices)}" if user.devices else ""
    return f"process {user.pid} of uid {user.uid} ({user.command}){opened}{mapped}"


def is_drivers(name: str) -> bool:
    return name in ORDER


def parse(text: str) -> list[Loaded]:
    """/proc/modules."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and words[2].isdigit():
            found.append(Loaded(words[0], int(words[2]), tuple(filter(None, words[3].strip("-").split(",")))))
    return found


def _every(machine: Machine) -> list[Loaded]:
    try:
        return parse((machine.proc / "modules").read_text(encoding="ascii"))
    except OSError:
        return []


def listed(machine: Machine) -> list[Loaded]:
    """Return the loaded modules of the driver."""
    return [module for module in _every(machine) if is_drivers(module.name)]


def use(machine: Machine) -> Use:
    """Return all users, from every process's descriptors and mappings."""
    every = _every(machine)
    ours = [module for module in every if is_drivers(module.name)]
    names = {holder for module in ours for holder in module.holders}
    others = [module for module in every if module.name in names and not is_drivers(module.name)]
    numbers = _majors(machine)
    drm = _drm_nodes(machine)
    users: list[User] = []
    hidden = 0
    for process in _processes(machine):
        try:
            user = _user(process, numbers, drm)
        except PermissionError:
            hidden += 1
        except OSError:
            continue  # The process has ended meanwhile.
        else:
            users += [user] if user else []
    return Use(tuple(ours), tuple(others), tuple(users), hidden if ours else 0, is_ours(machine))


def is_ours(machine: Machine) -> bool:
    """Return whether the loaded nvidia_uvm is patched: it has our parameters then."""
    return (machine.sys / "module/nvidia_uvm" / OWN_PARAMETER).exists()


def another_build(machine: Machine, path: Path) -> bool:
    """Return whether the loaded nvidia_uvm has other sources than a file; False if unknown."""
    try:
        loaded = (machine.sys / "module/nvidia_uvm/srcversion").read_text(encoding="ascii").strip()
        there = run(["modinfo", "-F", "srcversion", path], deadline_s=MODINFO_DEADLINE_S).strip()
    except (OSError, KmodError):
        return False
    return bool(loaded and there) and loaded != there


def unload_order(loaded: Iterable[Loaded]) -> list[str]:
    """Return modules in an order in which each comes after those that depend on it."""
    left = {module.name: set(module.holders) for module in loaded}
    order: list[str] = []
    while left:
        free = sorted(name for name, holders in left.items() if not holders & left.keys())
        if not free:
            return [*order, *sorted(left)]
        order += free
        for name in free:
            del left[name]
    return order


def load_order(wanted: Iterable[str], have: Iterable[str]) -> list[str]:
    """Return nvidia and nvidia_uvm, and wanted optional modules, of those that exist."""
    names, there = set(wanted), set(have)
    return [name for name in ORDER if name in there and (name in names or name in ALWAYS)]


def _processes(machine: Machine) -> Iterator[Path]:
    for path in sorted(machine.proc.iterdir()) if machine.proc.is_dir() else []:
        if path.name.isdigit():
            yield path


def _user(process: Path, numbers: frozenset[int], drm: frozenset[str]) -> User | None:
    devices: set[str] = set()
    for descriptor in (process / "fd").iterdir():
        name = _device(descriptor, numbers, drm)
        if name:
            devices.add(name)
    try:
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        maps = ""
    mapped = {match for line in maps.splitlines() for match in DEVICE.findall(line)}
    if not devices and not mapped:
        return None
    return User(
        int(process.name),
        process.stat().st_uid,
        _command(process),
        tuple(sorted(devices)),
        tuple(sorted(mapped)),
    )


def _device(descriptor: Path, numbers: frozenset[int], drm: frozenset[str]) -> str:
    """Return the name of a driver device: by name, or by number if a container renamed it."""
    try:
        name = os.readlink(descriptor)
    except FileNotFoundError:
        return ""
    if DEVICE.fullmatch(name) or name in drm:
        return name
    if not name.startswith("/"):
        return ""
    try:
        status = descriptor.stat()
    except OSError:
        return ""
    return name if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in numbers else ""


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        text = b" ".join(words).decode(errors="replace").strip()
        return text[:120] or (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


def _majors(machine: Machine) -> frozenset[int]:
    try:
        text = (machine.proc / "devices").read_text(encoding="ascii")
    except OSError:
        return frozenset()
    return frozenset(int(number) for number, _ in re.findall(r"^ *(\d+) (nvidia\S*)$", text, re.MULTILINE))


def _drm_nodes(machine: Machine) -> frozenset[str]:
    """Return the display's device files that belong to a GPU of this driver."""
    found = set()
    for node in machine.sys.glob("class/drm/*/device/driver"):
        if node.resolve().name == DRIVER:
            found.add(f"/dev/dri/{node.parent.parent.name}")
    return frozenset(found)
