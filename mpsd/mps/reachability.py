"""Whether a user reaches a control socket: asked of the kernel with that user's rights, without a process.

A thread of its own takes the user's file-system ids and groups, setfsuid(2) and setfsgid(2). These belong to
one thread alone, and with them the thread loses the capabilities that override permissions. It never takes
the user's real, effective or saved ids: a process may signal a thread with its own ids, and so end mpsd.

The thread then connects with a socket of type SOCK_DGRAM. The kernel looks up the path, checks the
permissions, finds the bound socket, and only then compares the types: EPROTOTYPE. So this answer proves the
whole way, and the control daemon is not disturbed. It serves one caller at a time, so a real connection could
turn a client's command away, and it would log one each second. A stopped control daemon counts as reachable:
mpsd checks the state of processes elsewhere. No call here waits: a look-up of a local path and a refused
connect(2) end at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import pwd
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

from mpsd.base.errors import MpsdError
from mpsd.os.probes import ProbePool

NOBODY = 65534
CACHE_S = 30.0
GROUPS_DEADLINE_S = 0.5
CHECK_DEADLINE_S = 5.0
_CACHED = 1024
_LINKS = 16
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
# setgroups, setfsgid, setfsuid. The wrapper of the C library for setgroups would change every thread.
_CALLS = {"x86_64": (116, 123, 122), "aarch64": (159, 152, 151)}.get(platform.machine())
_GET_DUMPABLE, _SET_DUMPABLE = 3, 4
_libc = ctypes.CDLL(None, use_errno=True)


class Obstacle(Enum):
    """The cause for which a path does not work. UNKNOWN: it could not be checked."""

    MISSING = "missing"
    CLOSED = "closed"
    UNSERVED = "unserved"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Identity:
    """The rights with which a path is tried."""

    uid: int
    gid: int = NOBODY
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocked:
    """A path that does not work. `at`: the file or directory to blame. `text`: of UNKNOWN, the reason."""

    obstacle: Obstacle
    at: str
    text: str = ""


def identity_of(uid: int) -> Identity:
    """Return a user's groups by the user database; for an unknown user no group. May block."""
    try:
        user = pwd.getpwuid(uid)
        return Identity(uid, user.pw_gid, tuple(os.getgrouplist(user.pw_name, user.pw_gid)))
    except (KeyError, OSError):
        return Identity(uid)


class Reachability:
    """Checks paths as users. Lives on the event loop; the checks run in one thread.

    `problem`: why the checks use the rights of mpsd instead of the users' rights, else empty.
    """

    def __init__(self, look_up: Callable[[int], Identity] = identity_of) -> None:
        self._look_up = look_up
        self.problem = ""
        self._known: dict[int, tuple[float, Identity]] = {}
        self._thread = ProbePool("mpsd-reach", most=1, per_key=1)
        self._databases = ProbePool("mpsd-groups", most=4, per_key=1)

    async def check(self, asked: Sequence[tuple[int | None, str]]) -> list[Blocked | None]:
        """Return for each user and control socket why the socket is out of reach; None: it is reachable.

        A user of None stands for every user: it has no rights of its own.
        """
        tried = [(await self._identity(uid), path) for uid, path in asked]
        if not tried:
            return []
        try:
            found, problem = await self._thread.run("paths", lambda: _tried(tried), CHECK_DEADLINE_S)
        except MpsdError as error:
            return [Blocked(Obstacle.UNKNOWN, path, error.message) for _, path in asked]
        self.problem = problem
        return found

    async def _identity(self, uid: int | None) -> Identity:
        if uid is None:
            return Identity(NOBODY)
        known = self._known.get(uid)
        if known is not None and time.monotonic() - known[0] < CACHE_S:
            return known[1]
        try:
            found = await self._databases.run(uid, lambda: self._look_up(uid), GROUPS_DEADLINE_S)
        except (MpsdError, OSError):
            # The directory service does not answer: use what it said before.
            found = known[1] if known is not None else Identity(uid)
        if len(self._known) >= _CACHED:
            self._known = {}
        self._known[uid] = time.monotonic(), found
        return found

    def close(self) -> None:
        self._thread.close()
        self._databases.close()


