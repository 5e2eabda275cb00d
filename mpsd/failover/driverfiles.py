"""Driver files: three copies of the driver's library, for programs to load again.

The loader identifies a file by its inode, so a link would be the library that is already loaded. Each copy is
therefore a file of its own, written beside and renamed, and replaced after a driver update. The copies belong
to the daemon's user and no other user may write them, because programs of all users load them.

A folder is usable if every user that gets to the run directory can enter it and execute files there. On many
distributions /run is mounted noexec, so there are several candidates: the first usable one gets the copies.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpsd.failover.messages import TEXT_ROOM
from mpsd_client import driver as drivers

NAMES = ("libcuda-0.so.1", "libcuda-1.so.1", "libcuda-2.so.1")
"""For the driver instance in use, the one of the standby context, and the one left last."""
REMEDY = "set failover.copies to a folder that every user may enter, on a file system without noexec"
_NO_SOURCE = "set failover.driver to the driver's library"
_NOT_NEEDED = "normal on the simulated GPU; mpsd help quickstart shows fail-over on it"
_STAMP = "source.json"
SPACE_LEFT = 4 << 20
"""Free space [bytes] that copies leave on their file system."""
Stamp = list[str | int]


@dataclass(frozen=True, slots=True)
class DriverFilesState:
    """State of the driver files. `problem` and `remedy`: why there are none, else empty.

    `folder`: where they are. `bytes`: their size on disk. `passed_over`: why folders before it have none.
    `closed`: a directory on the way to them that keeps out users that can join, else empty.
    """

    source: str = ""
    bytes: int = 0
    problem: str = ""
    remedy: str = ""
    folder: str = ""
    passed_over: tuple[str, ...] = ()
    closed: str = ""

    @property
    def problem_text(self) -> str:
        """Return the problem with its remedy; empty without one."""
        return f"{self.problem}; {self.remedy}" if self.problem else ""


def candidates(configured: str, run_dir: Path, uid: int, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders to try, best first, for the daemon of this user.

    Programs in containers see the run directory, so it comes before the others. A folder outside it is named
    after it, so that two daemons do not share one.
    """
    name = f"copies-{zlib.crc32(os.fsencode(run_dir)):08x}"
    places = [Path("/var/cache/mpsd"), Path("/usr/local/lib/mpsd")]
    if uid != 0:
        places = [Path(environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/')}/.cache", "mpsd")]
    return [*([Path(configured)] if configured else []), run_dir / "copies", *(p / name for p in places)]


class DriverFiles:
    """The driver files in one of several folders. ensure() takes long: call it in a thread, one call at a
    time."""

    def __init__(
        self,
        folders: Sequence[Path],
        driver: str = "",
        open_like: Path | None = None,
        *,
        simulated: bool = False,
    ) -> None:
        """`driver`: the library to copy; empty: the one that the loader finds. `open_like`: a folder. If
        all users can enter it, they must be able to enter that of the copies. None: for one user alone."""
        self.folder = folders[0]
        self._folders = folders
        self._driver = driver
        self._open_like = open_like
        self._no_source = _NOT_NEEDED if simulated and not driver else _NO_SOURCE
        self._cleared = False

    def ensure(self) -> DriverFilesState:
        """Make missing or outdated copies. Never raises for a disk error."""
        source = self._driver or find_driver()
        if not source:
            self.remove()
            return DriverFilesState(
                problem=f"there is no {drivers.LIBRARY_NAME} to copy", remedy=self._no_source
            )
        source = os.path.realpath(source)
        if problem := _unreadable(source):
            self.remove()
            return DriverFilesState(source, problem=problem, remedy=self._no_source)
        reasons: dict[Path, str] = {}
        # A folder that is closed to users still serves the daemon's own user.
        for everyone in (True, False) if self.serves_all else (False,):
            # A folder in use stays in use: programs have been told of it.
            for folder in sorted(self._folders, key=lambda each: each != self.folder):
                try:
                    size = self._fill(folder, source, everyone=everyone)
                except OSError as error:
                    reasons.setdefault(folder, f"{folder}: {error.strerror}")
                    continue
                self._choose(folder)
                closed = _closed(folder) if self.serves_all else ""
                passed_over = tuple(why for other, why in reasons.items() if other != folder)
                return DriverFilesState(
                    source, size, folder=str(folder), passed_over=passed_over, closed=closed
                )
        self.remove()
        problem = f"cannot copy {source} ({'; '.join(reasons.values())})"
        return DriverFilesState(source, problem=problem, remedy=REMEDY)

    def _choose(self, folder: Path) -> None:
        """Use a folder, and clear the others of copies that they have from before."""
        if folder != self.folder or not self._cleared:
            for other in self._folders:
                if other != folder:
                    _clear(other)
        self.folder, self._cleared = folder, True

    def _fill(self, folder: Path, source: str, *, everyone: bool) -> int:
        """Make missing or outdated copies of `source` in a folder; return their size. Raises OSError."""
        self._prepare(folder, everyone=everyone)
        info = os.stat(source)
        stamp: Stamp = [source, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns]
        if not _is_current(folder, stamp):
            _check_space(folder, info.st_size)
            _make(folder, stamp, source)
        if why := loading_obstacle(folder / NAMES[0]):
            raise OSError(0, f"programs cannot load from it: {why}")
        return sum(os.stat(folder / name).st_blocks * 512 for name in NAMES)

    def _prepare(self, folder: Path, *, everyone: bool) -> None:
        """Make the folder. Raises OSError if programs (of every user, if `everyone`) could not load from it,
        or other users could write to it."""
        if len(os.fsencode(folder)) >= TEXT_ROOM:
            raise OSError(0, f"the path has more than {TEXT_ROOM - 1} bytes")
        missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
        there = missing[-1].parent if missing else folder
        if not os.path.isdir(there):
            raise OSError(0, f"{there} is not a directory")
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            raise OSError(0, "the file system is mounted noexec")
        if everyone and (closed := _closed(there)):
            raise OSError(0, f"{closed} is closed to other users")
        for place in reversed(missing):
            place.mkdir(mode=0o755)
            # The umask of mpsd must not close the way of other users.
            place.chmod(0o755)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise OSError(0, "the daemon does not own the folder, or other users may write to it")

    @property
    def serves_all(self) -> bool:
        """Return whether every user must be able to load the copies."""
        return self._open_like is not None and not _closed(self._open_like)

    def remove(self) -> None:
        """Remove all driver files. A program that has loaded one keeps it."""
        for folder in self._folders:
            _clear(folder)


def loading_obstacle(path: Path) -> str:
    """Return why this thread cannot load a library, with the rights that it has; empty if it can."""
    try:
        with open(path, "rb") as file:
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "the file is empty"
    return ""


def _unreadable(source: str) -> str:
    """Return why a library cannot be copied; empty if it can."""
    try:
        with open(source, "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
        why = "it is not a regular file"
    except OSError as error:
        why = error.strerror or str(error)
    return f"cannot copy {source}: {why}"


def _closed(folder: Path) -> str:
    """Return the first directory on the way into a folder that other users may not enter; else empty."""
    way = Path(os.path.realpath(folder))
    places = (*reversed(way.parents), way)
    return next((str(place) for place in places if not os.stat(place).st_mode & 0o001), "")


def _is_current(folder: Path, stamp: Stamp) -> bool:
    try:
        stamps = json.loads((folder / _STAMP).read_text())
        found = [os.lstat(folder / name) for name in NAMES]
    except (OSError, ValueError):
        return False
    whole = all(stat.S_ISREG(f.st_mode) and f.st_size == stamp[3] and f.st_nlink == 1 for f in found)
    return bool(stamps == stamp and whole)


def _check_space(folder: Path, size: int) -> None:
    """Raise OSError if the copies of a file of this size would not fit: the run directory may be small, and
    mpsd needs space there to switch paths."""
    there = sum(path.stat().st_size for name in NAMES if (path := folder / name).is_file())
    # Each copy is complete before it replaces the earlier one.
    needed = max(0, len(NAMES) * size - there) + size + SPACE_LEFT
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    if free < needed + SPACE_LEFT:
        raise OSError(
            0, f"three copies need {(needed + SPACE_LEFT) >> 20} MiB, and {free >> 20} MiB are free"
        )


def _make(folder: Path, stamp: Stamp, source: str) -> None:
    (folder / _STAMP).unlink(missing_ok=True)
    for name in NAMES:
        draft = folder / f".{name}.new"
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as target, open(source, "rb") as origin:
            shutil.copyfileobj(origin, target, 1 << 20)
            target.flush()
            os.fchmod(fd, 0o644)
        os.replace(draft, folder / name)
    # Written last: incomplete copies have no stamp and are made again.
    draft = folder / f".{_STAMP}.new"
    draft.write_text(json.dumps(stamp))
    os.replace(draft, folder / _STAMP)


def _clear(folder: Path) -> None:
    """Remove the driver files of a folder, and with the last file the folder."""
    found = [path for name in (_STAMP, *NAMES) for path in (folder / name, folder / f".{name}.new")]
    if not (found := [path for path in found if os.path.lexists(path)]):
        return
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def find_driver() -> str:
    """Return the libcuda.so.1 that a program would load, whatever the daemon's environment says; empty if
    there is none."""
    return drivers.find_driver({}, None) or ""
