"""The directory layout of a daemon: run directory, domains' directories, stable paths, locks.

    RUN/lock  RUN/mpsd.sock  RUN/vault.sock  RUN/failover.sock  RUN/keeper.sock  RUN/state.json
    RUN/d/DOMAIN      pipe directory of one domain
    RUN/copies        driver files, for fail-over participants (mpsd.failover.driverfiles)
    RUN/room          a reserve of one page, released if the disk is full when a stable path must change
    RUN/s/SLOT        the stable path: a symbolic link to RUN/d/DOMAIN, replaced by rename
    LOG/DOMAIN        logs of that domain's control daemon and servers

A client that follows a link reaches the old domain or the new one: rename(2) is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from mpsd.base.errors import AlreadyRunningError, ConfigError, MpsdError, StoreError
from mpsd.config.schema import Config

_LOCKS = ("lock", ".mpsd.lock")
LOGS_KEPT = 32
"""Number of ended domains with logs that are kept."""
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_SHARED = ("d", "s")
_OPEN = 0o755
RESERVE_BYTES = 4096
"""Size [bytes] of the reserve file: a link takes at most a page and an inode on any file system."""


class Layout:
    """Paths under one run directory and one log directory."""

    def __init__(self, run_dir: Path, log_dir: Path, state_dir: Path) -> None:
        self.run_dir = run_dir
        self.log_dir = log_dir
        self.state_dir = state_dir
        self._made: list[Path] = []

    @classmethod
    def of(cls, config: Config) -> Layout:
        return cls(Path(config.run_dir), Path(config.log_dir), Path(config.state_dir))

    @property
    def socket(self) -> Path:
        return self.run_dir / "mpsd.sock"

    @property
    def vault_socket(self) -> Path:
        return self.run_dir / "vault.sock"

    @property
    def failover_socket(self) -> Path:
        return self.run_dir / "failover.sock"

    @property
    def keeper_socket(self) -> Path:
        return self.run_dir / "keeper.sock"

    @property
    def _reserve_file(self) -> Path:
        return self.run_dir / "room"

    @property
    def state_file(self) -> Path:
        return self.run_dir / "state.json"

    def pipe_dir(self, domain: str) -> Path:
        return self.run_dir / "d" / domain

    def domain_log_dir(self, domain: str) -> Path:
        return self.log_dir / domain

    def slot_path(self, slot: str) -> Path:
        return self.run_dir / "s" / slot

    def check(self) -> None:
        """Check what `prepare` would refuse, and create nothing. Raise ConfigError with the directory."""
        for path in self._modes():
            _check_directory(path)

    def prepare(self) -> None:
        """Create the directories, all or none. Raise ConfigError with the directory that failed."""
        self.check()
        for path, mode in self._modes().items():
            try:
                self._make(path, mode)
            except OSError as error:
                self.undo()
                raise _cannot_make(path, error) from error
        try:
            self.open_directories()
        except OSError as error:
            raise _cannot_make(self.run_dir, error) from error

    def undo(self) -> None:
        """Remove the directories that `prepare` created and that hold only locks, after a refused start.

        Call it before the locks are released, so that no other daemon has started there.
        """
        for path in reversed(self._made):
            for name in _LOCKS:
                with contextlib.suppress(OSError):
                    (path / name).unlink()
            with contextlib.suppress(OSError):
                path.rmdir()
        self._made.clear()

    def _modes(self) -> dict[Path, int]:
        below = {self.run_dir / name: _OPEN for name in _SHARED}
        return {self.run_dir: _OPEN, **below, self.log_dir: 0o750, self.state_dir: 0o750}

    def open_directories(self) -> None:
        """Open the directories that all clients pass, and make them again if they are gone. Raise OSError."""
        for name in _SHARED:
            path = self.run_dir / name
            path.mkdir(exist_ok=True)
            if path.stat().st_mode & 0o777 != _OPEN:
                path.chmod(_OPEN)

    def _make(self, path: Path, mode: int) -> None:
        """Create a directory and its missing parents, and remember them for `undo`. Raise OSError."""
        if path.is_dir():
            return
        missing = [path]
        while not os.path.lexists(missing[-1].parent):
            missing.append(missing[-1].parent)
        for each in reversed(missing):
            try:
                each.mkdir(mode=mode if each is path else _OPEN)
            except FileExistsError:
                if not each.is_dir():
                    raise
            else:
                self._made.append(each)
                # The umask of mpsd must not close the way of other users.
                each.chmod(mode if each is path else _OPEN)

    def lock(self) -> list[int]:
        """Lock the three directories for the life of this process; return close-on-exec descriptors.

        The log directory is included because domains are numbered and followed there.
        Raise AlreadyRunningError if another daemon holds a lock.
        """
        held = [self._lock(self.run_dir / "lock")]
        try:
            for each in sorted({path.resolve() for path in (self.log_dir, self.state_dir)}):
                held.append(self._lock(each / ".mpsd.lock", full=True))
        except MpsdError:
            for fd in held:
                os.close(fd)
            raise
        return held

    @staticmethod
    def _lock(path: Path, *, full: bool = False) -> int:
        """Lock a file and write the pid into it. `full`: on a full disk lock without the pid."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if not full or error.errno not in DISK_FULL_ERRORS:
                raise ConfigError(
                    f"cannot open {path}: {error.strerror}", remedy="run as the owner of that directory"
                ) from error
            # Lock the directory itself instead.
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read_pid_text(path) or "unknown"
            os.close(fd)
            raise AlreadyRunningError(
                f"another mpsd (pid {owner}) runs on {path.parent}",
                remedy="stop it first, or set another run_dir, log_dir and state_dir in a file for --config",
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError as error:
            if full:
                return fd
            os.close(fd)
            raise StoreError(
                f"cannot write {path}: {error.strerror}",
                remedy="free disk space there, or set another run_dir",
            ) from error
        return fd

    def switch(self, slot: str, domain: str) -> None:
        """Point the slot's stable path at a domain, atomically; use the reserve if the disk is full.

        Raise OSError.
        """
        path, target = self.slot_path(slot), self.pipe_dir(domain)
        try:
            replace_link(path, target)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS or not self._reserve_file.exists():
                raise
            self._reserve_file.unlink()
            replace_link(path, target)

    def create_reserve(self) -> str:
        """Create the reserve, with which a stable path can change on a full disk. Return an error, or ""."""
        if self._reserve_file.exists():
            return ""
        draft = self._reserve_file.with_suffix(".new")
        try:
            draft.write_bytes(b"\0" * RESERVE_BYTES)
            draft.rename(self._reserve_file)
        except OSError as error:
            draft.unlink(missing_ok=True)
            return f"cannot write {draft}: {error.strerror}"
        return ""

    def domain_of_slot(self, slot: str) -> str | None:
        """Return the domain that a slot's stable path leads to; None if it leads nowhere."""
        try:
            return Path(os.readlink(self.slot_path(slot))).name
        except OSError:
            return None

    def drop(self, slot: str) -> None:
        """Remove a slot's stable path. Raise OSError."""
        self.slot_path(slot).unlink(missing_ok=True)

    def known_domains(self) -> list[str]:
        """Return the domains that have a pipe directory, also those of an earlier daemon."""
        return [f"d{number}" for number in sorted(_numbers(self.run_dir / "d"))]

    def last_domain(self) -> int:
        """Return the highest domain number that has a pipe directory or logs; 0 if none has."""
        return max((*_numbers(self.run_dir / "d"), *_numbers(self.log_dir)), default=0)

    def log_space(self) -> int:
        """Return the free bytes on the file system of control daemons' and servers' logs."""
        info = os.statvfs(self.log_dir)
        return info.f_bfree * info.f_frsize

    def forget_domain(self, domain: str) -> None:
        """Remove an ended domain's pipe directory, and logs of all but the last LOGS_KEPT ended domains."""
        shutil.rmtree(self.pipe_dir(domain), ignore_errors=True)
        ended = sorted(_numbers(self.log_dir) - _numbers(self.run_dir / "d"))
        for number in ended[:-LOGS_KEPT]:
            shutil.rmtree(self.domain_log_dir(f"d{number}"), ignore_errors=True)


def _read_pid_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")[:32].strip()
    except OSError:
        return ""


def _numbers(directory: Path) -> set[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return set()
    return {int(name[1:]) for name in names if name[:1] == "d" and name[1:].isdecimal()}


def replace_link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, atomically, also if it is one already."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    os.replace(draft, path)


def claim_default_path(path: Path, target: Path) -> str:
    """Serve libcuda's default pipe directory through a link. Return an error; empty if done.

    A path that is not mpsd's own link is never replaced: another control daemon may serve it.
    """
    if path.is_symlink():
        current = Path(os.readlink(path))
        if current.exists() and current.parent != target.parent:
            return f"{path} leads to {current}, which does not belong to this mpsd; remove the link"
    elif path.exists():
        try:
            path.rmdir()
        except OSError:
            return f"{path} is not empty: another control daemon may use it; stop that daemon and remove it"
    try:
        replace_link(path, target)
    except OSError as error:
        return f"cannot create the link {path}: {error.strerror}"
    return ""


def _cannot_make(path: Path, error: OSError) -> ConfigError:
    remedy = (
        "run as root, or set run_dir, log_dir and state_dir in a file for --config to directories of yours"
    )
    if isinstance(error, FileExistsError | NotADirectoryError):
        remedy = "a file is in the way: set another run_dir, log_dir and state_dir"
    return ConfigError(f"cannot create directory {path}: {error.strerror}", remedy=remedy)


def _check_directory(path: Path) -> None:
    """Check that the directory exists and can be trusted, or can be created. Raise ConfigError."""
    place = path
    while not os.path.lexists(place):
        place = place.parent
    try:
        place.stat()
    except OSError as error:
        raise _cannot_make(path, error) from error
    if not place.is_dir():
        code = errno.EEXIST if place == path else errno.ENOTDIR
    elif not os.access(place, os.W_OK | os.X_OK):
        code = errno.EACCES
    else:
        code = 0
    if code and place == path and place.is_dir():
        raise ConfigError(
            f"cannot write to {path}: {os.strerror(code)}", remedy="run as the owner of that directory"
        )
    if code:
        raise _cannot_make(path, OSError(code, os.strerror(code)))
    if place == path:
        _check_trusted(path)


def _check_trusted(path: Path) -> None:
    """Check that no other user can place links or sockets in a directory. Raise ConfigError."""
    info = path.stat()
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to uid {info.st_uid}", remedy="remove it, or configure another directory"
        )
    if info.st_mode & 0o002:
        raise ConfigError(
            f"{path} is writable for all users (mode {info.st_mode & 0o7777:o})",
            remedy=f"run chmod o-w {path}, or configure another directory",
        )
