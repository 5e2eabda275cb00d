"""The log of one domain on the event loop: read in small slices, within a budget, line by line.

A user's server can write any text as fast as it likes. Each iteration of the loop reads a few lines of each
log, so a long log delays neither the loop nor the logs of other domains. Beyond the budget the lines wait in
the file. A file that grows faster is skipped up to its last part, and then the log is incomplete.

An exception costs the line that caused it, and no other line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.core.state import LogState
from mpsd.mps.log import LogLine, LogParser
from mpsd.mps.logfollow import LogFollower
from mpsd.mps.loghealth import LogHealth
from mpsd.os import procfs

log = structlog.get_logger("mpsd.logs")

LINE_LIMIT = 1024
"""Longest line [bytes]. The longest line of the stock binaries has 200."""
SLICE_BYTES = 8 << 10
SLICE_LINES = 32
SLICE_S = 0.002
BACKLOG_LIMIT = 1 << 20
BEHIND_BYTES = 64 << 10
"""Backlog [bytes] that may hide a client. A start of 60 clients writes less."""
KEPT_BYTES = 64 << 10
LOOK_AGAIN_S = 0.25
LINES_PER_S = 2000.0
"""A start of 60 clients writes some hundred lines, a fault with 60 clients as many."""
BURST_LINES = 4000.0
BYTES_PER_LINE = 256
"""A longer line counts as several. The stock binaries write 60 to 130 bytes a line."""

LOOP_SHARE = 0.2
"""Share of the loop's time for one log. A usual line takes some 20 us, one that leads to a decision 1 ms."""


@dataclass(slots=True)
class LineBudget:
    """Lines that may be read now: at most `burst`, and `rate` more each second. It may be overdrawn."""

    now: float
    rate: float = LINES_PER_S
    burst: float = BURST_LINES
    left: float = BURST_LINES

    def _advance(self, now: float) -> None:
        self.left = min(self.burst, self.left + max(0.0, now - self.now) * self.rate)
        self.now = max(self.now, now)

    def take(self, lines: int, size: int, now: float) -> None:
        """Account for these lines of `size` bytes, which were read."""
        self._advance(now)
        self.left -= max(lines, size / BYTES_PER_LINE)

    def spend(self, seconds: float, now: float) -> None:
        """Account for the time that handling lines took, beyond what they have paid for."""
        self._advance(now)
        self.left -= seconds * self.rate / LOOP_SHARE

    def wait_s(self, now: float) -> float:
        """Return the time until the next line may be read; 0 if that is now."""
        self._advance(now)
        # The sum of small times may fall a little short of a line.
        return 0.0 if self.left > 1 - 1e-6 else (1 - self.left) / self.rate


