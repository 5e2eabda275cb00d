"""`doctor`: what this machine can do for mpsd and what it cannot, each line with a remedy.

The checks here hold for every backend; those of the GPUs come with it. Nothing is changed, and no
check raises: a question that cannot be asked is answered "cannot tell".
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from mpsd import pipedir
from mpsd.errors import MpsdError
from mpsd.gpu.base import Check
from mpsd.linux import descriptors, procfs

DEFAULT_PIPE_DIR = "/tmp/nvidia-mps"
INOTIFY_NEEDED = 128
LOG_SPACE_NEEDED = 64 << 20
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
INOTIFY_LIMIT = "/proc/sys/fs/inotify/max_user_instances"
KERNEL_LOG = "/dev/kmsg"
# The kernel gives the first pid namespace a fixed inode number (PROC_PID_INIT_INO).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
CAP_SYS_PTRACE = 19
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
    gpus: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> list[Check]:
    """All checks in the order in which they are shown: the backend's, then this machine's.

    `pipe_dirs` are the domains' pipe directories, existing or planned; `kernel_log` is None where
    the backend brings its own. `gpus`: a question to each GPU, which raises GpuError. Without
    `privileged` (simulated GPU) an ordinary user will do.
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
    ]
    if privileged:
        asked += [("root", _root), ("way to the sockets", partial(_way, run_dir))]
    if kernel_log is not None:
        asked.append(("kernel log", partial(_kernel_log, kernel_log)))
    for path in (*pipe_dirs, DEFAULT_PIPE_DIR):
        asked.append((f"pipe directory {path}", partial(_pipe_directory, path)))
    return [*backend_checks, *(_answer(name, ask) for name, ask in asked)]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether every check that applies is fulfilled."""
    return all(check.ok is not False for check in checks)


def _gpu(name: str, ask: Callable[[], object]) -> Check:
    try:
        ask()
    except MpsdError as error:
        remedy = "see the kernel log; restart mpsd once it is back"
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
        "root", False, f"running as uid {os.geteuid()}", "run as root: other users' processes are held"
    )


def _pid_namespace() -> Check:
    name = "pid namespace"
    if os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE:
        return Check(name, True, "the machine's own: every client has its real pid")
    return Check(
        name,
        False,
        "not the machine's own: clients outside show as pid 0 and can be neither named nor evicted",
        "run in the host's pid namespace (Kubernetes: hostPID: true)",
    )


def _descriptor_duplication() -> Check:
    """Take a descriptor from a child that runs as somebody else, the way clients' are taken."""
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
        return Check(name, True, "descriptors of other processes can be duplicated")
    return Check(
        name,
        False,
        f"refused: {os.strerror(code)}",
        "needs Linux 5.6, CAP_SYS_PTRACE, and a seccomp profile that allows pidfd_getfd",
    )


def _yama() -> Check:
    try:
        with open(YAMA, encoding="ascii") as file:
            scope = int(file.read())
    except FileNotFoundError:
        return Check("yama", True, "not in this kernel")
    if scope == 3:
        return Check("yama", False, "ptrace_scope 3: nobody may attach", "it can only be lowered at boot")
    if scope and not _capable(CAP_SYS_PTRACE):
        return Check(
            "yama", False, f"ptrace_scope {scope} without CAP_SYS_PTRACE", "give the daemon CAP_SYS_PTRACE"
        )
    return Check("yama", True, f"ptrace_scope {scope}")


def _capable(capability: int) -> bool:
    return bool(int(procfs.status_fields(os.getpid()).get("CapEff", "0"), 16) >> capability & 1)


def _descriptors() -> Check:
    soft, hard = (_limit(n) for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    finding = f"{soft} now, at most {hard}; the daemon raises its own to that"
    if hard == "unlimited" or int(hard) >= descriptors.WANTED:
        return Check("descriptor limit", True, finding)
    return Check(
        "descriptor limit",
        False,
        f"{finding}; MPS wants {descriptors.WANTED}",
        descriptors.REMEDY,
    )


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _inotify() -> Check:
    with open(INOTIFY_LIMIT, encoding="ascii") as file:
        limit = int(file.read())
    if limit >= INOTIFY_NEEDED:
        return Check("inotify instances", True, f"{limit} for each user; two for each domain")
    return Check(
        "inotify instances",
        False,
        f"{limit} for each user, two for each domain",
        f"sysctl fs.inotify.max_user_instances={INOTIFY_NEEDED * 4}",
    )


def _existing(path: str) -> str:
    """The path, or the nearest directory above it that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return path


def _directory(name: str, path: str) -> Check:
    place = _existing(os.path.abspath(path))
    if not os.path.isdir(place):
        return Check(name, False, f"{place} is no directory", "choose another")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(name, False, f"{place} may not be written", "run as root, or choose another")
    return Check(name, True, path if place == os.path.abspath(path) else f"{path} will be made")


def _space(log_dir: str) -> Check:
    info = os.statvfs(_existing(os.path.abspath(log_dir)))
    free = info.f_bavail * info.f_frsize
    if free >= LOG_SPACE_NEEDED:
        return Check("log space", True, f"{free >> 20} MiB free")
    return Check(
        "log space", False, f"{free >> 20} MiB free", f"make room: {LOG_SPACE_NEEDED >> 20} MiB are wanted"
    )


def _way(run_dir: str) -> Check:
    """Clients of any user walk from / to their pipe directory: each step must be open to them."""
    name, path = "way to the sockets", _existing(os.path.realpath(run_dir))
    while True:
        if not os.stat(path).st_mode & 0o001:
            return Check(
                name, False, f"{path} is closed to other users", f"chmod o+x {path}, or another run directory"
            )
        if path == "/":
            return Check(name, True, "open to all users")
        path = os.path.dirname(path)


def _kernel_log(path: str) -> Check:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return Check(
            "kernel log",
            False,
            f"{path}: {error.strerror}: Xids come from NVML alone, without text",
            "run as root (CAP_SYSLOG); give a container the device",
        )
    return Check("kernel log", True, f"{path} can be read")


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
                f"mpsd clears its own directories; else: rm -r {path} after a look at it",
            )
        case pipedir.Owner.UNCLEAR:
            return Check(
                name, False, f"{found.owner.value}{by}", "end that process, or choose another directory"
            )
