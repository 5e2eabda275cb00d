"""The start of a domain's server, with a scripted control daemon."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mpsd.base.errors import DeadlineError
from mpsd.base.model import ProcessInstance, ServerState
from mpsd.mps import startup
from mpsd.mps.log import LogParser
from mpsd.mps.startup import ServerEndedError, StartWatch

FAILED = "[2026-11-29 12:00:00.000 Legacy Server 77] Failed to start : invalid argument"
EXITED = "[2026-11-29 12:00:00.001 Control 70] Server 77 exited with status 1"


class Control:
    """A control daemon whose server lives while `server` is set. It never becomes active by itself."""

    def __init__(self) -> None:
        self.server: ProcessInstance | None = None
        self.active = asyncio.Event()
        self.error: Exception | None = None
        self.state: ServerState | None = ServerState.INITIALIZING
        self.questions = 0

    def server_instances(self) -> tuple[ProcessInstance, ...]:
        return (self.server,) if self.server else ()

    async def server_state(self, server: int, deadline_s: float) -> ServerState:
        self.questions += 1
        if self.state is None:
            raise DeadlineError("no answer")
        return self.state

    async def wait_active(self, deadline_s: float) -> int:
        await self.active.wait()
        if self.error is not None:
            raise self.error
        return 77


def outcome(*steps: Any) -> str:
    """Return the error of a start; empty for success. A step is a line, or a call with the control daemon."""

    async def run() -> None:
        control, watch, parser = Control(), StartWatch(), LogParser()
        control.server = ProcessInstance(77, 1)
        stand_in: Any = control
        waiting = asyncio.create_task(watch.until_active(stand_in, 20.0))
        for step in steps:
            await asyncio.sleep(0)
            if isinstance(step, str):
                watch.feed(parser.feed(step))
            else:
                step(control)
        async with asyncio.timeout(10):
            await waiting

    try:
        asyncio.run(run())
    except ServerEndedError as error:
        return error.message
    return ""


def ends(control: Control) -> None:
    control.server = None


def is_active(control: Control) -> None:
    control.active.set()


def test_a_server_that_fails_is_quoted() -> None:
    text = outcome(ends, FAILED, EXITED)
    assert text == "server 77 ended with status 1: Failed to start : invalid argument"


def test_a_server_that_ends_without_a_reason_is_quoted_with_its_last_line() -> None:
    assert outcome(ends, EXITED) == "server 77 ended with status 1"
    last = "[2026-11-29 12:00:00.000 Server 77] out of memory"
    assert outcome(ends, last, EXITED) == "server 77 ended with status 1: out of memory"


def test_the_reason_is_told_although_the_status_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "STATUS_PATIENCE_S", 0.01)
    assert outcome(FAILED, ends) == "the server ended: Failed to start : invalid argument"


def test_lines_that_no_process_confirms_end_no_start() -> None:
    """Any user may be able to write the log of a shared domain."""
    assert outcome(FAILED, EXITED, is_active) == ""


def test_what_the_control_daemon_raises_is_passed_on() -> None:
    async def run() -> None:
        control, watch = Control(), StartWatch()
        control.error = DeadlineError("no server became ACTIVE within 20 s")
        control.active.set()
        stand_in: Any = control
        await watch.until_active(stand_in, 20.0)

    with pytest.raises(DeadlineError, match="within 20 s"):
        asyncio.run(run())


def test_a_flood_of_text_is_cut() -> None:
    text = outcome(ends, "[2026-11-29 12:00:00.000 Server 77] Failed to start : " + "x" * 5000, EXITED)
    assert len(text) < 400


READY = "[2026-11-29 12:00:00.000 Control 70] NEW SERVER 77: Ready"
BEGUN = "[2026-11-29 12:00:00.000 Control 70] Starting new server 77 for user 1000"


class First:
    """The first server of a control daemon. `told`: failed starts, `late`: those of a server that runs.

    `died`: servers that ended after they were ready, `asked`: count of questions for the state.
    """

    def __init__(self, deadline_s: float = 20.0) -> None:
        self.control, self.parser = Control(), LogParser()
        self.told: list[tuple[str, ProcessInstance | None]] = []
        self.late: list[tuple[str, ProcessInstance]] = []
        self.died: list[ProcessInstance] = []
        self.asked = 0
        self.tasks: set[asyncio.Task[None]] = set()
        stand_in: Any = self.control
        self.server = startup.FirstServer(
            stand_in,
            deadline_s,
            startup.FirstServerCallbacks(
                lambda why, server: self.told.append((why, server)),
                lambda why, server: self.late.append((why, server)),
                self.died.append,
                self._ask,
            ),
            lambda work: self.tasks.add(asyncio.ensure_future(work)),
        )

    def _ask(self) -> None:
        self.asked += 1

    async def until_late(self) -> None:
        async with asyncio.timeout(10):
            while not self.late:
                await asyncio.sleep(0.001)

    def feed(self, *lines: str, private: bool = True) -> None:
        for line in lines:
            self.server.feed(self.parser.feed(line), private=private)

    async def settled(self) -> list[tuple[str, ProcessInstance | None]]:
        async with asyncio.timeout(10):
            await asyncio.gather(*self.tasks)
        return self.told


def test_a_first_server_that_ends_is_quoted_once() -> None:
    async def run() -> None:
        first, process = First(), ProcessInstance(77, 1)
        first.feed(BEGUN)
        first.control.server = process
        first.feed(FAILED)
        first.control.server = None
        first.server.ended(process)
        first.feed(EXITED)
        words = "server 77 ended with status 1: Failed to start : invalid argument"
        assert await first.settled() == [(words, process)] and first.server.told

    asyncio.run(run())


@pytest.mark.parametrize(("private", "told"), [(True, 1), (False, 0)])
def test_an_unseen_server_counts_in_a_private_domain_alone(private: bool, told: int) -> None:
    async def run() -> None:
        first = First()
        for _ in range(2):
            first.feed(BEGUN, FAILED, EXITED, private=private)
            assert len(await first.settled()) == told

    asyncio.run(run())


def test_the_end_of_another_server_is_no_failed_start() -> None:
    async def run() -> None:
        first = First()
        first.feed(EXITED)
        assert await first.settled() == []

    asyncio.run(run())


def test_a_first_server_that_hangs_is_reported_at_the_deadline() -> None:
    async def run() -> None:
        first, process = First(0.01), ProcessInstance(77, 1)
        first.control.server = process
        first.feed(BEGUN)
        await first.until_late()
        assert first.late == [("server 77 was not ACTIVE after 0.01 s", process)] and not first.told

    asyncio.run(run())


def test_a_first_server_that_was_not_seen_at_its_line_is_reported_too() -> None:
    async def run() -> None:
        first, process = First(0.01), ProcessInstance(77, 1)
        first.feed(BEGUN)
        first.control.server = process
        await first.until_late()
        assert first.late == [("server 77 was not ACTIVE after 0.01 s", process)]

    asyncio.run(run())


def test_the_control_daemon_decides_whether_a_first_server_is_late() -> None:
    """An earlier question may have had no answer, although the server is ACTIVE."""

    async def run() -> None:
        first = First(0.01)
        first.control.server = ProcessInstance(77, 1)
        first.control.state = ServerState.ACTIVE
        first.feed(BEGUN)
        async with asyncio.timeout(10):
            while first.asked < 2:
                await asyncio.sleep(0.001)
        assert not first.late and not first.told
        first.server.close()

    asyncio.run(run())


def test_without_an_answer_a_first_server_is_not_late() -> None:
    async def run() -> None:
        first = First(0.01)
        first.control.server = ProcessInstance(77, 1)
        first.control.state = None
        first.feed(BEGUN)
        async with asyncio.timeout(10):
            while first.control.questions < 2:
                await asyncio.sleep(0.001)
        assert not first.late and not first.asked
        first.control.state = ServerState.INITIALIZING
        await first.until_late()

    asyncio.run(run())


@pytest.mark.parametrize("ready", [True, False])
def test_a_first_server_that_ends_after_it_was_ready_has_died(ready: bool) -> None:
    """It may have had clients before mpsd read its state."""

    async def run() -> None:
        first, process = First(), ProcessInstance(77, 1)
        first.control.server = process
        first.feed(BEGUN, *([READY] if ready else []))
        first.control.server = None
        first.server.ended(process)
        first.feed(EXITED)
        told = await first.settled()
        assert (first.died, [server for _, server in told]) == (([process], []) if ready else ([], [process]))

    asyncio.run(run())