class LogReader:
    """A Source of one domain's log lines. Closing it leaves the log as it is.

    `handle` gets each line. `changed` gets each change of the log's state, with the reason if it is quiet.
    """

    def __init__(
        self,
        domain: str,
        path: str,
        writer: Callable[[], str | None],
        handle: Callable[[LogLine], None],
        changed: Callable[[LogState, str], None],
        *,
        adopted: bool,
    ) -> None:
        self.domain = domain
        self.bytes_skipped = 0
        self.lines_failed = 0
        self._state = LogState.WORKS
        self._reason = ""
        self._flooded = False
        self._handle, self._changed = handle, changed
        self._parser = LogParser()
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.time()
        self._budget = LineBudget(self._opened)
        self._health = LogHealth(adopted)
        self._waiting: deque[str] = deque()
        self._next: asyncio.Handle | None = None
        self._follower = LogFollower(path, from_start=False, line_limit=LINE_LIMIT, writer=writer)
        self._loop.add_reader(self._follower.fileno(), self._readable)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._loop.remove_reader(self._follower.fileno())
        self._follower.close()

    # -- reading ----------------------------------------------------------------------------------------

    def _readable(self) -> None:
        # No events until all is read: the next slices are scheduled, fairly, by the loop.
        self._loop.remove_reader(self._follower.fileno())
        self._slice()

    def _slice(self) -> None:
        """Read and handle some lines; schedule the next slice, or wait for new data."""
        self._next = None
        now = self._loop.time()
        wait_s = self._budget.wait_s(now)
        try:
            self._skip_flood(now)
            if wait_s == 0:
                self._fill(now)
                self._some_lines(now)
        except OSError as error:
            log.warning("cannot read a log", domain=self.domain, reason=str(error))
            wait_s = LOOK_AGAIN_S
        if wait_s > 0:
            self._flooded = True
            self._health.fell_behind(now)
            self._next = self._loop.call_later(max(wait_s, LOOK_AGAIN_S), self._slice)
            self._judge(now)
        elif self._waiting or self._follower.waiting:
            self._next = self._loop.call_soon(self._slice)
        else:
            self._health.caught_up(now)
            self._loop.add_reader(self._follower.fileno(), self._readable)

    def _skip_flood(self, now: float) -> None:
        backlog = self._follower.backlog()
        if backlog > BACKLOG_LIMIT:
            self.bytes_skipped += self._follower.skip(KEPT_BYTES)
            self._flooded = True
        if backlog > BEHIND_BYTES:
            self._health.fell_behind(now)
            # At once: a sign of a fault may come before these lines are read.
            self._judge(now)

    def _fill(self, now: float) -> None:
        if self._waiting:
            return
        before = self._follower.bytes_read
        self._waiting.extend(self._follower.drain(SLICE_BYTES))
        self._budget.take(len(self._waiting), self._follower.bytes_read - before, now)

    def _some_lines(self, now: float) -> None:
        began = self._loop.time()
        for _ in range(min(SLICE_LINES, len(self._waiting))):
            if self._loop.time() - began > SLICE_S:
                break
            text = self._waiting.popleft()
            try:
                line = self._parser.feed(text)
                self._health.saw(line.event, now)
                self._handle(line)
            except Exception as error:
                self._failed(text, error)
        self._budget.spend(self._loop.time() - began, now)

    def _failed(self, text: str, error: Exception) -> None:
        self.lines_failed += 1
        # The first, then 10, 100, ...: a server can repeat such a line.
        if str(self.lines_failed).strip("0") == "1":
            log.error(
                "a log line was not handled",
                domain=self.domain,
                line=text[:200],
                failed=self.lines_failed,
                error=repr(error),
                exc_info=True,
            )

    # -- the state of the log ---------------------------------------------------------------------------

    def check(self, *, disk_full: bool) -> None:
        """Look, once a second, for a new file of the writer and for new lines, and judge the log."""
        now = self._loop.time()
        self._health.disk_full(disk_full, now)
        if self._next is None:
            self._readable()
        self._health.unreadable = self._follower.problem
        self._judge(now)

    def answered(self, began: float) -> None:
        """Note that the control daemon answered a command, which it logs."""
        self._health.answered(began)

    def listed(self, pids: Collection[int], began: float) -> None:
        """Note the clients that the server listed when it was asked at `began`."""
        older = [pid for pid in pids if self._is_older(pid)] if self._health.forgives(began) else ()
        self._health.listed(pids, began, older)
        self._judge(self._loop.time())

    def _is_older(self, pid: int) -> bool:
        """Return whether a process started before this reader, which reads later lines only."""
        try:
            age_s = procfs.age_s(procfs.start_ticks(pid))
        except OSError:
            # It has ended.
            return False
        return age_s >= self._loop.time() - self._opened

    def _judge(self, now: float) -> None:
        before = self._state
        self._state, self._reason = self._health.judged(now, all_read=self._next is None)
        if self._state is LogState.WORKS:
            self._flooded = False
        if self._state is not before:
            self._changed(self._state, self._reason)

    @property
    def works(self) -> bool:
        """Return whether the log announces every client."""
        return self._state is LogState.WORKS

    def condition(self) -> Condition | None:
        """Return what is wrong with the log; None if nothing is."""
        if self._state is LogState.QUIET:
            return Condition(Code.LOG_QUIET, self.domain, self._reason)
        if self._flooded:
            return Condition(Code.LOG_FLOODED, self.domain, count=self.bytes_skipped >> 10)
        return None

    def trim(self, limit: int, keep: int) -> None:
        """Bound the log on disk. A full or read-only disk is logged, never fatal."""
        try:
            self._follower.trim(limit, keep)
        except OSError as error:
            log.warning("cannot trim a log", path=self._follower.path, reason=error.strerror)

    def totals(self) -> dict[str, int]:
        return {
            "log_lines_unparsed": self._parser.unparsed,
            "log_lines_cut": self._follower.lines_cut,
            "log_lines_failed": self.lines_failed,
            "log_bytes_skipped": self.bytes_skipped,
        }
