"""Processes: identity, liveness, memory maps."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from mpsd.base.errors import AmbiguousError, BusyError, NotFoundError
from mpsd.base.model import AddressKind, Liveness, ProcessInstance
from mpsd.daemon import adoption
from mpsd.os import processes, procfs

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Iterator[Child]:
    """A process that sends a byte once it runs, and again after each byte it is sent."""
    program = (
        "import sys\nwhile True:\n sys.stdout.buffer.write(b'.'); sys.stdout.flush()\n"
        " if not sys.stdin.read(1): break"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        yield process
        process.kill()


def test_the_comm_field_may_hold_anything() -> None:
    fields = ["S", "7", *["0"] * 17, "4242", "0", "0", "0", "11", "0", "22", *["0"] * 20]
    raw = b"9 (a) b (c\n) d) " + " ".join(fields).encode()
    stat = procfs.parse_stat(raw)
    assert (stat.comm, stat.state, stat.ppid, stat.start_ticks) == ("a) b (c\n) d", "S", 7, 4242)
    assert (stat.start_code, stat.start_stack) == (11, 22)


def test_a_process_is_pinned_with_its_life(child: Child) -> None:
    with processes.Pinned.open(child.pid) as pinned:
        assert pinned.pid == child.pid and pinned.alive()
        assert not os.get_inheritable(pinned.fileno())
        with processes.Pinned.open(child.pid, pinned.instance.start_ticks) as again:
            assert again.instance == pinned.instance
        with pytest.raises(AmbiguousError):
            processes.Pinned.open(child.pid, pinned.instance.start_ticks + 1)
        assert pinned.signal(signal.SIGKILL)
        assert asyncio.run(pinned.ended(20))
        child.wait()
        assert not pinned.alive()
        assert not pinned.signal(signal.SIGKILL)
    with pytest.raises(NotFoundError):
        processes.Pinned.open(child.pid, pinned.instance.start_ticks)


def test_a_failed_pin_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AmbiguousError):
        processes.Pinned.open(os.getpid(), 1)
    assert os.listdir("/proc/self/fd") == before


def test_who_has_no_descriptor_left_does_not_take_the_living_for_dead(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = processes.Pinned.open(child.pid)
    living.close()
    spent = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=spent))
    with pytest.raises(BusyError, match="Too many open files") as told:
        processes.Pinned.open(child.pid)
    assert "LimitNOFILE" in told.value.remedy
    with pytest.raises(BusyError):
        adoption._alive(living.instance)


def test_waiting_for_an_end_has_a_deadline(child: Child) -> None:
    with processes.Pinned.open(child.pid) as pinned:
        assert not asyncio.run(pinned.ended(0.01))


def test_facts_of_a_process(child: Child) -> None:
    facts = processes.facts(child.pid)
    assert facts.instance == ProcessInstance(child.pid, procfs.start_ticks(child.pid))
    assert (facts.ppid, facts.uid, facts.gid) == (os.getpid(), os.geteuid(), os.getegid())
    assert facts.command.startswith(f"{sys.executable} -c import sys")
    assert facts.exe == os.path.realpath(sys.executable)
    assert facts.cgroup.startswith("/")
    assert child.pid in procfs.children(os.getpid())
    memory = processes.host_memory(child.pid)
    assert memory is not None and memory > 1 << 20


def test_nothing_is_known_of_a_process_that_is_not_there() -> None:
    gone = ProcessInstance(2**22 + 1, 1)
    for ask in (processes.facts, processes.maps):
        with pytest.raises(NotFoundError):
            ask(gone.pid)
    with pytest.raises(NotFoundError):
        processes.exec_identity(gone)
    assert processes.liveness(gone) is Liveness.DEAD
    assert processes.host_memory(gone.pid) is None
    assert processes.environment_value(gone.pid, "PATH") is None
    assert processes.mapping_at(1 << 40, gone) is AddressKind.UNKNOWN


def test_stopped_continued_and_dead(child: Child) -> None:
    instance = ProcessInstance(child.pid, procfs.start_ticks(child.pid))
    assert processes.liveness(instance) is Liveness.RUNNING
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert processes.liveness(instance) is Liveness.STOPPED
    os.kill(child.pid, signal.SIGCONT)
    os.waitpid(child.pid, os.WCONTINUED)
    assert processes.liveness(instance) is Liveness.RUNNING
    assert processes.liveness(ProcessInstance(child.pid, instance.start_ticks - 1)) is Liveness.DEAD
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    # A zombie has a stat line, and still counts as dead.
    assert processes.liveness(instance) is Liveness.DEAD


def test_a_traced_process_shows(child: Child) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    seize, detach = 0x4206, 17
    if libc.ptrace(seize, child.pid, None, None) != 0:
        pytest.skip("this machine does not allow ptrace of a child")
    instance = ProcessInstance(child.pid, procfs.start_ticks(child.pid))
    assert processes.liveness(instance) is Liveness.TRACED
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert processes.liveness(instance) is Liveness.TRACED
    libc.ptrace(detach, child.pid, None, ctypes.c_void_p(0))


@pytest.mark.parametrize(
    ("version", "file", "text", "expected"),
    [
        (2, "cgroup.events", "populated 1\nfrozen 1\n", True),
        (2, "cgroup.events", "populated 1\nfrozen 0\n", False),
        (1, "freezer.state", "FREEZING\n", True),
        (1, "freezer.state", "THAWED\n", False),
        (1, "other", "", False),
    ],
)
def test_a_frozen_cgroup_shows(
    tmp_path: os.PathLike[str],
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    file: str,
    text: str,
    expected: bool,
) -> None:
    root = os.fspath(tmp_path)
    os.makedirs(f"{root}/job/one")
    with open(f"{root}/job/one/{file}", "w") as out:
        out.write(text)
    row = (
        procfs.CgroupLine((), "/job/one", True)
        if version == 2
        else procfs.CgroupLine(("freezer",), "/job/one", False)
    )
    monkeypatch.setattr(procfs, "cgroups", lambda pid: (row,))
    monkeypatch.setattr(procfs, "cgroup_mounts", lambda: (root, None) if version == 2 else (None, root))
    instance = ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))
    assert processes.liveness(instance) is (Liveness.FROZEN if expected else Liveness.RUNNING)


def test_an_exec_shows_though_pid_and_start_stay() -> None:
    # The second program is the same file: only the layout of its memory tells.
    again = (
        "import os,sys; print(flush=True); sys.stdin.readline();"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    then = "import sys; print(flush=True); sys.stdin.readline()"
    arguments = [sys.executable, "-c", again, "-c", then]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        instance = ProcessInstance(process.pid, procfs.start_ticks(process.pid))
        before = processes.exec_identity(instance)
        assert processes.exec_identity(instance) == before
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert processes.exec_identity(instance) != before
        assert procfs.start_ticks(process.pid) == instance.start_ticks
        process.kill()


def test_the_environment_of_another_process() -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": "/run/x y", "ODD": "a=b"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        # The kernel shows the environment a moment after exec has closed the parent's pipe.
        assert process.stdout is not None and process.stdout.readline()
        assert processes.environment_value(process.pid, "CUDA_MPS_PIPE_DIRECTORY") == "/run/x y"
        assert processes.environment_value(process.pid, "ODD") == "a=b"
        assert processes.environment_value(process.pid, "NONE") is None
        process.kill()


def test_lines_of_maps() -> None:
    plain = procfs.parse_map("7f00-7fff r-xp 00001000 fe:00 1234                       /opt/a file (deleted)")
    assert (plain.start, plain.end, plain.offset, plain.inode) == (0x7F00, 0x7FFF, 0x1000, 1234)
    assert plain.path == "/opt/a file (deleted)" and plain.deleted and not plain.anonymous
    reserved = procfs.parse_map("100000000000-100040000000 ---p 00000000 00:00 0 ")
    assert reserved.reservation and reserved.anonymous
    assert not procfs.parse_map("1000-2000 ---p 00000000 00:00 0 [stack]").reservation


def test_what_lies_at_an_address() -> None:
    me = ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    length = 1 << 30
    reserved = libc.mmap(None, ctypes.c_size_t(length), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        assert processes.mapping_at(0, me) is AddressKind.NULL_PAGE
        assert processes.mapping_at(0xFFFF, me) is AddressKind.NULL_PAGE
        assert processes.mapping_at(reserved + length // 2, me) is AddressKind.FREED
        assert processes.mapping_at(id(me), me) is AddressKind.HOST_MAPPING
        assert processes.mapping_at(0x10000, me) is AddressKind.UNKNOWN
        assert processes.mapping_at(0xDEAD << 48, me) is AddressKind.UNKNOWN
        assert (
            processes.mapping_at(id(me), ProcessInstance(me.pid, me.start_ticks + 1)) is AddressKind.UNKNOWN
        )
    finally:
        libc.munmap(reserved, length)


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert procfs.text_of(b"ok \xff") == "ok \\xff"


def test_long_command_lines_and_maps_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/cat", "-", "x" * 100_000]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
        assert child.stdin is not None and child.stdout is not None
        # Wait until the new program works: before that it is a copy of this one, or still being loaded.
        child.stdin.write(b"there\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"there\n"
        assert sum(map(len, procfs.command_line(child.pid))) < procfs.COMMAND_LIMIT
        assert len(processes.facts(child.pid).command) <= procfs.COMMAND_LIMIT
        assert processes.facts(child.pid, "[not read]").command == "[not read]"
        whole = procfs.map_lines(child.pid)
        assert not whole.truncated
        monkeypatch.setattr(procfs, "MAPS_LIMIT", 3)
        cut = procfs.map_lines(child.pid)
        assert (cut.lines, cut.truncated) == (whole.lines[:3], True)
        second = procfs.parse_map(whole.lines[1]).start
        low = procfs.map_lines(child.pid, second)
        assert (low.lines, low.truncated) == (whole.lines[:1], False)
        # Mappings beyond the last one read are not known.
        last = procfs.parse_map(whole.lines[-1]).start
        instance = processes.facts(child.pid).instance
        assert processes.mapping_at(last, instance) is AddressKind.UNKNOWN
        child.kill()


@pytest.mark.parametrize(
    ("real", "effective", "saved", "borrowed"),
    [(7, 7, 7, False), (0, 7, 0, True), (7, 7, 0, True), (0, 7, 7, True)],
)
def test_a_borrowed_user_shows(
    monkeypatch: pytest.MonkeyPatch, real: int, effective: int, saved: int, borrowed: bool
) -> None:
    me = processes.facts(os.getpid())
    assert not me.borrowed
    fields = procfs.status_fields(os.getpid())
    fields["Uid"] = f"{real}\t{effective}\t{saved}\t{effective}"
    monkeypatch.setattr(procfs, "status_fields", lambda pid: fields)
    found = processes.facts(os.getpid())
    assert (found.uid, found.borrowed) == (effective, borrowed)
    users = processes.users(me.instance)
    assert users.all_are(7) is not borrowed
    with pytest.raises(NotFoundError):
        processes.users(ProcessInstance(os.getpid(), 1))


def test_a_process_whose_environment_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENVIRONMENT_DEADLINE_S", 0.1)
    free = threading.Event()
    real = procfs.environment

    def hangs(pid: int) -> dict[str, str]:
        assert pid != os.getpid() or free.wait(10)
        return real(pid)

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env={"MPSD_TEST_MARK": "here"}) as child:
        while "MPSD_TEST_MARK" not in real(child.pid):
            time.sleep(0.001)
        monkeypatch.setattr(procfs, "environment", hangs)
        found = processes.with_environment("MPSD_TEST_MARK", "here")
        assert [p.pid for p in found] == [child.pid]
        free.set()
        monkeypatch.setattr(procfs, "environment", real)
        monkeypatch.setattr(procfs, "ENVIRONMENT_LIMIT", 4)
        assert procfs.environment(child.pid) == {"MPSD": ""}
