"""The checks of `doctor`: capabilities of this machine for mpsd, each with a remedy.

The checks here are for every backend; a backend adds checks of its GPUs. No check changes anything and no
check raises: a check that cannot run has the finding "cannot tell".
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from mpsd.base.conditions import Condition
from mpsd.base.errors import MpsdError
from mpsd.base.protection import ProtectionLevel
from mpsd.base.text import printable
from mpsd.clients.starts import Start
from mpsd.gpu.base import Check
from mpsd.mps import pipedir
from mpsd.mps.pathhealth import describe, remedy_for
from mpsd.mps.reachability import Obstacle, check_apart, with_rights
from mpsd.os import descriptors, procfs

DEFAULT_PIPE_DIR = "/tmp/nvidia-mps"
INOTIFY_NEEDED = 128
LOG_SPACE_NEEDED = 64 << 20
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
INOTIFY_LIMIT = "/proc/sys/fs/inotify/max_user_instances"
KERNEL_LOG = "/dev/kmsg"
# The kernel gives the first pid namespace a fixed inode number (PROC_PID_INIT_INO).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
CAP_SYS_PTRACE = 19
DRIVERS_BEHIND_PROXY = 1
_ONE_LIBRARY = (
    "load libcuda.so.1 by its name; not by a path, and not with dlmopen() into a namespace of its own"
)
_OWN_LIBRARY = (
    "leave LD_LIBRARY_PATH as mpsd-run sets it; remove DT_RPATH from the program's libraries (patchelf "
    "--remove-rpath); the loader ignores LD_LIBRARY_PATH for setuid programs"
)
_PIDFD_GETFD = 438
_NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


def run_checks(
    backend_checks: Iterable[Check],
    run_dir: str,
    log_dir: str,
    *,
    pipe_dirs: Sequence[str] = (),
    kernel_log: str | None = KERNEL_LOG,
    privileged: bool = True,
    private: bool = True,
    gpus: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    ways: Mapping[str, tuple[int | None, str]] = MappingProxyType({}),
    still_open: Sequence[str] = (),
) -> list[Check]:
    """Run all checks; return them in the order of display: the backend's, then this machine's.

    `private`: the configuration's [domains] private.
    `pipe_dirs`: the domains' pipe directories, existing or planned. `kernel_log`: None if the backend has
    its own. `gpus`: for each GPU a call that raises GpuError if it does not answer. `privileged`: False
    for the simulated GPU, which an ordinary user may run. `ways`: for each domain its user (None: all users)
    and the pipe directory by which clients get to it. `still_open`: users' domains that are not private.
    """
    asked: list[tuple[str, Callable[[], Check]]] = [
        *((f"GPU {name}", partial(_gpu, f"GPU {name}", ask)) for name, ask in gpus.items()),
        ("pid namespace", _pid_namespace),
        ("pidfd_getfd", _descriptor_duplication),
        ("yama", _yama),
        ("descriptor limit", _descriptors),
        ("inotify instances", _inotify),
        ("run directory", partial(_directory, "run directory", run_dir)),
        ("log directory", partial(_directory, "log directory", log_dir)),
        ("log space", partial(_space, log_dir)),
        ("private domains", partial(_private, run_dir, private, still_open)),
        ("commands for users", _commands),
    ]
    if privileged:
        asked += [("root", _root), ("way to the sockets", partial(_open_path, run_dir))]
    if kernel_log is not None:
        asked.append(("kernel log", partial(_kernel_log, kernel_log)))
    for domain, (uid, path) in ways.items():
        asked.append((f"way to {domain}", partial(_way, domain, uid, path)))
    for path in (*pipe_dirs, DEFAULT_PIPE_DIR):
        asked.append((f"pipe directory {path}", partial(_pipe_directory, path)))
    return [*backend_checks, *(_answer(name, ask) for name, ask in asked)]


def condition_checks(conditions: Iterable[Condition]) -> list[Check]:
    """Return a check for each condition that holds: failed if it degrades protection."""
    return [Check(c.code.value, False if c.kind.degrades else None, c.text, c.remedy) for c in conditions]


def library_checks(starts: Mapping[int, Start]) -> list[Check]:
    """Return a check for each client whose calls do not all lead through mpsd's libcuda, by pid."""
    found = [check for pid, start in sorted(starts.items()) if (check := _libraries(pid, start)) is not None]
    return found or [Check("libcuda of clients", True, "no client has a driver past mpsd's libcuda.so.1")]


