"""Reading /proc, proc(5). Every function takes a bare pid: the caller pins it (mpsd.os.processes).

For a process that is gone or not readable, the functions raise the kernel's own OSError (FileNotFoundError,
ProcessLookupError, PermissionError), unless a function says otherwise.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
COMMAND_LIMIT = 4096
CGROUP_LIMIT = 4096
# The most that execve(2) takes of arguments and environment together with the default stack limit.
ENVIRONMENT_LIMIT = 2 << 20
# The kernel's default is 65530 mappings (vm.max_map_count). Mappings beyond that are not read.
MAPS_LIMIT = 1 << 16
HEX = "0123456789abcdef"
IOCTL = {"x86_64": 16, "aarch64": 29}.get(platform.machine())
"""Number of the system call ioctl; None on other machines."""
FEW_LINES = 2048


def _read(path: str, limit: int | None = None) -> bytes:
    with open(path, "rb", buffering=0) as file:
        chunks, size = [], 0
        while limit is None or size < limit:
            chunk = file.read(1 << 16 if limit is None else limit - size)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
    return b"".join(chunks)


def text_of(raw: bytes) -> str:
    """Return bytes of unknown origin as text: UTF-8, anything else as backslash escapes."""
    return raw.decode("utf-8", "backslashreplace")


def _rows(path: str) -> list[str]:
    # Not splitlines(): a path or name may hold other line separators, which the kernel does not escape.
    return [row for row in text_of(_read(path)).split("\n") if row]


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that mpsd uses. Addresses are 0 without ptrace rights."""

    comm: str
    state: str
    ppid: int
    flags: int
    start_ticks: int
    start_code: int
    start_stack: int


def parse_stat(raw: bytes) -> Stat:
    """Parse one stat line. The comm field may hold spaces and parentheses: it ends at the last one."""
    opened, closed = raw.index(b"("), raw.rindex(b")")
    fields = raw[closed + 2 :].split()
    return Stat(
        comm=text_of(raw[opened + 1 : closed]),
        state=fields[0].decode("ascii"),
        ppid=int(fields[1]),
        flags=int(fields[6]),
        start_ticks=int(fields[19]),
        start_code=int(fields[23]),
        start_stack=int(fields[25]),
    )


def stat(pid: int) -> Stat:
    return parse_stat(_read(f"/proc/{pid}/stat"))


def start_ticks(pid: int) -> int:
    """Return the start of the process in clock ticks since boot: it tells instances of one pid apart."""
    return stat(pid).start_ticks


