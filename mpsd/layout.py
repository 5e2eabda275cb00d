"""Where a daemon keeps things: the run directory, domains' directories, the stable paths.

    RUN/lock  RUN/mpsd.sock  RUN/vault.sock  RUN/failover.sock  RUN/keeper.sock  RUN/state.json
    RUN/d/DOMAIN      pipe directory of one domain
    RUN/copies        copies of the driver, for programs that can fail over
    RUN/room          nothing; given up where the disk is full and a path has to be replaced
    RUN/s/SLOT        the stable path: a symbolic link to RUN/d/DOMAIN, replaced by rename
    LOG/DOMAIN        logs of that domain's control daemon and servers

A client that follows a link sees the old domain or the new one, never nothing: rename(2) is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from mpsd.config import Config
from mpsd.errors import AlreadyRunningError, ConfigError, MpsdError, StoreError

_LOCKS = ("lock", ".mpsd.lock")
# Logs of so many ended domains are kept.
LOGS_KEPT = 32
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# One page and one inode: what a link takes on any file system.
ROOM = 4096


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
    def copies_dir(self) -> Path:
        return self.run_dir / "copies"

    @property
    def keeper_socket(self) -> Path:
        return self.run_dir / "keeper.sock"

    @property
    def _room(self) -> Path:
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
        """What `prepare` would refuse, with nothing made. Raises ConfigError naming the directory."""
        for path in self._modes():
            _check_place(path)

    def prepare(self) -> None:
        """Make the directories, all or none. Raises ConfigError naming the one that cannot be made."""
        self.check()
        for path, mode in self._modes().items():
            try:
                self._make(path, mode)
            except OSError as error:
                self.undo()
                raise _cannot_make(path, error) from error

    def undo(self) -> None:
        """Remove those directories that `prepare` made and that hold nothing but locks: the start is refused.

        To be called before the locks are given back, so that nobody else has begun there.
        """
        for path in reversed(self._made):
            for name in _LOCKS:
                with contextlib.suppress(OSError):
                    (path / name).unlink()
            with contextlib.suppress(OSError):
                path.rmdir()
        self._made.clear()

    def _modes(self) -> dict[Path, int]:
        below = {self.run_dir / "d": 0o755, self.run_dir / "s": 0o755}
        return {self.run_dir: 0o755, **below, self.log_dir: 0o750, self.state_dir: 0o750}

    def _make(self, path: Path, mode: int) -> None:
        """Raises OSError."""
        if path.is_dir():
            return
        missing = [path]
        while not os.path.lexists(missing[-1].parent):
            missing.append(missing[-1].parent)
        for each in reversed(missing):
            try:
                each.mkdir(mode=mode if each is path else 0o777)
            except FileExistsError:
                if not each.is_dir():
                    raise
            else:
                self._made.append(each)

    def lock(self) -> list[int]:
        """Own the three directories for the life of this process: locked, close-on-exec descriptors.

        Logs are where domains are numbered and followed, so two daemons may not share them either.
        Raises AlreadyRunningError when another daemon has one.
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
        """`full`: the disk may be, and then nothing there says whose it is."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if not full or error.errno not in NO_ROOM:
                raise ConfigError(
                    f"cannot open {path}: {error.strerror}", remedy="run as the owner of that directory"
                ) from error
            # The directory itself, with nothing written.
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _first_words(path) or "unknown"
            os.close(fd)
            raise AlreadyRunningError(
                f"another mpsd (pid {owner}) runs on {path.parent}",
                remedy="stop it first, or give this one another run_dir, log_dir and state_dir",
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError as error:
            if full:
                return fd
            os.close(fd)
            raise StoreError(
                f"cannot write {path}: {error.strerror}", remedy="make room there, or set another run_dir"
            ) from error
        return fd

    def switch(self, slot: str, domain: str) -> None:
        """Let the slot's stable path lead to a domain, atomically; on a full disk in the room that was set
        aside. Raises OSError."""
        path, target = self.slot_path(slot), self.pipe_dir(domain)
        try:
            replace_link(path, target)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._room.exists():
                raise
            self._room.unlink()
            replace_link(path, target)

    def set_room_aside(self) -> str:
        """So that on a full disk new clients can still be led away from a fault. Why not; empty when done."""
        if self._room.exists():
            return ""
        draft = self._room.with_suffix(".new")
        try:
            draft.write_bytes(b"\0" * ROOM)
            draft.rename(self._room)
        except OSError as error:
            draft.unlink(missing_ok=True)
            return (
                f"{self.run_dir}: {error.strerror}; make room there, or paths cannot be led away from a fault"
            )
        return ""

    def leads_to(self, slot: str) -> str | None:
        """The domain that a slot's stable path leads to; None: to none."""
        try:
            return Path(os.readlink(self.slot_path(slot))).name
        except OSError:
            return None

    def drop(self, slot: str) -> None:
        """Remove a slot's stable path: it is given up. Raises OSError."""
        self.slot_path(slot).unlink(missing_ok=True)

    def known_domains(self) -> list[str]:
        """Names of the domains that have a pipe directory, whoever made it."""
        return [f"d{number}" for number in sorted(_numbers(self.run_dir / "d"))]

    def last_domain(self) -> int:
        """The highest number that a domain here ever had, as far as anything is left of it."""
        return max((*_numbers(self.run_dir / "d"), *_numbers(self.log_dir)), default=0)

    def log_space(self) -> int:
        """Free bytes where control daemons and servers log."""
        info = os.statvfs(self.log_dir)
        return info.f_bfree * info.f_frsize

    def forget_domain(self, domain: str) -> None:
        """Remove the directory of a domain that has ended. Its logs stay, with those of the last few."""
        shutil.rmtree(self.pipe_dir(domain), ignore_errors=True)
        ended = sorted(_numbers(self.log_dir) - _numbers(self.run_dir / "d"))
        for number in ended[:-LOGS_KEPT]:
            shutil.rmtree(self.domain_log_dir(f"d{number}"), ignore_errors=True)