def _libraries(pid: int, start: Start) -> Check | None:
    name, files = f"libcuda of {pid}", ", ".join(map(printable, start.libcudas))
    if start.proxy and len(start.libcudas) > DRIVERS_BEHIND_PROXY + 1:
        finding = f"several drivers are loaded: {files}; mpsd does not see the calls of all of them"
        return Check(name, None, finding, _ONE_LIBRARY)
    wanted = start.level not in (None, ProtectionLevel.OBSERVE)
    if wanted and not start.proxy and start.libcudas:
        finding = f"mpsd's libcuda.so.1 is not loaded, but {files} is: the program is not protected"
        return Check(name, None, finding, _OWN_LIBRARY)
    return None


def healthy(checks: Iterable[Check]) -> bool:
    """Return whether no check failed."""
    return all(check.ok is not False for check in checks)


def _gpu(name: str, ask: Callable[[], object]) -> Check:
    try:
        ask()
    except MpsdError as error:
        remedy = "read the kernel log; restart mpsd after the GPU answers again"
        return Check(name, False, f"does not answer: {error}", remedy)
    return Check(name, True, "answers")


def _answer(name: str, ask: Callable[[], Check]) -> Check:
    try:
        return ask()
    except MpsdError as error:
        return Check(name, False, error.message, error.remedy)
    except (OSError, ValueError) as error:
        return Check(name, None, f"cannot tell: {error}")


def _root() -> Check:
    if os.geteuid() == 0:
        return Check("root", True, "running as root")
    return Check(
        "root",
        False,
        f"running as uid {os.geteuid()}",
        "run as root: mpsd holds descriptors of other users' processes",
    )


def _pid_namespace() -> Check:
    name = "pid namespace"
    if os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE:
        return Check(name, True, "the host's: every client has its real pid")
    return Check(
        name,
        False,
        "not the host's: clients outside it have pid 0, and mpsd can neither name nor evict them",
        "run in the host's pid namespace (Kubernetes: hostPID: true)",
    )


def _descriptor_duplication() -> Check:
    """Take a descriptor from a child of another user, as mpsd takes those of clients."""
    name = "pidfd_getfd"
    user = _NOBODY if os.geteuid() == 0 else None
    with subprocess.Popen(
        ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, user=user, cwd="/"
    ) as child:
        pidfd = os.pidfd_open(child.pid)
        try:
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, 0, 0)
            code = ctypes.get_errno()
            if copy >= 0:
                os.close(copy)
        finally:
            os.close(pidfd)
            child.kill()
    if copy >= 0:
        return Check(name, True, "mpsd can duplicate descriptors of other processes")
    return Check(
        name,
        False,
        f"refused: {os.strerror(code)}",
        "use Linux 5.6 or newer; give mpsd CAP_SYS_PTRACE and a seccomp profile that allows pidfd_getfd",
    )


def _yama() -> Check:
    try:
        with open(YAMA, encoding="ascii") as file:
            scope = int(file.read())
    except FileNotFoundError:
        return Check("yama", True, "this kernel has no Yama")
    if scope == 3:
        return Check("yama", False, "ptrace_scope 3: no process may attach to another", "lower it and reboot")
    if scope and not _capable(CAP_SYS_PTRACE):
        return Check(
            "yama", False, f"ptrace_scope {scope} without CAP_SYS_PTRACE", "give the daemon CAP_SYS_PTRACE"
        )
    return Check("yama", True, f"ptrace_scope {scope}")


def _capable(capability: int) -> bool:
    return bool(int(procfs.status_fields(os.getpid()).get("CapEff", "0"), 16) >> capability & 1)