def check_apart(uid: int | None, path: str) -> Blocked | None:
    """Check one path in a thread that ends with the check. For callers without an event loop; may block."""
    identity = Identity(NOBODY) if uid is None else identity_of(uid)
    found: list[Blocked | None] = []
    thread = threading.Thread(target=lambda: found.extend(_tried([(identity, path)])[0]), daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else Blocked(Obstacle.UNKNOWN, path, "the check failed")


def with_rights(uid: int | None, work: Callable[[], str]) -> str:
    """Return the result of `work`, run with the rights of a user to files (None: of a user without any).

    The thread ends with the work. Without root it has the rights of mpsd. May block. Raises OSError if the
    rights cannot be had, or as `work` does.
    """
    identity = Identity(NOBODY) if uid is None else identity_of(uid)

    def apart() -> str:
        _take_rights(identity)
        return work()

    with ThreadPoolExecutor(1, "mpsd-rights") as thread:
        return thread.submit(apart).result()


def _tried(asked: Sequence[tuple[Identity, str]]) -> tuple[list[Blocked | None], str]:
    """Try each path with the rights of its user; return also why these rights could not be used, or "".

    Runs in a thread: the rights are the thread's.
    """
    found: list[Blocked | None] = []
    problem = ""
    for identity, path in asked:
        try:
            _take_rights(identity)
        except OSError as error:
            problem = error.strerror or str(error)
        try:
            found.append(_connected(path))
        except OSError as error:
            found.append(Blocked(Obstacle.UNKNOWN, path, error.strerror or str(error)))
    with contextlib.suppress(OSError):
        _take_rights(Identity(0, 0))
    return found, problem


def _take_rights(identity: Identity) -> None:
    """Give this thread the user's rights to files. Without root, mpsd checks with its own rights.

    Raises OSError.
    """
    if os.geteuid() != 0:
        return
    if _CALLS is None:
        raise OSError(errno.ENOSYS, f"the system calls of {platform.machine()} are not known")
    setgroups, setfsgid, setfsuid = _CALLS
    groups = (ctypes.c_uint32 * len(identity.groups))(*identity.groups)
    dumpable = _libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    if _libc.syscall(setgroups, len(groups), groups) != 0:
        raise OSError(ctypes.get_errno(), f"setgroups: {os.strerror(ctypes.get_errno())}")
    _libc.syscall(setfsgid, ctypes.c_uint32(identity.gid))
    _libc.syscall(setfsuid, ctypes.c_uint32(identity.uid))
    # Neither call reports an error. With an id that is not valid it only returns the present one.
    now = (_libc.syscall(setfsuid, ctypes.c_uint32(-1)), _libc.syscall(setfsgid, ctypes.c_uint32(-1)))
    if dumpable == 1:
        # A change of ids makes the process undumpable. No id changed that another user could match.
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    if now != (identity.uid, identity.gid):
        raise OSError(errno.EPERM, "setfsuid is not permitted; give mpsd CAP_SETUID and CAP_SETGID")


def _connected(path: str) -> Blocked | None:
    """Return what is in the way of a connection; None if a client could connect. Raises OSError."""
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as probe:
        code = probe.connect_ex(path)
    if code == errno.EPROTOTYPE:
        return None
    if code in (0, errno.ECONNREFUSED):
        return Blocked(Obstacle.UNSERVED, os.path.realpath(path))
    if code == errno.EACCES or code in _ABSENT:
        return _walk(path, code)
    raise OSError(code, os.strerror(code))


def _walk(path: str, code: int) -> Blocked:
    """Return the first part of the path that blocks, from the root directory downwards. Raises OSError."""
    at, parts, links = "/", list(PurePath(path).parts[1:]), 0
    while parts:
        here = os.path.join(at, parts.pop(0))
        try:
            info = os.lstat(here)
            if stat.S_ISLNK(info.st_mode) and links < _LINKS:
                target, links = PurePath(os.readlink(here)), links + 1
                at = "/" if target.is_absolute() else at
                parts = [*target.parts[target.is_absolute() :], *parts]
                continue
        except PermissionError:
            return Blocked(Obstacle.CLOSED, at)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return Blocked(Obstacle.MISSING, here)
        at = here
    if code != errno.EACCES:
        raise OSError(errno.EAGAIN, f"{path} has just been made again")
    return Blocked(Obstacle.CLOSED, at)
