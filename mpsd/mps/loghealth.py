"""Whether the log of a domain still announces every client. Pure: times are arguments, monotonic seconds.

A log goes quiet while its domain works. Where the pipe directory is open, one line of any local user into its
FIFO `log` silences the control daemon's log for good (driver 580). Two signs show it:

- The server lists a client that no line has announced for QUIET_AFTER_S.
- The control daemon answered a command, and no line came for QUIET_AFTER_S, although it logged commands
  before. mpsd sends a command at least every ten seconds.

Neither counts while lines wait to be read. The log works again when it announces a client that the server
lists afterwards.

An earlier mpsd may have read the line of a client of an adopted domain. So the clients of the first list need
no line, nor do those of the next ANNOUNCED_S that started before the adoption.

During a flood the log is only incomplete, until a list of the server that began later. A client of that list
whose line was skipped makes the log quiet. A log in which no line has been seen yet is incomplete, and so is
a log on a full disk.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from mpsd.core.state import LogState
from mpsd.mps.log import AdminCommand, Event, NewClient

QUIET_AFTER_S = 3.0
"""A line follows its event within milliseconds; a loaded machine delays mpsd's reading of both alike."""
ANNOUNCED_KEPT = 4096
ANNOUNCED_S = 30.0
"""Time [s] for which an announcement of a client that the server does not list yet is kept. The client waits
until the server has started."""
NO_LINE_OF_CLIENT = "its server has a client that the log did not announce"
NO_LINE_OF_COMMAND = "its control daemon answered a command and logged nothing"


@dataclass(slots=True)
class LogHealth:
    """The judgement on one log.

    `adopted`: the domain ran before this mpsd, and no list has come yet.
    `unreadable`: why mpsd cannot read the file that the control daemon writes.
    """

    adopted: bool
    unreadable: str = ""
    _announced: dict[int, float] = field(default_factory=dict)
    # Lines of clients without a pid here: each explains one client of the list.
    _nameless: int = 0
    _listed: frozenset[int] = frozenset()
    # The clients without a line, with the time of the first list that named them.
    _missing: dict[int, float] = field(default_factory=dict)
    _last_line: float = -math.inf
    _commands_logged: bool = False
    _unanswered: float | None = None
    _behind: bool = False
    _incomplete: float | None = None
    _disk_full: bool = False
    _adopted_until: float = -math.inf
    # The clients announced since the log was found quiet; None: it was not.
    _since_quiet: set[int] | None = None

    def saw(self, event: Event, now: float) -> None:
        """Note a line of the log."""
        self._last_line = now
        self._unanswered = None
        if isinstance(event, AdminCommand):
            self._commands_logged = True
        elif isinstance(event, NewClient) and event.pid == 0:
            self._nameless = min(self._nameless + 1, ANNOUNCED_KEPT)
        elif isinstance(event, NewClient):
            self._missing.pop(event.pid, None)
            self._announced.pop(event.pid, None)
            self._announced[event.pid] = now
            if self._since_quiet is not None and len(self._since_quiet) < ANNOUNCED_KEPT:
                self._since_quiet.add(event.pid)
            self._bound()

    def _bound(self) -> None:
        """Forget the oldest announcements, but none of a listed client: a server can write any pid."""
        if len(self._announced) > 2 * ANNOUNCED_KEPT:
            newest = set(list(self._announced)[-ANNOUNCED_KEPT:])
            kept = newest | self._listed
            self._announced = {pid: at for pid, at in self._announced.items() if pid in kept}

    def fell_behind(self, now: float) -> None:
        """Note that lines wait beyond the budget, or were skipped."""
        self._behind, self._incomplete = True, now

    def caught_up(self, now: float) -> None:
        """Note that every line has been read."""
        if self._behind:
            self._behind, self._incomplete = False, now

    def disk_full(self, full: bool, now: float) -> None:
        """Note whether lines may not have been written, for lack of space."""
        self._disk_full = full
        if full:
            self._incomplete, self._unanswered = now, None

    def forgives(self, began: float) -> bool:
        """Return whether an older client may lack a line in a list that began then."""
        return self.adopted or began < self._adopted_until

    def listed(self, pids: Collection[int], began: float, older: Collection[int] = ()) -> None:
        """Note an answer of the server, which was asked at `began`.

        `older`: the clients that started before this mpsd read the log.
        """
        present = frozenset(pids) - {0}
        if self.forgives(began):
            self._announced.update(dict.fromkeys(present & frozenset(older), began))
        if self.adopted:
            self._adopted_until = began + ANNOUNCED_S
        announces_again = self._since_quiet is not None and bool(self._since_quiet & present)
        if self.adopted or self._disk_full or announces_again:
            # The lines of these clients are not expected any more.
            self.adopted, self._since_quiet = False, None
            self._announced.update(dict.fromkeys(present, began))
        for pid in self._listed - present:
            # A later process with this pid is another client.
            if self._announced.get(pid, math.inf) < began - ANNOUNCED_S:
                del self._announced[pid]
        self._listed = present
        for pid in sorted(present - self._announced.keys())[: self._nameless]:
            self._nameless -= 1
            self._announced[pid] = began
        unannounced = present - self._announced.keys()
        self._missing = {pid: self._missing.get(pid, began) for pid in unannounced}
        if not self._behind and self._incomplete is not None and began > self._incomplete:
            self._incomplete = None

    def answered(self, began: float) -> None:
        """Note that the control daemon answered a command, sent at `began`."""
        expected = self._commands_logged and not self._disk_full and self._last_line < began
        if expected and self._unanswered is None:
            self._unanswered = began

    def judged(self, now: float, *, all_read: bool) -> tuple[LogState, str]:
        """Return the state of the log, and why it is quiet. `all_read`: no line waits to be read."""
        if self.unreadable:
            return LogState.QUIET, self.unreadable
        if all_read and any(now - since >= QUIET_AFTER_S for since in self._missing.values()):
            self._since_quiet = set() if self._since_quiet is None else self._since_quiet
        if self._since_quiet is not None:
            return LogState.QUIET, NO_LINE_OF_CLIENT
        if all_read and self._unanswered is not None and now - self._unanswered >= QUIET_AFTER_S:
            return LogState.QUIET, NO_LINE_OF_COMMAND
        if self._incomplete is not None or self._last_line == -math.inf:
            return LogState.INCOMPLETE, ""
        return LogState.WORKS, ""
