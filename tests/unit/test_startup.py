"""The start of a domain's server, with a scripted control daemon."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mpsd.base.errors import DeadlineError
from mpsd.base.model import ProcessInstance
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

    def server_instances(self) -> tuple[ProcessInstance, ...]:
        return (self.server,) if self.server else ()

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
