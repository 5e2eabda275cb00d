"""The guest's root file system: an archive of this interpreter, the checks with their imports, and the
modules.

To find the files that Python needs, the checks are imported here in an isolated interpreter, which reports
the origin of everything. The archive has cpio's "newc" format, which the kernel unpacks at boot.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from kmod.command import run
from kmod.errors import KmodError

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = (REPOSITORY, REPOSITORY / "kmod_patches")
GUEST_ROOT = "/mpsd"
GUEST_MAIN = f"{GUEST_ROOT}/kmod_patches/emulator/guest/init.py"
MODULES = "/modules"
FOLDERS = ("dev", "proc", "sys", "tmp")
CONSOLE = os.makedev(5, 1)
DEADLINE_S = 60.0
ASK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import emulator.guest.init
names = "__file__", "__cached__"
files = {getattr(module, name, None) for module in list(sys.modules.values()) for name in names}
print(json.dumps(sorted(files - {None})))
"""


def interpreter() -> Path:
    """Return the interpreter itself, not a virtual environment's link to it."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def write(target: Path, modules: Mapping[str, Path]) -> None:
    """Write an uncompressed initramfs with the checks and kernel modules, by their names below /modules.

    Raises KmodError.
    """
    files = python_files()
    files |= {f"{MODULES}/{name}": path for name, path in modules.items()}
    with target.open("wb") as out:
        archive = Archive()
        for name in FOLDERS:
            archive.folder(f"/{name}")
        archive.device("/dev/console", CONSOLE)
        for name, path in sorted(files.items()):
            archive.file(name, path)
        out.write(archive.end())


def python_files() -> dict[str, Path]:
    """Return each file of the interpreter, its libraries and the checks, by its name in the guest."""
    python = interpreter()
    roots = json.dumps([str(root) for root in ROOTS])
    said = run([python, "-I", "-S", "-c", ASK, roots], deadline_s=DEADLINE_S)
    sources = [Path(name) for name in json.loads(said) if Path(name).is_file()]
    shared = [python, *(path for path in sources if path.suffix == ".so")]
    files = {_inside(path): path for path in [python, *sources]}
    for binary in shared:
        files |= {str(path): path for path in libraries(binary)}
    if GUEST_MAIN not in files:
        raise KmodError(f"the checks were imported from outside {REPOSITORY}")
    return files


def libraries(binary: Path) -> list[Path]:
    """Return the shared libraries that the loader uses for a binary, with the loader itself."""
    found = []
    for line in run(["ldd", binary], deadline_s=DEADLINE_S).splitlines():
        words = [word for word in line.split() if word.startswith("/")]
        found += [Path(word) for word in words[-1:]]
    return found


def _inside(path: Path) -> str:
    """Return a file's name in the guest: the repository is at /mpsd, everything else where it is here."""
    if path.is_relative_to(REPOSITORY):
        return f"{GUEST_ROOT}/{path.relative_to(REPOSITORY)}"
    return str(path)


class Archive:
    """A cpio archive under construction; missing folders on the way to a file are added."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._names: set[str] = set()

    def folder(self, name: str) -> None:
        if name != "/" and name not in self._names:
            self.folder(os.path.dirname(name))
            self._add(name, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, path: Path) -> None:
        """Add a file's content, mode and time; Python checks a compiled file against its source's time."""
        self.folder(os.path.dirname(name))
        found = path.stat()
        self._add(name, found.st_mode, path.read_bytes(), time=int(found.st_mtime))

    def device(self, name: str, number: int) -> None:
        self.folder(os.path.dirname(name))
        self._add(name, stat.S_IFCHR | 0o600, b"", device=number)

    def end(self) -> bytes:
        """Return the whole archive."""
        self._add("/TRAILER!!!", 0, b"")
        return b"".join(self._parts)

    def _add(self, name: str, mode: int, content: bytes, *, time: int = 0, device: int = 0) -> None:
        self._names.add(name)
        label = name.lstrip("/").encode() + b"\0"
        fields = (
            *(len(self._names), mode, 0, 0, 1, time, len(content), 0, 0),
            *(os.major(device), os.minor(device), len(label), 0),
        )
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + label
        self._parts += [head, bytes(-len(head) % 4), content, bytes(-len(content) % 4)]