def _first_words(path: Path) -> str:
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
    """Make `path` a symbolic link to `target`, whether or not it was one before."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    os.replace(draft, path)


def claim_default_path(path: Path, target: Path) -> str:
    """Serve libcuda's default pipe directory through a link. Returns why not; empty when done.

    Nothing that is not a link of ours is ever moved away: another control daemon may live in it.
    """
    if path.is_symlink():
        current = Path(os.readlink(path))
        if current.exists() and current.parent != target.parent:
            return f"{path} leads to {current}, which is not of this mpsd"
    elif path.exists():
        try:
            path.rmdir()
        except OSError:
            return f"{path} is a directory that is not empty: another control daemon may use it"
    try:
        replace_link(path, target)
    except OSError as error:
        return f"cannot make {path}: {error.strerror}"
    return ""


def _cannot_make(path: Path, error: OSError) -> ConfigError:
    remedy = "run as root, or set run_dir, log_dir and state_dir to places you may write"
    if isinstance(error, FileExistsError | NotADirectoryError):
        remedy = "something that is no directory is there: set run_dir, log_dir and state_dir to other places"
    return ConfigError(f"cannot make directory {path}: {error.strerror}", remedy=remedy)


def _check_place(path: Path) -> None:
    """Whether the directory is there and ours, or can be made. Raises ConfigError."""
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
            f"may not write in {path}: {os.strerror(code)}", remedy="run as the owner of that directory"
        )
    if code:
        raise _cannot_make(path, OSError(code, os.strerror(code)))
    if place == path:
        _check_trusted(path)


def _check_trusted(path: Path) -> None:
    """Whoever may write there could put a link or a socket in the daemon's way. Raises ConfigError."""
    info = path.stat()
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to uid {info.st_uid}", remedy="remove it, or set another directory in its place"
        )
    if info.st_mode & 0o002:
        raise ConfigError(
            f"{path} may be written by anybody (mode {info.st_mode & 0o7777:o})",
            remedy=f"chmod o-w {path}, or set another directory in its place",
        )
