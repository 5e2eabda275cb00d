"""RUN/copies, as a rule: three real copies of the driver, for programs to load as further libcudas.

The loader knows a file by its inode: a link would be the very library that is loaded already. So each is a
file of its own, written beside and renamed, and made again when the driver was replaced. They belong to the
daemon's user and nobody else may write them, for programs of all users load what lies there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from mpsd_client import driver as drivers

NAMES = ("libcuda-0.so.1", "libcuda-1.so.1", "libcuda-2.so.1")
"""One that is in use, the standby's, and one that was just left."""
_STAMP = "source.json"
Stamp = list[str | int]


@dataclass(frozen=True, slots=True)
class Copied:
    """`problem`: why there are no copies; empty when there are. `bytes`: what they take on disk."""

    source: str = ""
    bytes: int = 0
    problem: str = ""


class Copies:
    """The folder with the copies. `ensure` takes long: call it from a thread, one at a time."""

    def __init__(self, folder: Path, driver: str = "") -> None:
        """`driver`: the library to copy; empty: what the loader would find."""
        self.folder = folder
        self._driver = driver

    def ensure(self) -> Copied:
        """Make what is missing or out of date; never raises for the state of the disk."""
        source = self._driver or find_driver()
        if not source:
            self.remove()
            return Copied(problem=f"no {drivers.LIBRARY_NAME} was found to copy: set failover.driver")
        try:
            return self._ensure(os.path.realpath(source))
        except OSError as error:
            self.remove()
            return Copied(source, problem=f"{source} is not copied to {self.folder}: {error.strerror}")

    def _ensure(self, source: str) -> Copied:
        """Raises OSError."""
        self._prepare()
        with open(source, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise OSError(0, "it is no file")
            stamp: Stamp = [source, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns]
            if not self._is_current(stamp):
                self._make(stamp, source)
        return Copied(source, sum(os.stat(self.folder / n).st_blocks * 512 for n in NAMES))

    def _is_current(self, stamp: Stamp) -> bool:
        try:
            kept = json.loads((self.folder / _STAMP).read_text())
            found = [os.lstat(self.folder / name) for name in NAMES]
        except (OSError, ValueError):
            return False
        whole = all(stat.S_ISREG(f.st_mode) and f.st_size == stamp[3] and f.st_nlink == 1 for f in found)
        return bool(kept == stamp and whole)

    def _make(self, stamp: Stamp, source: str) -> None:
        (self.folder / _STAMP).unlink(missing_ok=True)
        for name in NAMES:
            draft = self.folder / f".{name}.new"
            draft.unlink(missing_ok=True)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as target, open(source, "rb") as origin:
                shutil.copyfileobj(origin, target, 1 << 20)
                target.flush()
                os.fchmod(fd, 0o644)
            os.replace(draft, self.folder / name)
        # Last: what is not whole has no stamp, and is made again.
        draft = self.folder / f".{_STAMP}.new"
        draft.write_text(json.dumps(stamp))
        os.replace(draft, self.folder / _STAMP)

    def _prepare(self) -> None:
        """Raises OSError for a folder in which programs could not load, or others could write."""
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o755)
            os.chmod(self.folder, 0o755)
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise OSError(0, "the folder is not the daemon's own, or others may write there")
        if os.statvfs(self.folder).f_flag & os.ST_NOEXEC:
            raise OSError(
                0, "it is mounted noexec, so no library can be loaded: set failover.copies elsewhere"
            )

    def remove(self) -> None:
        """None of ours is left; who has loaded a copy keeps it."""
        for name in (_STAMP, *NAMES):
            for path in (self.folder / name, self.folder / f".{name}.new"):
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def find_driver() -> str:
    """The libcuda.so.1 that a program would load, whatever is in our environment; empty: there is none."""
    return drivers.find_driver({}, None) or ""
