"""Which server is at a fault: by the driver calls in which servers are, without any driver."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping

import pytest

from mpsd.base.model import ProcessInstance
from mpsd.mps import servercalls
from mpsd.mps.servercalls import APART_S, LIMIT_S, LONG_S, Call, CallDurations
from mpsd.os import procfs
from tests.support.core import server_of
from tests.support.indriver import process_in_ioctl
from tests.support.simnode import until

FIRST, OTHER = (7, (16, 10, 0xC020462A, 0x7F00)), (7, (16, 10, 0xC020462A, 0x7F80))
DEADLINE_S = 20.0
SERVERS = {"d1": server_of("d1"), "d2": server_of("d2")}


def found(calls: Callable[[int], Mapping[str, tuple[Call, ...]]]) -> str | None:
    """Return what is found if look N, a millisecond after the one before, sees calls(N)."""
    probes = itertools.count()
    now = 0

    def look(server: ProcessInstance) -> tuple[Call, ...]:
        nonlocal now
        now = next(probes) // len(SERVERS)
        domain = next(d for d, one in SERVERS.items() if one == server)
        return calls(now).get(domain, ())

    finding = servercalls.find(SERVERS, look, lambda: now / 1e3, step_s=0, patience_s=DEADLINE_S)
    return asyncio.run(finding)


def test_the_one_that_stays_in_one_call_is_found() -> None:
    assert found(lambda ms: {"d2": (FIRST,)}) == "d2"
    # The call begins a little later, beside a thread that comes and goes.
    assert found(lambda ms: {"d2": (FIRST, (8, OTHER[1])) if ms % 2 else (FIRST,) if ms > 3 else ()}) == "d2"


def test_how_long_a_call_lasts_is_what_was_seen_of_it() -> None:
    """The time that a look takes, or waits for a thread, does not count."""
    seen = {"d1": (FIRST,)}
    patience = CallDurations()
    assert not patience.see(0.0, 0.009, seen)
    assert not patience.see(0.010, 0.011, seen)
    assert not patience.see(0.013, 0.014, seen)
    assert patience.see(0.0171, 0.0172, seen) == {"d1"}
    # Two looks that are far apart may have seen two calls.
    assert not patience.see(0.0172 + APART_S + 0.001, 0.03, seen)
    assert not patience.see(0.031, 0.032, {"d1": ()})
    assert not patience.see(0.0345, 0.035, seen)


def test_who_makes_many_calls_is_not() -> None:
    assert found(lambda ms: {"d1": (FIRST if ms % 6 else OTHER,), "d2": (OTHER,) if ms > 20 else ()}) == "d2"
    assert found(lambda ms: {"d1": (FIRST if ms // 5 % 2 else OTHER,)}) is None


def test_nobody_is_where_two_are_or_none() -> None:
    assert found(lambda ms: {"d1": (FIRST,), "d2": (FIRST,)}) is None
    assert found(lambda ms: {}) is None


def test_another_thread_in_the_same_call_is_another_call() -> None:
    assert found(lambda ms: {"d1": ((ms // 4, FIRST[1]),)}) is None


def test_times_are_what_was_measured() -> None:
    """Calls of faulting servers last at least 15 ms; the report has to come before the server's own."""
    assert 0.005 <= LONG_S <= 0.01 and LIMIT_S <= 0.3


@pytest.fixture
def reader() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_the_kernel_says_in_which_call_a_thread_is(reader: subprocess.Popen[bytes]) -> None:
    """The process reads from its standard input: read(0, buffer, count)."""
    ((tid, call),) = until(lambda: [c for c in procfs.calls(reader.pid) if c[1][1] == 0])
    assert tid == reader.pid and call[3] > 0
    instance = ProcessInstance(reader.pid, procfs.start_ticks(reader.pid))
    assert servercalls.calls_of(instance) == ()
    assert servercalls.calls_of(ProcessInstance(2**22 + 1, 1)) == ()


@pytest.fixture
def at_fault() -> Iterator[ProcessInstance]:
    with process_in_ioctl() as found:
        yield found


def test_a_process_that_stays_in_an_ioctl_is_found_beside_one_that_does_not(
    at_fault: ProcessInstance, reader: subprocess.Popen[bytes]
) -> None:
    until(lambda: servercalls.calls_of(at_fault))
    other = ProcessInstance(reader.pid, procfs.start_ticks(reader.pid))
    finding = servercalls.find({"d1": other, "d2": at_fault}, limit_s=DEADLINE_S, patience_s=DEADLINE_S)
    assert asyncio.run(finding) == "d2"


def test_calls_of_the_driver_alone_count_and_of_that_life_of_the_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    ioctl = (os.uname().machine == "aarch64" and 29) or 16
    calls = [(1, (ioctl, 10, 1, 2)), (2, (0, 0, 1, 2))]
    monkeypatch.setattr(procfs, "calls", lambda pid: iter(calls))
    me = ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))
    assert servercalls.calls_of(me) == (calls[0],)
    assert servercalls.calls_of(ProcessInstance(me.pid, me.start_ticks + 1)) == ()


def test_what_may_not_be_seen_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> Iterator[Call]:
        raise PermissionError("not for us")

    monkeypatch.setattr(procfs, "calls", refuse)
    assert servercalls.calls_of(ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))) == ()


@pytest.mark.parametrize(
    ("line", "call"),
    [
        (b"16 0xa 0xc020462a 0x7f00 0x0 0x0 0x0 0x7ffd 0x7f11\n", (16, 10, 0xC020462A, 0x7F00)),
        (b"running\n", None),
        (b"-1 0x7ffd 0x7f11\n", None),
        (b"", None),
    ],
)
def test_lines_of_proc(line: bytes, call: tuple[int, ...] | None) -> None:
    assert procfs.parse_call(line) == call