def _descriptors() -> Check:
    soft, hard = (_limit(n) for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    finding = f"{soft} now, at most {hard}; the daemon raises its own limit to that"
    if hard == "unlimited" or int(hard) >= descriptors.WANTED:
        return Check("descriptor limit", True, finding)
    return Check(
        "descriptor limit",
        False,
        f"{finding}; MPS needs {descriptors.WANTED}",
        descriptors.REMEDY,
    )


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _inotify() -> Check:
    with open(INOTIFY_LIMIT, encoding="ascii") as file:
        limit = int(file.read())
    if limit >= INOTIFY_NEEDED:
        return Check("inotify instances", True, f"{limit} for each user; a domain needs two")
    return Check(
        "inotify instances",
        False,
        f"{limit} for each user; a domain needs two",
        f"run sysctl fs.inotify.max_user_instances={INOTIFY_NEEDED * 4}",
    )


def _existing(path: str) -> str:
    """Return the path, or its nearest parent that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return path


def _directory(name: str, path: str) -> Check:
    place = _existing(os.path.abspath(path))
    if not os.path.isdir(place):
        return Check(name, False, f"{place} is not a directory", "choose another directory")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(name, False, f"{place} is not writable", "run as root, or choose another directory")
    return Check(name, True, path if place == os.path.abspath(path) else f"{path} will be created")


def _space(log_dir: str) -> Check:
    info = os.statvfs(_existing(os.path.abspath(log_dir)))
    free = info.f_bavail * info.f_frsize
    if free >= LOG_SPACE_NEEDED:
        return Check("log space", True, f"{free >> 20} MiB free")
    return Check(
        "log space",
        False,
        f"{free >> 20} MiB free",
        f"free disk space: mpsd needs {LOG_SPACE_NEEDED >> 20} MiB",
    )


def _private(run_dir: str, wanted: bool, still_open: Sequence[str]) -> Check:
    """Check that users' domains are closed to other users."""
    name = "private domains"
    if not wanted:
        return Check(name, None, "off ([domains] private): other users can enter users' domains")
    if os.geteuid() != 0:
        return Check(name, True, f"the domains of uid {os.geteuid()} are closed to other users (mode 0700)")
    place = _existing(os.path.abspath(run_dir))
    if pipedir.lacks_acls(place):
        return Check(name, False, f"run_dir {run_dir} is {pipedir.NO_ACLS}", pipedir.NO_ACLS_REMEDY)
    if still_open:
        names = ", ".join(still_open)
        remedy = "they stay open until they end: mpsd help operate, Several users"
        return Check(name, False, f"{names}: open to all users, as an earlier mpsd started them", remedy)
    return Check(name, True, "users' domains are closed to other users, by ACLs")


def _commands() -> Check:
    """Check that a user without rights can execute the Python of mpsd-run and mpsd-ctl."""
    name, python = "commands for users", sys.executable

    def look() -> str:
        return "" if os.access(python, os.X_OK, effective_ids=True) else os.strerror(errno.EACCES)

    if why := with_rights(None, look):
        finding = f"users cannot execute mpsd-run and mpsd-ctl: {os.path.realpath(python)}: {why}"
        remedy = "install mpsd with a Python that every user can execute, such as /usr/bin/python3"
        return Check(name, None, finding, remedy)
    return Check(name, True, f"users can execute {python}")


def _open_path(run_dir: str) -> Check:
    """Check that clients of any user may search each directory on the path to their pipe directory."""
    name, path = "way to the sockets", _existing(os.path.realpath(run_dir))
    while True:
        if not os.stat(path).st_mode & 0o001:
            return Check(
                name,
                False,
                f"{path} is closed to other users",
                f"run chmod o+x {path}, or set another run_dir",
            )
        if path == "/":
            return Check(name, True, "open to all users")
        path = os.path.dirname(path)


def _way(domain: str, uid: int | None, pipe_dir: str) -> Check:
    """Check each part of the path to a domain's control socket with the rights of the domain's user."""
    name, path = f"way to {domain}", pipedir.socket_path(pipe_dir)
    blocked = check_apart(uid, path)
    if blocked is None:
        return Check(name, True, f"open to {'all users' if uid is None else 'its user'}")
    if blocked.obstacle is Obstacle.UNKNOWN:
        return Check(name, None, f"cannot tell: {blocked.text}")
    own = os.path.realpath(pipe_dir)
    names = {
        own: f"the pipe directory of {domain}",
        pipedir.socket_path(own): f"the control socket of {domain}",
    }
    return Check(name, False, describe(blocked, uid, names), remedy_for(blocked))


def _kernel_log(path: str) -> Check:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return Check(
            "kernel log",
            False,
            f"cannot read {path} ({error.strerror}): Xids come from NVML alone, without text",
            "run as root (CAP_SYSLOG); in a container, pass the device in",
        )
    return Check("kernel log", True, f"{path} is readable")


def _pipe_directory(path: str) -> Check:
    name = f"pipe directory {path}"
    pipedir.check_length(path)
    found = pipedir.ownership(path)
    by = f", process {found.pid}" if found.pid else ""
    match found.owner:
        case pipedir.Owner.NOBODY:
            return Check(name, True, "free")
        case pipedir.Owner.LIVE:
            return Check(name, True, f"{found.owner.value}{by}")
        case pipedir.Owner.STALE:
            return Check(
                name,
                False,
                found.owner.value,
                f"mpsd clears its own directories; otherwise inspect it, then run rm -r {path}",
            )
        case pipedir.Owner.UNCLEAR:
            return Check(
                name, False, f"{found.owner.value}{by}", "end that process, or choose another directory"
            )
