"""Processes: pinned, described, and their present state.

A pid is a claim until it is pinned (Pinned.open). Names and command lines are untrusted text: print them
through `mpsd.base.text.printable`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from mpsd.base.errors import AmbiguousError, DeniedError, NotFoundError
from mpsd.base.model import AddressKind, Liveness, ProcessFacts, ProcessInstance
from mpsd.os import procfs
from mpsd.os.pinned import Pinned
from mpsd.os.procfs import MemoryMap

__all__ = [
    "ExecIdentity",
    "MemoryMap",
    "Pinned",
    "Users",
    "cgroup_name",
    "environment_value",
    "exec_identity",
    "facts",
    "host_memory",
    "liveness",
    "mapping_at",
    "maps",
    "users",
    "with_environment",
]

NULL_PAGE_END = 64 << 10
READ_AT_ONCE = 64
ENVIRONMENT_DEADLINE_S = 0.25


@dataclass(frozen=True, slots=True)
class Users:
    """The user ids of a process, credentials(7).

    A user may signal a process if its real or saved uid is that user's.
    """

    real: int
    effective: int
    saved: int

    @property
    def borrowed(self) -> bool:
        """Return whether the process runs with, or can switch to, another user's rights."""
        return not self.real == self.effective == self.saved

    def all_are(self, uid: int) -> bool:
        return not self.borrowed and self.real == uid


def users(instance: ProcessInstance) -> Users:
    """Return the present user ids of a process; exec and setuid(2) change them. Raises NotFoundError."""
    try:
        found = _users(procfs.status_fields(instance.pid))
        if procfs.start_ticks(instance.pid) != instance.start_ticks:
            raise NotFoundError(f"process {instance} has ended")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {instance}") from error
    return found


def _users(status: Mapping[str, str]) -> Users:
    real, effective, saved, *_ = (int(word) for word in status["Uid"].split())
    return Users(real, effective, saved)


def facts(pid: int, command: str | None = None) -> ProcessFacts:
    """Return what /proc shows of a process: effective uid and gid, command, executable, cgroup.

    Reading the command waits while the process changes its mappings; pass `command` to avoid that. Raises
    NotFoundError, DeniedError.
    """
    try:
        stat = procfs.stat(pid)
        status = procfs.status_fields(pid)
        rows = procfs.cgroups(pid)
        whose = _users(status)
        found = ProcessFacts(
            instance=ProcessInstance(pid, stat.start_ticks),
            ppid=stat.ppid,
            uid=whose.effective,
            gid=int(status["Gid"].split()[1]),
            command=procfs.command_text(pid) if command is None else command,
            exe=procfs.exe_path(pid),
            cgroup=cgroup_name(rows),
            borrowed=whose.borrowed,
        )
        if procfs.start_ticks(pid) != stat.start_ticks:
            raise AmbiguousError(
                f"process {pid} was replaced during the inspection", remedy="look up the pid again"
            )
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise DeniedError(f"no permission to inspect process {pid}", remedy="run mpsd as root") from error
    return found


def cgroup_name(rows: tuple[procfs.CgroupLine, ...]) -> str:
    """Return the path of a process's cgroup, from procfs.cgroups(); empty if there is none."""
    # Prefer the unified hierarchy. On hybrid machines it is unused, and every process is in its root.
    paths = [row.path for row in sorted(rows, key=lambda row: not row.unified)]
    return next((path for path in paths if path != "/"), "/" if paths else "")


def _is_over(instance: ProcessInstance, stat: procfs.Stat) -> bool:
    return stat.start_ticks != instance.start_ticks or stat.state in "ZXx"


def liveness(instance: ProcessInstance) -> Liveness:
    """Return whether the process could answer now. One stopped, traced or frozen thread is enough for a no.

    A process under a tracer counts as traced even while it runs: the tracer can stop it at any time.
    """
    try:
        stat = procfs.stat(instance.pid)
        if _is_over(instance, stat):
            return Liveness.DEAD
        states = set(procfs.thread_states(instance.pid))
        if "t" in states or procfs.status_fields(instance.pid).get("TracerPid", "0") != "0":
            return Liveness.TRACED
        if "T" in states:
            return Liveness.STOPPED
        return Liveness.FROZEN if procfs.frozen(instance.pid) else Liveness.RUNNING
    except (FileNotFoundError, ProcessLookupError):
        return Liveness.DEAD


