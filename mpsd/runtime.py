"""The loop that joins core and world: event, decide, perform. Effects are carried out here and nowhere else.

Because they are a list carried out in one place, "die before effect N" is one hook (`doomed_at`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from mpsd.core.effects import Effect
from mpsd.core.engine import decide
from mpsd.core.events import Event
from mpsd.core.state import State

log = structlog.get_logger("mpsd.runtime")

Perform = Callable[[Effect], None]
Changed = Callable[[State, State], None]


def doomed_at(environ: Mapping[str, str]) -> int | None:
    """The effect before which the fault-injection harness wants this process to die (None: never)."""
    wanted = environ.get("MPSD_DIE_BEFORE_EFFECT", "")
    if environ.get("MPSD_FAULTINJECT") != "1" or not wanted.isdigit():
        return None
    return int(wanted)


class Runtime:
    """Sole owner of the state. Not thread-safe: everything posts from the one event loop."""

    def __init__(self, state: State, perform: Perform, changed: Changed, doom: int | None = None) -> None:
        self.state = state
        self._perform = perform
        self._changed = changed
        self._queue: deque[Event] = deque()
        self._busy = False
        self._doom = doom
        self.performed = 0

    def post(self, event: Event) -> None:
        """Decide about an event now, or after the one being decided."""
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._busy = False

    def _step(self, event: Event) -> None:
        before = self.state
        try:
            decision = decide(before, event, time.monotonic())
        except Exception as error:
            # A bug of ours must not take the daemon down: the old state was left whole, so it goes on.
            log.error("decision refused", event_type=type(event).__name__, error=repr(error))
            self.state = before.counted("internal_errors")
            return
        self.state = decision.state
        self._changed(before, decision.state)
        for effect in decision.effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        self.performed += 1
        if self.performed == self._doom:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self._perform(effect)
        except Exception as error:
            # An effect that fails is reported, and the ones after it still happen.
            log.error("effect failed", effect=type(effect).__name__, error=repr(error), exc_info=True)
            self.state = self.state.counted("effects_failed")
