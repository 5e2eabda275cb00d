"""The kernel part of a simulated node: which faults it sinks, its records, its deadline.

What a patched nvidia-uvm does, as far as clients and the daemon can tell; nothing of it was measured on
hardware. Numbers and steps are those of kmod_patches/README.md.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpsd.gpu.simulated import semantics
from mpsd.gpu.simulated.memory import Violation
from mpsd.gpu.simulated.parts import Space
from mpsd.model import UvmFaultType, UvmReason

if TYPE_CHECKING:
    from mpsd.gpu.simulated.machine import Machine

KEPT = 256
PATIENCE = 10
MODES = ("off", "report", "isolate")
SINK_BYTES = 1 << 16

Record = dict[str, Any]


@dataclass(eq=False, slots=True)
class _Book:
    """What is held against one address space. `ends`: its faults by what became of them. `waiting`: who has
    said that he puts it out. `released`: nothing of it is sunk any more."""

    faults: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    released: bool = False
    first: float | None = None
    killed: bool = False
    waiting: set[object] = field(default_factory=set)


class KernelPart:
    """Times are those of the machine's timers, in seconds."""

    def __init__(self, machine: Machine, deadline_s: float) -> None:
        self._machine = machine
        self.deadline_s = deadline_s
        self.mode = "report"
        self.written = 0
        self._last = 0.0
        self.records: deque[Record] = deque(maxlen=KEPT)
        self._books: dict[Space, _Book] = {}

    def sinks(self, space: Space, hit: Violation, access: str, engine: str) -> bool:
        """Record this fault. True when it is sunk: nobody notices it, and its client has to go."""
        if self.mode == "off":
            return False
        book = self._books.setdefault(space, _Book())
        book.faults += 1
        why = "permissions" if hit.fault is not UvmFaultType.INVALID_PDE else ""
        if not why and not self._machine.faults.has_company(space):
            # The stock answer is right where it harms nobody else.
            why = "alone"
        if not why and book.released:
            why = "released"
        if why or self.mode != "isolate":
            self._record(space, "refused" if why else "reported", hit, access, engine, why)
            return False
        space.memory.sink(hit.address)
        self._record(space, "sunk", hit, access, engine, "")
        if book.first is None:
            book.first = self._machine.timers.now
            self._machine.timers.after(self.deadline_s, lambda: self._due(space))
        return True

    def acknowledge(self, number: int, who: object) -> bool:
        """`who` puts this one out. False: there is nothing to wait for."""
        space, book = self._condemned(number)
        if space is None or book is None or book.killed or space.ended:
            return False
        book.waiting.add(who)
        return True

    def kill(self, number: int) -> bool:
        space, book = self._condemned(number)
        if space is None or book is None or book.killed or space.ended:
            return False
        self._kill(space, book)
        return True

    def abandon(self, who: object) -> None:
        """Whoever had acknowledged is gone: his are due one deadline from now."""
        for space, book in list(self._books.items()):
            if who in book.waiting:
                book.waiting.discard(who)
                self._machine.timers.after(self.deadline_s, lambda space=space: self._due(space))  # type: ignore[misc]

    def forget(self, space: Space) -> None:
        self._books.pop(space, None)

    def _condemned(self, number: int) -> tuple[Space | None, _Book | None]:
        found = ((s, b) for s, b in self._books.items() if s.id == number and b.first is not None)
        return next(found, (None, None))

    def _due(self, space: Space) -> None:
        book = self._books.get(space)
        if book is None or book.first is None or book.killed or space.ended:
            return
        left = book.first + PATIENCE * self.deadline_s - self._machine.timers.now
        if book.waiting and left > 0:
            self._machine.timers.after(left, lambda: self._due(space))
            return
        self._kill(space, book)

    def _kill(self, space: Space, book: _Book) -> None:
        book.killed = space.held = True
        self._step(space, "kill")
        self._machine.sink.kill(space)
        self._machine.timers.after(PATIENCE * self.deadline_s, lambda: self._give_up(space))

    def _give_up(self, space: Space) -> None:
        if space in self._books and not space.ended:
            self._step(space, "give up")
            space.held, self._books[space].released = False, True
            self._machine.settle(space)

    def _step(self, space: Space, action: str) -> None:
        self._put(space, action, self._books[space].faults, (0, "unknown", 0, 0), "unknown", "", 0)

    def _record(self, space: Space, action: str, hit: Violation, access: str, engine: str, why: str) -> None:
        ends = self._books[space].ends
        ends[action] += 1
        if ends[action].bit_count() != 1:
            return
        reason = semantics.REASONS.get(hit.fault, UvmReason.UNKNOWN)
        event = (int(hit.fault), access, int(reason), hit.address)
        sink = SINK_BYTES if action == "sunk" else 0
        timers, faults = self._machine.timers, self._books[space].faults
        # In the order of the faults, as the module writes them.
        delay = self._machine.random.uniform(*semantics.RECORD_MS) / 1000
        self._last = max(self._last, timers.now + delay)
        timers.at(self._last, lambda: self._put(space, action, faults, event, engine, why, sink))

    def _put(
        self,
        space: Space,
        action: str,
        faults: int,
        event: tuple[int, str, int, int],
        engine: str,
        why: str,
        sink: int,
    ) -> None:
        book = self._books.get(space)
        self.written += 1
        record: Record = {
            "seq": self.written,
            "action": action,
            "space": space.id,
            "pid": space.pid,
            "start_ticks": space.start_ticks,
            "event": event,
            "engine": engine,
            "why": why,
            "faults": faults,
            "gpu": space.unit.gpu.uuid,
            "sink": sink,
            "acknowledged": bool(book is not None and book.waiting),
        }
        self.records.append(record)
        self._machine.sink.kernel_record(record)