# include/linux/sched.h, as field 9 of stat shows it (proc(5)); SIGKILL in a mask of signals.
_PF_EXITING = 0x4
_KILLED = 1 << (signal.SIGKILL - 1)


def is_ending(instance: ProcessInstance) -> bool:
    """Return whether the process was killed or is exiting, judged by its first thread.

    Other threads may stay in the kernel long after that. The pidfd becomes readable only when none is left.
    """
    try:
        stat = procfs.stat(instance.pid)
        killed = int(procfs.status_fields(instance.pid).get("SigPnd", "0"), 16) & _KILLED
    except (FileNotFoundError, ProcessLookupError):
        return True
    return _is_over(instance, stat) or bool(stat.flags & _PF_EXITING or killed)


@dataclass(frozen=True, slots=True)
class ExecIdentity:
    """The properties that change when a process runs exec: the executable, and its load addresses.

    The addresses catch an exec of the same file. They are 0 without ptrace rights, and equal after an exec
    with address randomisation off.
    """

    device: int
    inode: int
    start_code: int
    start_stack: int


def exec_identity(instance: ProcessInstance) -> ExecIdentity:
    """Return the exec identity of a process; a change shows an exec. Raises NotFoundError, DeniedError."""
    try:
        stat = procfs.stat(instance.pid)
        exe = os.stat(f"/proc/{instance.pid}/exe")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {instance}") from error
    except PermissionError as error:
        raise DeniedError(
            f"no permission to inspect process {instance}", remedy="run mpsd as root"
        ) from error
    if stat.start_ticks != instance.start_ticks:
        raise NotFoundError(f"process {instance} has ended")
    return ExecIdentity(exe.st_dev, exe.st_ino, stat.start_code, stat.start_stack)


def environment_value(pid: int, name: str) -> str | None:
    """Return a variable of the environment at the start of the process; None if unset, exited or not
    readable.
    """
    try:
        return procfs.environment(pid).get(name)
    except OSError:
        return None


def with_environment(name: str, value: str) -> list[ProcessInstance]:
    """Return every process that was started with this variable, as far as mpsd may read its environment.

    A process that blocks the read is left out: the reads run side by side in threads.
    """
    found: list[ProcessInstance] = []

    def look(pid: int) -> None:
        try:
            start = procfs.start_ticks(pid)
            if procfs.environment(pid).get(name) == value:
                found.append(ProcessInstance(pid, start))
        except OSError:
            pass

    pids = iter(procfs.pids())
    while some := tuple(islice(pids, READ_AT_ONCE)):
        threads = [threading.Thread(target=look, args=(pid,), daemon=True) for pid in some]
        for thread in threads:
            thread.start()
        end = time.monotonic() + ENVIRONMENT_DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    return found.copy()


def host_memory(pid: int) -> int | None:
    """Return the resident host memory in bytes, None once the process is gone."""
    try:
        return procfs.resident_bytes(pid)
    except OSError:
        return None


def maps(pid: int) -> list[MemoryMap]:
    """Return the host mappings in order of address. Raises NotFoundError, DeniedError."""
    try:
        return procfs.maps(pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise DeniedError(
            f"no permission to read the mappings of process {pid}", remedy="run mpsd as root"
        ) from error


def mapping_at(address: int, instance: ProcessInstance) -> AddressKind:
    """Return what is mapped at a faulting GPU address in the process's own address space.

    libcuda keeps every GPU range that it ever reserved as an anonymous host mapping without access. Such a
    mapping at a faulting address therefore means: freed, or never mapped. Best effort: UNKNOWN for a process
    that is gone or not readable, and beyond the first MAPS_LIMIT mappings. Call it from a thread.
    """
    if 0 <= address < NULL_PAGE_END:
        return AddressKind.NULL_PAGE
    try:
        found = procfs.map_lines(instance.pid)
        lines = found.lines
        if procfs.start_ticks(instance.pid) != instance.start_ticks:
            return AddressKind.UNKNOWN
    except OSError:
        return AddressKind.UNKNOWN
    # Parse only the few lines that the search touches: a large program has thousands.
    place = bisect_right(lines, address, key=lambda line: int(line.partition("-")[0], 16))
    row = procfs.parse_map(lines[place - 1]) if place else None
    if row is None or address >= row.end:
        return AddressKind.UNKNOWN
    return AddressKind.FREED if row.reservation else AddressKind.HOST_MAPPING
