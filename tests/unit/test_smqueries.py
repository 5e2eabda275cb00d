"""SM queries of a client's driver, as the kernel shows its calls, and threads that are held in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mpsd.base.model import ProcessInstance
from mpsd.gpu.nvidia import smqueries
from mpsd.gpu.nvidia.smqueries import RM_CONTROL, SEIZE, HeldQueries
from mpsd.os import procfs
from tests.support.indriver import process_in_ioctl
from tests.support.waiting import DEADLINE_S, until

READ, CLEAR, ECC_STATUS = 0x83DE030C, 0x83DE0310, 0x2080012F


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[ProcessInstance]:
    """Return a process with a thread that stays in an ioctl. `param`: the request and the command."""
    with process_in_ioctl(*getattr(request, "param", (RM_CONTROL, READ))) as found:
        yield found


def states(client: ProcessInstance) -> dict[int, str]:
    """Return the state letter of each thread. "t": stopped by a tracer."""
    threads = Path(f"/proc/{client.pid}/task").iterdir()
    return {int(thread.name): procfs.parse_stat((thread / "stat").read_bytes()).state for thread in threads}


@pytest.mark.parametrize(
    ("client", "queries"),
    [
        ((RM_CONTROL, READ), True),
        ((RM_CONTROL, CLEAR), True),
        ((RM_CONTROL, ECC_STATUS), False),
        ((RM_CONTROL + 1, READ), False),
    ],
    indirect=["client"],
)
def test_a_query_is_told_from_any_other_call(client: ProcessInstance, queries: bool) -> None:
    querying = smqueries.querying_threads(client)
    assert len(querying) == queries and client.pid not in querying
    assert not smqueries.querying_threads(ProcessInstance(client.pid, client.start_ticks + 1))
    assert not smqueries.querying_threads(ProcessInstance(2**22 + 1, 1))
    before = set(os.listdir("/proc/self/fd"))
    smqueries.querying_threads(client)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_call_whose_argument_cannot_be_read_is_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.IOCTL is not None
    calls = [(1, (procfs.IOCTL, 3, RM_CONTROL, 8))]
    monkeypatch.setattr(procfs, "calls", lambda pid, limit: iter(calls))
    assert not smqueries.querying_threads(ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid())))


def test_only_the_thread_that_queries_is_held_and_it_goes_on_after_release(client: ProcessInstance) -> None:
    (tid,) = smqueries.querying_threads(client)
    seen: queue.Queue[ProcessInstance] = queue.Queue()
    held = HeldQueries(limit_s=DEADLINE_S)
    held.hold("d1", [client, ProcessInstance(2**22 + 1, 1)], seen.put)
    assert seen.get(timeout=DEADLINE_S) == client
    until(lambda: states(client)[tid] == "t", "the thread is held")
    assert [letter for other, letter in states(client).items() if other != tid].count("t") == 0
    held.release("d9")
    assert states(client)[tid] == "t"
    held.release("d1")
    until(lambda: states(client)[tid] == "S", "the thread goes on")
    assert seen.empty() and smqueries.querying_threads(client) == {tid}
    held.close()


@pytest.mark.parametrize("how", ["its time limit", "the end of mpsd"])
def test_a_thread_is_held_no_longer_than(how: str, client: ProcessInstance) -> None:
    (tid,) = smqueries.querying_threads(client)
    seen: queue.Queue[ProcessInstance] = queue.Queue()
    held = HeldQueries(limit_s=0.05 if "limit" in how else DEADLINE_S)
    held.hold("d1", [client], seen.put)
    assert seen.get(timeout=DEADLINE_S) == client
    if "limit" not in how:
        until(lambda: states(client)[tid] == "t", "the thread is held")
        held.close()
    until(lambda: states(client)[tid] == "S", "the thread goes on")
    held.close()


def test_a_client_that_blocks_a_look_at_it_keeps_no_other_one_stopped(
    client: ProcessInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of a client's memory may wait for that client, for instance in a file system of its own."""
    (tid,) = smqueries.querying_threads(client)
    hostile, over = ProcessInstance(2**22 + 1, 1), threading.Event()
    threads_of = smqueries.querying_threads

    def look(of: ProcessInstance) -> set[int]:
        if of == hostile:
            over.wait(DEADLINE_S)
        return threads_of(of)

    monkeypatch.setattr(smqueries, "querying_threads", look)
    held = HeldQueries(limit_s=DEADLINE_S)
    held.hold("d1", [hostile, client], lambda client: None)
    until(lambda: states(client)[tid] == "t", "the thread is held")
    held.release("d1")
    until(lambda: states(client)[tid] != "t", "the thread goes on")
    over.set()
    held.close()


def test_a_client_can_be_killed_while_it_is_held(client: ProcessInstance) -> None:
    (tid,) = smqueries.querying_threads(client)
    held = HeldQueries(limit_s=DEADLINE_S)
    held.hold("d1", [client], lambda client: None)
    until(lambda: states(client)[tid] == "t", "the thread is held")
    os.kill(client.pid, signal.SIGKILL)
    until(lambda: set(states(client)) == {client.pid}, "its threads have ended")
    assert os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
    held.close()


def test_a_client_under_a_debugger_is_left_alone(client: ProcessInstance) -> None:
    (tid,) = smqueries.querying_threads(client)
    attached, over = threading.Event(), threading.Event()
    refused: list[int] = []

    def debug() -> None:
        refused.append(ctypes.CDLL(None).ptrace(SEIZE, tid, None, None))
        attached.set()
        over.wait(DEADLINE_S)

    debugger = threading.Thread(target=debug)
    debugger.start()
    assert attached.wait(DEADLINE_S)
    seen: queue.Queue[ProcessInstance] = queue.Queue()
    held = HeldQueries(limit_s=DEADLINE_S)
    held.hold("d1", [client], seen.put)
    assert seen.get(timeout=DEADLINE_S) == client
    # It is looked at again and again, and each time the debugger has it.
    looks = [smqueries.querying_threads(client) for _ in range(50)]
    assert refused == [0] and looks == [{tid}] * 50 and states(client)[tid] != "t"
    over.set()
    debugger.join()
    until(lambda: states(client)[tid] == "t", "the thread is held once the debugger is gone")
    held.close()


def test_a_look_reads_no_page_that_is_not_present() -> None:
    """Such a read could wait for the file system of a mapped file."""
    with ExitStack() as stack:
        opened = (smqueries._opened(stack, f"/proc/self/{name}") for name in ("mem", "pagemap"))
        memory, entries = opened
        pages = stack.enter_context(mmap.mmap(-1, 2 * procfs.PAGE_SIZE))
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert smqueries._u32(memory, entries, start) is None
        pages[:8] = b"\1" * 8
        assert smqueries._u32(memory, entries, start + 4) == 0x01010101
        assert smqueries._u32(memory, entries, start + 2) is None
        assert smqueries._u32(memory, entries, start + procfs.PAGE_SIZE) is None


def test_if_no_thread_can_be_started_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    held = HeldQueries()
    with pytest.raises(RuntimeError, match="new thread"):
        held.hold("d1", [ProcessInstance(2**22 + 1, 1)], lambda client: None)
    held.close()
