"""Reading the log of a domain: fairly, within a budget, line by line, and with a judgement on the log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from mpsd.base.conditions import Code
from mpsd.core.state import LogState
from mpsd.mps import loghealth, logreader
from mpsd.mps.log import AdminCommand, LogLine, NewClient, Routine
from mpsd.mps.loghealth import ANNOUNCED_KEPT, ANNOUNCED_S, QUIET_AFTER_S, LogHealth
from mpsd.mps.logreader import (
    BACKLOG_LIMIT,
    BEHIND_BYTES,
    BURST_LINES,
    BYTES_PER_LINE,
    LINE_LIMIT,
    LINES_PER_S,
    LOOP_SHARE,
    SLICE_LINES,
    LineBudget,
    LogReader,
)

DEADLINE_S = 20.0
WORKS, INCOMPLETE, QUIET = LogState.WORKS, LogState.INCOMPLETE, LogState.QUIET


# The budget


def test_a_burst_is_read_at_once_and_then_a_rate() -> None:
    budget = LineBudget(0.0)
    assert budget.wait_s(0.0) == 0
    budget.take(int(BURST_LINES), 0, 0.0)
    assert budget.wait_s(0.0) == pytest.approx(1 / LINES_PER_S)
    assert budget.wait_s(0.1) == 0
    budget.take(1000, 0, 0.1)
    # Overdrawn by 800 lines.
    assert budget.wait_s(0.1) == pytest.approx(801 / LINES_PER_S)
    assert budget.wait_s(1000.0) == 0 and budget.left == BURST_LINES


def test_long_lines_cost_more_and_a_clock_that_stands_gives_nothing() -> None:
    budget = LineBudget(5.0)
    budget.take(1, int(BURST_LINES) * BYTES_PER_LINE, 5.0)
    assert budget.wait_s(5.0) > 0 and budget.wait_s(4.0) > 0


def test_lines_that_take_long_cost_the_time() -> None:
    budget = LineBudget(0.0)
    budget.spend(BURST_LINES / LINES_PER_S * LOOP_SHARE, 0.0)
    assert budget.left == pytest.approx(0)
    # A log whose lines take all the time it gets.
    now = handled = 0.0
    while now < 10:
        wait_s = budget.wait_s(now)
        now += wait_s or 0.001
        if not wait_s:
            budget.spend(0.001, now)
            handled += 0.001
    assert handled == pytest.approx(10 * LOOP_SHARE, rel=0.1)


# The judgement


def health(*, adopted: bool = False) -> LogHealth:
    """Return the health of a log that has shown a line at 100 s."""
    made = LogHealth(adopted)
    made.saw(Routine(""), 100.0)
    return made


def state(made: LogHealth, now: float, *, all_read: bool = True) -> LogState:
    return made.judged(now, all_read=all_read)[0]


def announce(made: LogHealth, pid: int, now: float) -> None:
    made.saw(NewClient(pid, 0, pending=False), now)


def test_a_log_without_any_line_is_incomplete() -> None:
    made = LogHealth(adopted=True)
    assert state(made, 1000.0) is INCOMPLETE
    made.saw(Routine(""), 1000.0)
    assert state(made, 1000.0) is WORKS


def test_a_listed_client_without_a_line_makes_the_log_quiet_after_a_while() -> None:
    made = health()
    made.listed([7], 101.0)
    assert state(made, 101.0 + QUIET_AFTER_S - 0.1) is WORKS
    # Its line may be among those that wait.
    assert state(made, 101.0 + QUIET_AFTER_S, all_read=False) is WORKS
    assert made.judged(101.0 + QUIET_AFTER_S, all_read=True) == (QUIET, loghealth.NO_LINE_OF_CLIENT)


def test_a_line_that_comes_in_time_is_enough() -> None:
    made = health()
    announce(made, 8, 100.5)
    made.listed([7, 8], 101.0)
    announce(made, 7, 102.0)
    assert state(made, 200.0) is WORKS


def test_it_works_again_once_it_announces_a_client_that_is_listed() -> None:
    made = health()
    made.listed([7], 101.0)
    assert state(made, 110.0) is QUIET
    made.listed([], 111.0)
    assert state(made, 112.0) is QUIET, "that the client has left says nothing about the log"
    made.saw(Routine(""), 113.0)
    announce(made, 9, 113.0)
    assert state(made, 113.0) is QUIET, "a server can write such a line"
    made.listed([8, 9], 114.0)
    assert state(made, 130.0) is WORKS


def test_clients_of_an_adopted_domain_were_announced_before() -> None:
    made = health(adopted=True)
    made.listed([7], 101.0)
    made.listed([7, 8], 102.0)
    assert state(made, 104.0) is WORKS
    announce(made, 8, 104.0)
    assert state(made, 120.0) is WORKS


def test_a_client_whose_line_came_before_the_adoption_may_be_listed_after_the_first_list() -> None:
    """It waited for its server meanwhile."""
    made = health(adopted=True)
    made.listed([7], 101.0)
    made.listed([7, 8], 101.0 + ANNOUNCED_S - 1, older=[7, 8])
    made.listed([7, 8], 101.0 + ANNOUNCED_S + 1, older=[7, 8])
    assert state(made, 300.0) is WORKS


def test_after_an_adoption_a_client_that_started_later_or_is_listed_late_needs_a_line() -> None:
    made = health(adopted=True)
    made.listed([7], 101.0)
    made.listed([7, 8], 102.0, older=[7])
    assert state(made, 102.0 + QUIET_AFTER_S) is QUIET
    made = health(adopted=True)
    made.listed([7], 101.0)
    made.listed([7, 8], 101.0 + ANNOUNCED_S, older=[7, 8])
    assert state(made, 101.0 + ANNOUNCED_S + QUIET_AFTER_S) is QUIET


def test_in_a_domain_that_mpsd_started_each_client_needs_a_line() -> None:
    made = health()
    made.listed([7], 101.0, older=[7])
    assert state(made, 101.0 + QUIET_AFTER_S) is QUIET


def test_a_later_process_with_the_pid_of_an_earlier_client_needs_its_own_line() -> None:
    made = health()
    announce(made, 7, 100.0)
    made.listed([7], 101.0)
    made.listed([], 102.0)
    # It may have been announced and wait for its server.
    made.listed([7], 103.0)
    assert state(made, 110.0) is WORKS
    made.listed([], 111.0 + ANNOUNCED_S)
    made.listed([7], 112.0 + ANNOUNCED_S)
    assert state(made, 120.0 + ANNOUNCED_S) is QUIET


def test_a_client_of_another_pid_namespace_has_a_line_without_its_pid() -> None:
    made = health()
    announce(made, 0, 100.0)
    made.listed([0, 7], 101.0)
    assert state(made, 110.0) is WORKS
    made.listed([0, 7, 8], 111.0)
    assert state(made, 120.0) is QUIET


def test_a_command_without_a_line_makes_the_log_quiet_if_commands_were_logged_before() -> None:
    made = health()
    made.answered(101.0)
    assert state(made, 110.0) is WORKS, "this driver may not log commands"
    made.saw(AdminCommand("get_client_list 1"), 111.0)
    made.answered(112.0)
    assert state(made, 112.0 + QUIET_AFTER_S - 0.1) is WORKS
    made.answered(114.0)
    assert made.judged(112.0 + QUIET_AFTER_S, all_read=True) == (QUIET, loghealth.NO_LINE_OF_COMMAND)
    made.saw(Routine(""), 116.0)
    assert state(made, 116.0) is WORKS
    # The line of a command may be read before its answer.
    made.answered(115.9)
    assert state(made, 130.0) is WORKS


def test_a_flood_is_over_with_a_list_that_began_after_it() -> None:
    made = health()
    made.fell_behind(101.0)
    made.listed([], 102.0)
    assert state(made, 102.0) is INCOMPLETE, "lines still wait"
    made.caught_up(103.0)
    made.listed([], 102.9)
    assert state(made, 103.0) is INCOMPLETE
    made.listed([], 103.1)
    assert state(made, 103.2) is WORKS
    made.caught_up(104.0)
    assert state(made, 104.0) is WORKS


def test_a_client_whose_line_was_skipped_makes_the_log_quiet() -> None:
    made = health()
    made.fell_behind(101.0)
    made.caught_up(102.0)
    made.listed([7], 103.0)
    assert state(made, 103.0 + QUIET_AFTER_S) is QUIET


def test_a_full_disk_is_no_quiet_log() -> None:
    made = health()
    made.saw(AdminCommand("x"), 100.0)
    made.disk_full(True, 101.0)
    made.answered(101.0)
    made.listed([7], 101.0)
    assert state(made, 110.0) is INCOMPLETE
    made.disk_full(True, 110.0)
    made.disk_full(False, 111.0)
    assert state(made, 111.0) is INCOMPLETE
    made.listed([7], 112.0)
    assert state(made, 120.0) is WORKS


def test_a_file_that_cannot_be_read_is_quiet() -> None:
    made = health()
    made.unreadable = "no permission"
    assert made.judged(100.0, all_read=True) == (QUIET, "no permission")


def test_invented_pids_neither_grow_the_memory_nor_hide_real_lines() -> None:
    made = health()
    announce(made, 1, 100.0)
    made.listed([1], 101.0)
    for pid in range(2, 5 * ANNOUNCED_KEPT):
        announce(made, pid, 102.0)
    assert len(made._announced) <= 2 * ANNOUNCED_KEPT + 1
    made.listed([1], 103.0)
    assert state(made, 110.0) is WORKS


# The reader


class Log:
    """A log file and its reader."""

    def __init__(self, base: Path, name: str = "d1", *, adopted: bool = False) -> None:
        self.path = base / f"{name}.log"
        self.writer: str | None = None
        self.lines: list[LogLine] = []
        self.order: list[str] = []
        self.fails = ""
        self.states: list[tuple[LogState, str]] = []
        self.name = name
        self.reader = LogReader(
            name,
            str(self.path),
            lambda: self.writer,
            self._handle,
            lambda state, reason: self.states.append((state, reason)),
            adopted=adopted,
        )

    def _handle(self, line: LogLine) -> None:
        if self.fails and self.fails in line.text:
            raise ValueError(line.text)
        self.lines.append(line)
        self.order.append(self.name)

    def write(self, *lines: str) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.001)

    async def read(self, count: int) -> None:
        await self.until(lambda: len(self.lines) >= count)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await work()

    asyncio.run(scenario())


@contextmanager
def reading(*logs: Log) -> Iterator[None]:
    try:
        yield
    finally:
        for log in logs:
            log.reader.close()


def test_lines_come_in_order_and_are_cut(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        with reading(log):
            log.write("one", "x" * 5000, "NEW CLIENT 7 from user 0")
            await log.read(3)
            assert [len(line.text) for line in log.lines[:2]] == [3, LINE_LIMIT]
            assert log.lines[2].event == NewClient(7, 0, pending=False)
            assert log.reader.totals()["log_lines_cut"] == 1

    run(work)


def test_an_exception_costs_its_line_and_is_logged_sparingly(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        log.fails = "bad"
        with reading(log), structlog.testing.capture_logs() as logged:
            log.write(*(["bad", "good"] * 150))
            await log.read(150)
            assert {line.text for line in log.lines} == {"good"}
            assert log.reader.totals()["log_lines_failed"] == 150
            assert [entry["failed"] for entry in logged] == [1, 10, 100]

    run(work)


def test_a_long_log_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logreader, "SLICE_LINES", 32)

    async def work() -> None:
        long, short = Log(tmp_path, "long"), Log(tmp_path, "short")
        short.order = long.order
        with reading(long, short):
            long.write(*["line"] * 3000)
            short.write("line")
            await short.read(1)
            assert long.order.index("short") <= 4 * SLICE_LINES
            await long.read(3000)

    run(work)


def test_lines_beyond_the_budget_wait_and_are_read_later_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        with reading(log):
            count = int(BURST_LINES) + 600
            log.write(*(str(number) for number in range(count)))
            await log.until(lambda: log.states)
            assert log.states == [(INCOMPLETE, "")] and len(log.lines) < count
            assert log.reader.condition().code is Code.LOG_FLOODED
            await log.read(count)
            assert [line.text for line in log.lines] == [str(number) for number in range(count)]
            assert log.reader.totals()["log_bytes_skipped"] == 0
            await log.until(lambda: log.reader._next is None)
            log.reader.listed([], asyncio.get_running_loop().time())
            assert log.states[-1] == (WORKS, "") and log.reader.condition() is None

    run(work)


def test_a_flood_is_skipped_to_its_end(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        with reading(log):
            log.write(*[f"{number:07d}" for number in range(2 * BACKLOG_LIMIT // 8)], "the last")
            await log.until(lambda: log.lines and log.lines[-1].text == "the last")
            # What was read first and the last part are not skipped.
            assert log.reader.totals()["log_bytes_skipped"] > BACKLOG_LIMIT
            # No line is seen in part.
            assert {len(line.text) for line in log.lines} <= {7, 8}
            assert "KiB skipped" in log.reader.condition().text

    run(work)


def test_a_backlog_may_hide_a_client_before_it_is_read(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        with reading(log):
            log.write(*["line of some length"] * (2 * BEHIND_BYTES // 20))
            await log.read(1)
            assert log.states == [(INCOMPLETE, "")]
            assert log.reader.condition() is None, "it is no flood yet"

    run(work)


def test_the_file_of_the_writer_is_followed_whatever_its_name_is(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        with reading(log), log.path.open("a", buffering=1) as file:
            log.writer = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            file.write("one\n")
            await log.read(1)
            log.path.rename(tmp_path / "d1.log.1")
            log.path.touch()
            file.write("two\n")
            await log.read(2)
            elsewhere = tmp_path / "elsewhere"
            elsewhere.mkdir()
            (tmp_path / "d1.log.1").rename(elsewhere / "old")
            file.write("three\n")
            await log.read(3)
            os.unlink(elsewhere / "old")
            file.write("four\n")
            await log.read(4)
            log.reader.trim(1, 100)
            log.reader.check(disk_full=False)
            assert log.states == []
            log.writer = None
            log.write("five")
            log.reader.check(disk_full=False)
            await log.read(5)
        assert [line.text for line in log.lines] == ["one", "two", "three", "four", "five"]

    run(work)


def test_a_writer_of_another_file_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if str(path).startswith("/proc/") and flags & os.O_NONBLOCK:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode)

    async def work() -> None:
        log = Log(tmp_path)
        log.write("one")
        with reading(log), (tmp_path / "other").open("a") as file:
            await log.read(1)
            log.writer = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            monkeypatch.setattr(os, "open", refuse)
            log.reader.check(disk_full=False)
            ((state, reason),) = log.states
            assert state is QUIET and "Permission denied" in reason and "permissions" in reason
            assert log.reader.condition().code is Code.LOG_QUIET
            log.write("two")
            await log.read(2)
            monkeypatch.undo()
            log.reader.check(disk_full=False)
            assert log.states[-1][0] is WORKS

    run(work)


def test_a_writer_without_a_regular_file_leaves_the_path(tmp_path: Path) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        reader, writer = os.pipe()
        with reading(log):
            log.writer = f"/proc/{os.getpid()}/fd/{writer}"
            log.write("one")
            await log.read(1)
        os.close(reader)
        os.close(writer)

    run(work)


def test_a_command_that_leaves_no_line_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        log = Log(tmp_path)
        loop = asyncio.get_running_loop()
        with reading(log):
            log.write("Cmd:get_client_list 1")
            await log.read(1)
            log.reader.answered(loop.time())
            log.reader.check(disk_full=False)
            assert log.states == [] and log.reader.works
            monkeypatch.setattr(loghealth, "QUIET_AFTER_S", 0.0)
            log.reader.check(disk_full=False)
            assert log.states == [(QUIET, loghealth.NO_LINE_OF_COMMAND)] and not log.reader.works

    run(work)


def test_an_error_of_the_file_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logreader, "LOOK_AGAIN_S", 0.001)

    async def work() -> None:
        log = Log(tmp_path)
        log.write("one")
        with reading(log):
            await log.read(1)
            with monkeypatch.context() as broken:
                broken.setattr(os, "pread", _io_error)
                log.write("two")
                await log.until(lambda: log.states)
            await log.read(2)

    run(work)


def _io_error(*_: object) -> bytes:
    raise OSError(5, "Input/output error")


NO_PID = 1 << 22
"""A pid that no process can have."""


def test_the_reader_of_an_adopted_log_knows_which_clients_are_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of this process may have come before; a process that started later needs a line."""
    monkeypatch.setattr(loghealth, "QUIET_AFTER_S", 0.0)

    async def scenario() -> None:
        log = Log(tmp_path, adopted=True)
        try:
            now = asyncio.get_running_loop().time
            log.write("a line")
            await log.until(lambda: log.lines)
            log.reader.listed([], now())
            log.reader.listed([os.getpid()], now())
            log.reader.check(disk_full=False)
            assert log.reader.works
            log.reader.listed([NO_PID], now())
            # A process has its start in steps of a tick.
            await asyncio.sleep(0.02)
            later = await asyncio.create_subprocess_exec("sleep", "60")
            try:
                log.reader.listed([os.getpid(), later.pid], now())
                log.reader.check(disk_full=False)
                assert not log.reader.works
            finally:
                later.kill()
                await later.wait()
        finally:
            log.reader.close()

    asyncio.run(scenario())
