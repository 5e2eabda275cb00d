"""The kernel module of a simulated node: the faults that it absorbs, its records, its deadline.

Behaves like a patched nvidia-uvm, as far as clients and the daemon can tell; not measured on hardware.
Numbers and steps are those of mpsd/docs/kernel-module-internals.md.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpsd.base.model import UvmFaultType, UvmReason
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.memory import Violation
from mpsd.gpu.simulated.machine.parts import Space

if TYPE_CHECKING:
    from mpsd.gpu.simulated.machine.machine import Machine

KEPT = 256
PATIENCE = 10
MODES = ("off", "report", "isolate")
SINK_BYTES = 1 << 16

Record = dict[str, Any]


@dataclass(eq=False, slots=True)
class _SpaceRecord:
    """Records of one address space. `ends`: its faults by result. `waiting`: connections that acknowledged
    and evict it. `released`: the module absorbs no more faults of it."""

    faults: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    released: bool = False
    first: float | None = None
    killed: bool = False
    waiting: set[object] = field(default_factory=set)


class KernelModule:
    """State of the module. Times are those of the machine's timers, in seconds."""

    def __init__(self, machine: Machine, deadline_s: float) -> None:
        self._machine = machine
        self.deadline_s = deadline_s
        self.mode = "report"
        self.written = 0
        self._last = 0.0
        self.records: deque[Record] = deque(maxlen=KEPT)
        self._space_records: dict[Space, _SpaceRecord] = {}

    def absorbs(self, space: Space, hit: Violation, access: str, engine: str) -> bool:
        """Record a fault. Return whether it is absorbed: only its own client is affected and must be
        evicted."""
        if self.mode == "off":
            return False
        space_record = self._space_records.setdefault(space, _SpaceRecord())
        space_record.faults += 1
        why = "permissions" if hit.fault is not UvmFaultType.INVALID_PDE else ""
        if not why and not self._machine.faults.has_company(space):
            # The stock answer is right if no other client shares the domain.
            why = "alone"
        if not why and space_record.released:
            why = "released"
        if why or self.mode != "isolate":
            self._record(space, "refused" if why else "reported", hit, access, engine, why)
            return False
        space.memory.absorb(hit.address)
        self._record(space, "sunk", hit, access, engine, "")
        if space_record.first is None:
            space_record.first = self._machine.timers.now
            self._machine.timers.after(self.deadline_s, lambda: self._due(space))
        return True

    def acknowledge(self, number: int, who: object) -> bool:
        """Note that `who` evicts this space. False if there is nothing to wait for."""
        space, space_record = self._condemned(number)
        if space is None or space_record is None or space_record.killed or space.ended:
            return False
        space_record.waiting.add(who)
        return True

    def kill(self, number: int) -> bool:
        space, space_record = self._condemned(number)
        if space is None or space_record is None or space_record.killed or space.ended:
            return False
        self._kill(space, space_record)
        return True

    def abandon(self, who: object) -> None:
        """Handle the end of a connection that had acknowledged: its spaces are due one deadline from now."""
        for space, space_record in list(self._space_records.items()):
            if who in space_record.waiting:
                space_record.waiting.discard(who)
                self._machine.timers.after(self.deadline_s, lambda space=space: self._due(space))  # type: ignore[misc]

    def forget(self, space: Space) -> None:
        self._space_records.pop(space, None)

    def _condemned(self, number: int) -> tuple[Space | None, _SpaceRecord | None]:
        found = ((s, b) for s, b in self._space_records.items() if s.id == number and b.first is not None)
        return next(found, (None, None))

    def _due(self, space: Space) -> None:
        space_record = self._space_records.get(space)
        if space_record is None or space_record.first is None or space_record.killed or space.ended:
            return
        remaining = space_record.first + PATIENCE * self.deadline_s - self._machine.timers.now
        if space_record.waiting and remaining > 0:
            self._machine.timers.after(remaining, lambda: self._due(space))
            return
        self._kill(space, space_record)

    def _kill(self, space: Space, space_record: _SpaceRecord) -> None:
        space_record.killed = space.held = True
        self._step(space, "kill")
        self._machine.output.kill(space)
        self._machine.timers.after(PATIENCE * self.deadline_s, lambda: self._give_up(space))

    def _give_up(self, space: Space) -> None:
        if space in self._space_records and not space.ended:
            self._step(space, "give up")
            space.held, self._space_records[space].released = False, True
            self._machine.settle(space)

    def _step(self, space: Space, action: str) -> None:
        self._put(space, action, self._space_records[space].faults, (0, "unknown", 0, 0), "unknown", "", 0)

    def _record(self, space: Space, action: str, hit: Violation, access: str, engine: str, why: str) -> None:
        ends = self._space_records[space].ends
        ends[action] += 1
        if ends[action].bit_count() != 1:
            return
        reason = semantics.REASONS.get(hit.fault, UvmReason.UNKNOWN)
        event = (int(hit.fault), access, int(reason), hit.address)
        sink = SINK_BYTES if action == "sunk" else 0
        timers, faults = self._machine.timers, self._space_records[space].faults
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
        space_record = self._space_records.get(space)
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
            "acknowledged": bool(space_record is not None and space_record.waiting),
        }
        self.records.append(record)
        self._machine.output.kernel_record(record)
