"""SM queries of a client's driver, as the kernel shows its calls."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpsd.base.model import ProcessInstance
from mpsd.gpu.nvidia import smqueries
from mpsd.os import procfs
from tests.support.waiting import DEADLINE_S, until

READ, CLEAR, ECC_STATUS = 0x83DE030C, 0x83DE0310, 0x2080012F
ONE, OTHER = ProcessInstance(1, 1), ProcessInstance(2, 1)


def instance(pid: int) -> ProcessInstance:
    return ProcessInstance(pid, procfs.start_ticks(pid))


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[ProcessInstance]:
    """Return a process with a thread that stays in an ioctl. `param`: the request and the command."""
    program = [sys.executable, "-m", "tests.support.intodriver", *map(str, request.param)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        said = made.stdout.readline().strip().decode()
        if said != "ready":
            pytest.skip(f"no filter of system calls here: {said}")
        found = instance(made.pid)
        until(lambda: any(c[0] == procfs.IOCTL for _, c in procfs.calls(made.pid)), "the ioctl")
        yield found
        made.kill()


@pytest.mark.parametrize(
    ("client", "queries"),
    [
        ((smqueries.RM_CONTROL, READ), True),
        ((smqueries.RM_CONTROL, CLEAR), True),
        ((smqueries.RM_CONTROL, ECC_STATUS), False),
        ((smqueries.RM_CONTROL + 1, READ), False),
    ],
    indirect=["client"],
)
def test_a_query_is_told_from_any_other_call(client: ProcessInstance, queries: bool) -> None:
    assert smqueries.is_querying(client) is queries
    assert not smqueries.is_querying(ProcessInstance(client.pid, client.start_ticks + 1))
    assert not smqueries.is_querying(ProcessInstance(2**22 + 1, 1))
    before = set(os.listdir("/proc/self/fd"))
    smqueries.is_querying(client)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_call_whose_argument_cannot_be_read_is_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.IOCTL is not None
    calls = [(1, (procfs.IOCTL, 3, smqueries.RM_CONTROL, 8))]
    monkeypatch.setattr(procfs, "calls", lambda pid: iter(calls))
    assert not smqueries.is_querying(instance(os.getpid()))


def seen(querying: dict[int, set[ProcessInstance]], clients: set[ProcessInstance]) -> list[ProcessInstance]:
    """Return what a watch finds. `querying`: which clients query, by the number of the round."""
    now, asked = 0.0, dict.fromkeys(clients, 0)

    def probe(client: ProcessInstance) -> bool:
        nonlocal now
        now += 0.01
        asked[client] += 1
        return client in querying.get(asked[client], set())

    async def run() -> list[ProcessInstance]:
        return [c async for c in smqueries.find(clients, probe, lambda: now, step_s=0)]

    return asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_each_client_is_told_once() -> None:
    assert seen({2: {ONE, OTHER}}, {ONE, OTHER}) == [ONE, OTHER]
    assert seen({1: {OTHER}, 2: {OTHER}, 3: {ONE}}, {ONE, OTHER}) == [OTHER, ONE]


def test_a_watch_ends() -> None:
    assert seen({1: {ONE}}, {ONE, OTHER}) == [ONE]
    assert seen({}, {ONE}) == []
    assert seen({}, set()) == []
    assert smqueries.LIMIT_S <= 0.5
