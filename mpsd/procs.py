"""Processes: pinned, described, and asked how they stand.

A pid is a claim until it is pinned (Pinned.open). Names and command lines are untrusted text:
print them through `mpsd.text.printable`.
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

from mpsd.errors import AmbiguousError, DeniedError, NotFoundError
from mpsd.linux import procfs
from mpsd.linux.pinned import Pinned
from mpsd.linux.procfs import MemoryMap
from mpsd.model import LiesThere, Liveness, ProcessFacts, ProcessInstance

__all__ = [
    "ExecIdentity",
    "MemoryMap",
    "Pinned",
    "Users",
    "environment_value",
    "exec_identity",
    "facts",
    "host_memory",
    "liveness",
    "maps",
    "users",
    "where",
    "with_environment",
]

NULL_PAGE_END = 64 << 10
LOOKED_AT_ONCE = 64
ENVIRONMENT_DEADLINE_S = 0.25


@dataclass(frozen=True, slots=True)
class Users:
    """Whose a process is, credentials(7). A user may signal one whose real or saved user he is."""

    real: int
    effective: int
    saved: int

    @property
    def borrowed(self) -> bool:
        """It runs as somebody whose it is not, or can become somebody else."""
        return not self.real == self.effective == self.saved

    def all_are(self, uid: int) -> bool:
        return not self.borrowed and self.real == uid


def users(instance: ProcessInstance) -> Users:
    """Whose it is now: exec and setuid(2) change it. Raises NotFoundError."""
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
    """What /proc says of a process: effective uid and gid, command, executable, cgroup.

    Reading the command waits while the process changes its mappings; with `command` it is not read.
    Raises NotFoundError, DeniedError.
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
            cgroup=_cgroup_name(rows),
            borrowed=whose.borrowed,
        )
        if procfs.start_ticks(pid) != stat.start_ticks:
            raise AmbiguousError(
                f"process {pid} was replaced while it was looked at", remedy="look it up again"
            )
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise DeniedError(f"may not look at process {pid}", remedy="run as root") from error
    return found


def _cgroup_name(rows: tuple[procfs.CgroupLine, ...]) -> str:
    # The unified hierarchy where it is in use; on hybrid machines it is the root for everybody.
    paths = [row.path for row in sorted(rows, key=lambda row: not row.unified)]
    return next((path for path in paths if path != "/"), "/" if paths else "")


def _is_over(instance: ProcessInstance, stat: procfs.Stat) -> bool:
    return stat.start_ticks != instance.start_ticks or stat.state in "ZXx"


def liveness(instance: ProcessInstance) -> Liveness:
    """Whether the process could answer now. One stopped, traced or frozen thread is enough to doubt it.

    A process under a tracer counts as traced even while it runs: it can be held up at any time.
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


# include/linux/sched.h, as field 9 of proc(5)'s stat shows it; SIGKILL in a mask of signals.
_PF_EXITING = 0x4
_KILLED = 1 << (signal.SIGKILL - 1)


def is_ending(instance: ProcessInstance) -> bool:
    """Whether it was killed, or has ended, by its first thread, which leaves or is to. Threads may be in the
    kernel for long before, and the pidfd says nothing until none is.
    """
    try:
        stat = procfs.stat(instance.pid)
        killed = int(procfs.status_fields(instance.pid).get("SigPnd", "0"), 16) & _KILLED
    except (FileNotFoundError, ProcessLookupError):
        return True
    return _is_over(instance, stat) or bool(stat.flags & _PF_EXITING or killed)


@dataclass(frozen=True, slots=True)
class ExecIdentity:
    """What changes when a process replaces its program: the executable, and where the kernel laid it.

    The addresses catch an exec of the same file. They are 0 without ptrace rights, and equal after
    an exec with address randomisation off.
    """

    device: int
    inode: int
    start_code: int
    start_stack: int


def exec_identity(instance: ProcessInstance) -> ExecIdentity:
    """Compare two of these to notice an exec. Raises NotFoundError, DeniedError."""
    try:
        stat = procfs.stat(instance.pid)
        exe = os.stat(f"/proc/{instance.pid}/exe")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {instance}") from error
    except PermissionError as error:
        raise DeniedError(f"may not look at process {instance}", remedy="run as root") from error
    if stat.start_ticks != instance.start_ticks:
        raise NotFoundError(f"process {instance} has ended")
    return ExecIdentity(exe.st_dev, exe.st_ino, stat.start_code, stat.start_stack)


def environment_value(pid: int, name: str) -> str | None:
    """A variable of the environment the process was started with; None if unset, gone or not ours to read."""
    try:
        return procfs.environment(pid).get(name)
    except OSError:
        return None


def with_environment(name: str, value: str) -> list[ProcessInstance]:
    """Every process that was started with this variable, as far as it may be read.

    One that makes the look at it hang is left out: the others are looked at beside it, in threads.
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
    while some := tuple(islice(pids, LOOKED_AT_ONCE)):
        threads = [threading.Thread(target=look, args=(pid,), daemon=True) for pid in some]
        for thread in threads:
            thread.start()
        end = time.monotonic() + ENVIRONMENT_DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    return found.copy()


def host_memory(pid: int) -> int | None:
    """Resident host memory in bytes, None once the process is gone."""
    try:
        return procfs.resident_bytes(pid)
    except OSError:
        return None


def maps(pid: int) -> list[MemoryMap]:
    """The host mappings in order of address. Raises NotFoundError, DeniedError."""
    try:
        return procfs.maps(pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise DeniedError(f"may not read the mappings of process {pid}", remedy="run as root") from error


def where(address: int, instance: ProcessInstance) -> LiesThere:
    """What lies at a faulting GPU address in the process's own address space.

    libcuda keeps every GPU range it ever reserved as an anonymous host mapping without access, so
    such a mapping at a faulting address means: freed, or never mapped. Best effort: UNKNOWN for a
    process that is gone or not readable, and beyond the mappings that are read. Call it from a thread.
    """
    if 0 <= address < NULL_PAGE_END:
        return LiesThere.NULL_PAGE
    try:
        found = procfs.map_lines(instance.pid)
        lines = found.lines
        if procfs.start_ticks(instance.pid) != instance.start_ticks:
            return LiesThere.UNKNOWN
    except OSError:
        return LiesThere.UNKNOWN
    # Only the few lines that the search touches are parsed: a large program has thousands.
    place = bisect_right(lines, address, key=lambda line: int(line.partition("-")[0], 16))
    row = procfs.parse_map(lines[place - 1]) if place else None
    if row is None or address >= row.end:
        return LiesThere.UNKNOWN
    return LiesThere.FREED if row.reservation else LiesThere.HOST_MAPPING
