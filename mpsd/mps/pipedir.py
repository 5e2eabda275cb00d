"""The pipe directory of a control daemon: its files, its owner, and left-overs of a dead owner.

Left-over sockets stop the next start, and removing those of a live daemon cuts its clients off. Nothing is
removed unless the owner is proven gone.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass
from enum import Enum

from mpsd.base.errors import AlreadyRunningError, ConfigError
from mpsd.base.limits import SOCKET_PATH_LIMIT
from mpsd.os import acl, procfs

SOCKETS = ("control", "control_privileged")
PID_FILE = "nvidia-cuda-mps-control.pid"
_LEFT_BEHIND = (*SOCKETS, "control_lock", "log", PID_FILE)
_CLOCK_SLACK_S = 2.0
NO_ACLS = "on a file system without POSIX ACLs: other users can enter users' domains and write their logs"
NO_ACLS_REMEDY = "mount it on tmpfs or ext4"


class Owner(Enum):
    """The owner of a pipe directory. UNCLEAR: neither a listener nor a proof that there is none."""

    NOBODY = "nobody"
    LIVE = "a live control daemon"
    STALE = "files of a control daemon that is gone"
    UNCLEAR = "files of an unknown owner"


@dataclass(frozen=True, slots=True)
class Ownership:
    owner: Owner
    pid: int | None


def socket_path(pipe_dir: str) -> str:
    return os.path.join(pipe_dir, SOCKETS[0])


def check_length(pipe_dir: str) -> None:
    """Check that the socket paths fit: otherwise the stock daemon never binds. Raises ConfigError."""
    longest = max(len(os.fsencode(os.path.join(pipe_dir, name))) for name in SOCKETS)
    if longest > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"pipe directory {pipe_dir} is too long: its sockets need {longest} bytes of {SOCKET_PATH_LIMIT}",
            remedy=f"choose a run directory that is {longest - SOCKET_PATH_LIMIT} bytes shorter",
        )


def prepare(pipe_dir: str, log_dir: str, private_to: int | None = None) -> bool:
    """Create both directories: clients reach the first, the second is the administrator's.

    `private_to`: the one user, besides its owner and root, that may enter the first; None: every user.
    Returns whether the first is closed to other users: a file system without ACLs leaves it open. Raises
    ConfigError.
    """
    check_length(pipe_dir)
    private = private_to is not None
    for path in (pipe_dir, log_dir):
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            if path == log_dir:
                os.chmod(path, 0o750)
            elif private_to is None or not _close(path, private_to):
                private = False
                os.chmod(path, 0o755)
        except OSError as error:
            raise ConfigError(
                f"cannot make directory {path}: {error.strerror}",
                remedy="choose another one, or fix its permissions",
            ) from error
    return private


def _close(path: str, uid: int) -> bool:
    """Close a directory to all users but this one. Return False if its file system has no ACLs."""
    try:
        acl.only_for(path, uid)
    except OSError as error:
        if error.errno not in acl.UNSUPPORTED:
            raise
        return False
    return True


def is_private(pipe_dir: str, uid: int | None) -> bool:
    """Return whether the directory is closed to all users but this one; None means every user."""
    return uid is not None and acl.is_only_for(pipe_dir, uid)


def lacks_acls(path: str) -> bool:
    """Return whether the file system of a directory has no ACLs; False if the directory is gone."""
    try:
        return not acl.supported(path)
    except OSError:
        return False


def ownership(pipe_dir: str) -> Ownership:
    """Return the present owner of the directory.

    The connection attempt may leave a line in a live daemon's log.
    """
    present = [name for name in _LEFT_BEHIND if os.path.lexists(os.path.join(pipe_dir, name))]
    pid = recorded_pid(pipe_dir)
    if not present:
        return Ownership(Owner.NOBODY, None)
    knocks = {_listening(os.path.join(pipe_dir, name)) for name in SOCKETS if name in present}
    if True in knocks:
        return Ownership(Owner.LIVE, pid)
    if None in knocks or (pid is not None and not _gone(pipe_dir, pid)):
        return Ownership(Owner.UNCLEAR, pid)
    return Ownership(Owner.STALE, pid)


def clear_stale(pipe_dir: str) -> list[str]:
    """Remove the left-overs of a dead owner and return their names.

    Raises AlreadyRunningError unless the owner is proven gone.
    """
    found = ownership(pipe_dir)
    if found.owner in (Owner.LIVE, Owner.UNCLEAR):
        by = f" (process {found.pid})" if found.pid else ""
        raise AlreadyRunningError(
            f"pipe directory {pipe_dir} has {found.owner.value}{by}",
            remedy="adopt it, stop it with quit, or choose another directory",
        )
    removed = []
    for name in _LEFT_BEHIND:
        path = os.path.join(pipe_dir, name)
        if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            removed.append(name)
    return removed


def recorded_pid(pipe_dir: str) -> int | None:
    """Return the pid in the directory's pid file: a claim."""
    try:
        with open(os.path.join(pipe_dir, PID_FILE), encoding="ascii", errors="replace") as file:
            return int(file.read(32).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _listening(path: str) -> bool | None:
    """Return whether a process listens on the socket: True, False if the kernel says no, None if unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code == errno.ECONNREFUSED:
        return False
    # EPROTOTYPE and EAGAIN come after the lookup: there is a listener, of another type or a busy one.
    return True if code in (0, errno.EPROTOTYPE, errno.EAGAIN, errno.EINPROGRESS) else None


def _gone(pipe_dir: str, pid: int) -> bool:
    """Return whether the writer of the pid file has ended: the pid is free, younger, or serves elsewhere."""
    try:
        started = procfs.start_time(pid)
        written = os.stat(os.path.join(pipe_dir, PID_FILE)).st_mtime
        if started > written + _CLOCK_SLACK_S:
            return True
        theirs = procfs.environment(pid).get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
        return os.path.realpath(theirs) != os.path.realpath(pipe_dir)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except PermissionError:
        return False
