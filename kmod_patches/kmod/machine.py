"""Folders of a machine: sources, modules, settings and state, all below one root folder.

The root is / except in tests. Below another root, programs that change the running kernel are searched there
too, so a test cannot load anything.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from kmod.command import run
from kmod.errors import KmodError, Unavailable, program

DEPMOD_DEADLINE_S = 300.0
OURS = Path("updates/mpsd")
"""Our folder below a kernel's. depmod searches `updates` before `kernel` without any setting."""


@dataclass(frozen=True, slots=True)
class Machine:
    root: Path = Path("/")

    @property
    def real(self) -> bool:
        return self.root == Path("/")

    @property
    def sources(self) -> Path:
        return self.root / "usr/src"

    @property
    def modules(self) -> Path:
        return self.root / "lib/modules"

    @property
    def dkms_tree(self) -> Path:
        return self.root / "var/lib/dkms"

    @property
    def depmod_settings(self) -> Path:
        return self.root / "etc/depmod.d/mpsd.conf"

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    @property
    def running(self) -> str:
        """Release of the running kernel."""
        try:
            return (self.proc / "sys/kernel/osrelease").read_text(encoding="ascii").strip()
        except OSError:
            return os.uname().release

    @property
    def state(self) -> Path:
        """Folder of state until the next boot."""
        return self.root / "run/mpsd-kmod"

    @property
    def to_load(self) -> Path:
        """Modules that an exchange in progress, or an interrupted one, must load again."""
        return self.state / "to-load"

    def ours(self, release: str) -> Path:
        return self.modules / release / OURS

    def kernel_program(self, name: str) -> str:
        """Return modprobe or rmmod. Raises Unavailable below another root without them."""
        if self.real:
            return name
        path = self.root / "sbin" / name
        if not path.is_file():
            raise Unavailable(f"{path} is missing: below another root this machine's programs are not used")
        return str(path)

    @property
    def depmod_command(self) -> list[str]:
        """The depmod command without the release."""
        where = [] if self.real else ["-b", str(self.root), "-C", str(self.depmod_settings.parent)]
        return ["depmod", *where]

    def depmod(self, release: str) -> None:
        """Update the index of module names. Raises KmodError."""
        run([*self.depmod_command, release], deadline_s=DEPMOD_DEADLINE_S)


def must_be_root(machine: Machine, what: str) -> None:
    """Raise KmodError for another user on a real machine. Below another root, file permissions decide."""
    if machine.real and os.geteuid() != 0:
        raise KmodError(f"{what} needs root: sudo {shlex.join([program(), *(sys.argv[1:] or [what])])}")
