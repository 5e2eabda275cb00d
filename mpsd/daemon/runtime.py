"""The loop that joins core and the outside world: event, decision, effects.

All effects are carried out here, as one list. So "die before effect N" is one hook (`effect_of_death`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from mpsd.base import debug
from mpsd.core.effects import Effect
from mpsd.core.engine import decide
from mpsd.core.events import Event
from mpsd.core.state import State

log = structlog.get_logger("mpsd.runtime")

Perform = Callable[[Effect], None]
Changed = Callable[[State, State], None]


def effect_of_death(environ: Mapping[str, str], field: str = debug.DIE_BEFORE_EFFECT) -> int | None:
    """Return the effect before which this field of MPSD_DEBUG ends this process (None: never)."""
    wanted = debug.fields(environ).get(field, "")
    return int(wanted) if wanted.isdigit() else None


class Runtime:
    """Sole owner of the state. Not thread-safe: all events are posted from one event loop."""

    def __init__(self, state: State, perform: Perform, changed: Changed, doom: int | None = None) -> None:
        self.state = state
        self._perform = perform
        self._changed = changed
        self._queue: deque[Event] = deque()
        self._busy = False
        self._doom = doom
        self.performed = 0

    def die_before(self, effect: int) -> None:
        """End this process before this effect, counted from now."""
        self._doom = self.performed + effect

    def post(self, event: Event) -> None:
        """Decide about an event now, or after the event that is being decided."""
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
            # A bug in core must not end the daemon: the old state is intact, so continue with it.
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
            log.warning("mpsd kills itself before an effect", effect=type(effect).__name__)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self._perform(effect)
        except Exception as error:
            # Report an effect that fails, and carry out the effects after it.
            log.error("effect failed", effect=type(effect).__name__, error=repr(error), exc_info=True)
            self.state = self.state.counted("effects_failed")
