"""Where a machine keeps sources, modules, settings and its own state; all below one folder.

That folder is / but in tests. Below another one the programs that change the running kernel are looked for
there too: what a test starts can load nothing.
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
"""Where our modules lie below a kernel's folder. `updates` is searched before `kernel` without a setting."""


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
        """The release of the kernel that runs."""
        try:
            return (self.proc / "sys/kernel/osrelease").read_text(encoding="ascii").strip()
        except OSError:
            return os.uname().release

    @property
    def state(self) -> Path:
        """Until the next boot."""
        return self.root / "run/mpsd-kmod"

    @property
    def to_load(self) -> Path:
        """What an exchange of modules that goes on, or was killed, is to bring back."""
        return self.state / "to-load"

    def ours(self, release: str) -> Path:
        return self.modules / release / OURS

    def kernel_program(self, name: str) -> str:
        """modprobe or rmmod. Raises Unavailable below another root that has none of its own."""
        if self.real:
            return name
        path = self.root / "sbin" / name
        if not path.is_file():
            raise Unavailable(f"{path} is missing: below another root nothing of this machine's is loaded")
        return str(path)

    @property
    def depmod_command(self) -> list[str]:
        """Without the release."""
        where = [] if self.real else ["-b", str(self.root), "-C", str(self.depmod_settings.parent)]
        return ["depmod", *where]

    def depmod(self, release: str) -> None:
        """Writes anew which file a module's name stands for. Raises KmodError."""
        run([*self.depmod_command, release], deadline_s=DEPMOD_DEADLINE_S)


def must_be_root(machine: Machine, what: str) -> None:
    """Raises KmodError for somebody else on a real machine; below another root its own files do."""
    if machine.real and os.geteuid() != 0:
        raise KmodError(f"{what} needs root: sudo {shlex.join([program(), *(sys.argv[1:] or [what])])}")