def _of_threads(pid: int, name: str, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield this file of each thread, for at most `limit` threads; threads that end meanwhile are skipped."""
    for tid in os.listdir(f"/proc/{pid}/task")[:limit]:
        try:
            raw = _read(f"/proc/{pid}/task/{tid}/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(tid), raw


def thread_states(pid: int, limit: int = 256) -> Iterator[str]:
    """Yield the state letters of the threads, the leader's first; at most `limit` of them."""
    yield stat(pid).state
    for tid, raw in _of_threads(pid, "stat", limit):
        if tid != pid:
            yield parse_stat(raw).state


def parse_call(raw: bytes) -> tuple[int, ...] | None:
    """Return number and first three arguments of the call in /proc/PID/syscall, None outside of any."""
    fields = raw.split()
    if len(fields) < 4 or fields[0] == b"-1":
        return None
    return int(fields[0]), *(int(field, 16) for field in fields[1:4])


def calls(pid: int, limit: int = 256) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the threads that are in a system call, with the call. The kernel omits threads that are running.

    Raises PermissionError without ptrace rights.
    """
    for tid, raw in _of_threads(pid, "syscall", limit):
        call = parse_call(raw)
        if call is not None:
            yield tid, call


def status_fields(pid: int) -> dict[str, str]:
    """Return /proc/PID/status as key to stripped text."""
    return {key: value.strip() for key, _, value in (r.partition(":") for r in _rows(f"/proc/{pid}/status"))}


def command_line(pid: int) -> list[str]:
    """Return the arguments as the process shows them now (it can rewrite them); empty for a zombie.

    Reads at most COMMAND_LIMIT bytes: arguments can be megabytes. Waits while the process changes its
    mappings.
    """
    raw = _read(f"/proc/{pid}/cmdline", COMMAND_LIMIT)
    return [text_of(part) for part in raw.rstrip(b"\0").split(b"\0")] if raw else []


def command_text(pid: int) -> str:
    """Return the arguments joined by spaces, or [comm] without any. Untrusted, at most 4096 characters."""
    arguments = command_line(pid)
    return " ".join(arguments)[:COMMAND_LIMIT] if arguments else f"[{stat(pid).comm}]"


def exe_path(pid: int) -> str:
    """Return the path of the executable, without the mark of a replaced file; empty if it is not readable."""
    try:
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """Return the environment that the process was started with; later changes do not show (proc(5)).

    Reads at most ENVIRONMENT_LIMIT bytes. Waits while the process changes its mappings.
    """
    raw = _read(f"/proc/{pid}/environ", ENVIRONMENT_LIMIT)
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {text_of(key): text_of(value) for key, _, value in pairs}


def children(pid: int) -> tuple[int, ...]:
    """Return the child processes, from the kernel's own list if it has one, else by a walk over /proc."""
    try:
        return tuple(int(word) for word in _read(f"/proc/{pid}/task/{pid}/children").split())
    except FileNotFoundError:
        return tuple(other for other in pids() if parent(other) == pid)


def parent(pid: int) -> int | None:
    try:
        return stat(pid).ppid
    except (FileNotFoundError, ProcessLookupError):
        return None


def pids() -> Iterator[int]:
    """Return every pid that /proc shows now."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def resident_bytes(pid: int) -> int:
    """Return the resident memory in bytes: the second field of /proc/PID/statm, in pages."""
    return int(_read(f"/proc/{pid}/statm").split()[1]) * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class CgroupLine:
    """One line of /proc/PID/cgroup. Version 2 has hierarchy 0 and no controllers."""

    controllers: tuple[str, ...]
    path: str
    unified: bool


def cgroups(pid: int) -> tuple[CgroupLine, ...]:
    rows = []
    for line in _rows(f"/proc/{pid}/cgroup"):
        number, controllers, path = line.split(":", 2)
        rows.append(CgroupLine(tuple(filter(None, controllers.split(","))), path, number == "0"))
    return tuple(rows)


def unified_cgroup(pid: int) -> str:
    """Return the path in cgroup version 2, cut at CGROUP_LIMIT; empty without one or without the process."""
    with suppress(OSError):
        for line in text_of(_read(f"/proc/{pid}/cgroup", CGROUP_LIMIT)).split("\n"):
            if line.startswith("0::"):
                return line.removeprefix("0::")
    return ""


@cache
def cgroup_mounts() -> tuple[str | None, str | None]:
    """Return the mount points of cgroup version 2 and of the version 1 freezer, from /proc/self/mountinfo."""
    unified: str | None = None
    freezer: str | None = None
    for line in _rows("/proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        point, (fstype, *rest) = mount.split()[4], kind.split()
        if fstype == "cgroup2" and unified is None:
            unified = point
        elif fstype == "cgroup" and "freezer" in rest[-1].split(","):
            freezer = point
    return unified, freezer


def frozen(pid: int) -> bool:
    """Return whether a cgroup of the process, or one above it, is frozen (or freezing, in version 1)."""
    unified, freezer = cgroup_mounts()
    for row in cgroups(pid):
        if row.unified and unified and "frozen 1" in _lines(f"{unified}{row.path}/cgroup.events"):
            return True
        if "freezer" in row.controllers and freezer:
            state = _lines(f"{freezer}{row.path}/freezer.state")
            if state and state[0] != "THAWED":
                return True
    return False


def _lines(path: str) -> list[str]:
    # The root cgroup has neither file, and a path of another cgroup namespace does not exist here.
    try:
        return _rows(path)
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """One line of /proc/PID/maps: bytes [start, end), `path` empty for an anonymous mapping."""

    start: int
    end: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str

    @property
    def anonymous(self) -> bool:
        return self.inode == 0 and not self.path

    @property
    def reservation(self) -> bool:
        """Return whether this is reserved address space: anonymous, private, no access."""
        return self.anonymous and self.permissions == "---p"

    @property
    def deleted(self) -> bool:
        return self.path.endswith(" (deleted)")


def parse_map(line: str) -> MemoryMap:
    """Parse one line of maps. Paths keep the kernel's octal escape of a newline."""
    words = line.split(None, 5)
    start, _, end = words[0].partition("-")
    return MemoryMap(
        start=int(start, 16),
        end=int(end, 16),
        permissions=words[1],
        offset=int(words[2], 16),
        device=words[3],
        inode=int(words[4]),
        path=words[5] if len(words) > 5 else "",
    )


@dataclass(frozen=True, slots=True)
class MapLines:
    """Whole lines of maps in order of address. `truncated`: there are more than MAPS_LIMIT of them.

    The text is kept as it was read: a repeated caller compares `text`, and parses it only when it changed.
    """

    text: bytes
    truncated: bool

    @property
    def lines(self) -> list[str]:
        return [text_of(line) for line in self.text.splitlines()]


def map_lines(pid: int, below: int | None = None) -> MapLines:
    """Read /proc/PID/maps, or only the mappings that start below an address.

    The latter reads a page or two instead of thousands of lines. The read waits while the process changes its
    mappings, and can take long: call it from a thread.
    """
    fd = os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return map_lines_of(fd, below) or MapLines(b"", False)
    finally:
        os.close(fd)


def map_lines_of(fd: int, below: int | None) -> MapLines | None:
    """Read an open /proc/PID/maps like map_lines; it shows the program that ran when the file was opened.

    Returns None when nothing is mapped any more. Raises OSError once the process has been reaped. Waits as
    map_lines does.
    """
    # A newline before the first line: each line then begins behind a newline, which is quick to search for.
    text, at, whole, count = bytearray(b"\n"), 0, 1, 0
    # The kernel writes no more lines than the read has space for, and low mappings are mostly a dozen.
    while data := os.pread(fd, FEW_LINES if below is not None and not at else 1 << 16, at):
        at += len(data)
        text += data
        before, whole = whole, text.rfind(b"\n") + 1
        beyond = None if below is None else _from_address(below).search(text, before - 1)
        if beyond is not None:
            whole = beyond.start() + 1
        count += text.count(b"\n", before, whole)
        if count > MAPS_LIMIT:
            return MapLines(b"\n".join(bytes(text[1:whole]).split(b"\n", MAPS_LIMIT)[:-1]) + b"\n", True)
        if beyond is not None:
            break
    return MapLines(bytes(text[1:whole]), False) if at else None


@cache
def _from_address(address: int) -> re.Pattern[bytes]:
    """Return a pattern for the start of a maps line at this address or beyond. Lines have at least 8 digits.

    A number is greater if it has more digits, or as many and, behind the same first ones, a greater digit.
    """
    digits = f"{address:08x}"
    same = [
        f"{digits[:n]}[{HEX[HEX.index(digit) + 1 :]}][{HEX}]{{{len(digits) - n - 1}}}"
        for n, digit in enumerate(digits)
        if digit != HEX[-1]
    ]
    any_of = "|".join([f"[{HEX}]{{{len(digits) + 1},}}", *same, digits])
    return re.compile(f"\n(?:{any_of})-".encode())


def maps(pid: int) -> list[MemoryMap]:
    """Return the mappings in order of address, the first MAPS_LIMIT of them."""
    return [parse_map(line) for line in map_lines(pid).lines]


def age_s(ticks: int) -> float:
    """Return the seconds since this start time (`start_ticks`), including the time that the machine slept."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def start_time(pid: int) -> float:
    """Return the start of the process in seconds since the epoch; off by clock changes since boot."""
    boot = next(float(row.split()[1]) for row in _rows("/proc/stat") if row.startswith("btime "))
    return boot + start_ticks(pid) / os.sysconf("SC_CLK_TCK")
