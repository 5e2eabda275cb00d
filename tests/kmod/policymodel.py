"""The decisions of the module's policy, written a second time, from the case table and not from the C.

Times in ns, addresses and lengths in bytes. A `sink` is the sparse mapping that absorbs a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from mpsd.base.model import UvmFaultType, UvmReason
from mpsd.gpu.nvidia.kernel_abi import Action, ClientType, Engine, Mode, Why

PAGE = 4 << 10
BIG_PAGE = 64 << 10
WIDEST = 2 << 20
MS = 1_000_000
LATER_BATCHES = 3
PATIENCE = 10
ORPHAN_INTERVAL = 100 * MS
SINKS_LIMIT = 65536
READ, WRITE, ATOMIC, PREFETCH = 1, 2, 3, 4


class Range(IntEnum):
    """The kind of range at an address (enum mpsd_range)."""

    UNKNOWN = 0
    FREE = 1
    HOLE = 2
    MAPPED = 3
    MANAGED = 4
    PROTECTED = 5


class Answer(IntEnum):
    """The answer to a request (enum mpsd_answer)."""

    OK = 0
    INNOCENT = 1
    ALREADY = 2


@dataclass(frozen=True)
class Params:
    mode: int = Mode.ISOLATE
    deadline_ms: int = 2000
    max_sinks: int = 1024
    nonreplayable: bool = True
    stop_channels: bool = False

    @property
    def deadline(self) -> int:
        return min(max(self.deadline_ms, 10), 60_000) * MS


@dataclass(frozen=True)
class Fault:
    address: int
    batch: int = 1
    fault_type: int = UvmFaultType.INVALID_PTE
    access: int = WRITE
    reason: int = UvmReason.INVALID_ADDRESS
    engine: int = Engine.GRAPHICS
    client_type: int = ClientType.GPC
    fatal: bool = True
    replayable: bool = True

    @property
    def page(self) -> int:
        return self.address // PAGE * PAGE


# A store of an SM, a copy, a semaphore, all at an unmapped address.
ADDRESS = 0x7F12_3456_7000
WILD = Fault(ADDRESS)
COPY = replace(WILD, engine=Engine.CE, client_type=ClientType.HUB, replayable=False)
SEMAPHORE = replace(COPY, engine=Engine.HOST)


@dataclass
class Sink:
    base: int
    bytes: int
    batch: int
    hits: int = 0

    def covers(self, address: int) -> bool:
        return self.base <= address < self.base + self.bytes


@dataclass(frozen=True)
class Around:
    """The surroundings of a fault's address.

    `sink`: number of the sparse mapping that covers the address, from 1; 0 if none does. [free_first,
    free_last]: the gap. `beside`: a sparse mapping in the same 2 MiB, where small pages are mapped at the
    address.
    """

    free_first: int = 0
    free_last: int = (1 << 64) - 1
    range: int = Range.FREE
    sink: int = 0
    can_address: bool = True
    hmm: bool = False
    ats: bool = False
    alone: bool = False
    beside: int = 0

    def holds(self, sink: Sink) -> bool:
        """Return whether the gap contains the whole sparse mapping."""
        return self.free_first <= sink.base and sink.base + sink.bytes - 1 <= self.free_last


def lost_table(fault: Fault, around: Around) -> bool:
    """Return whether the page table that the address shares with a sparse mapping is not linked."""
    mapped = around.range == Range.MAPPED and bool(around.beside)
    return mapped and fault.fault_type == UvmFaultType.INVALID_PDE


@dataclass(frozen=True)
class Decision:
    action: int = Action.NONE
    why: int = Why.NONE
    base: int = 0
    bytes: int = 0
    page_bytes: int = 0
    report: bool = False
    renew: bool = False
    relink: bool = False

    @property
    def isolates(self) -> bool:
        return self.action in (Action.SUNK, Action.SUNK_BEFORE)


def is_report(count: int) -> bool:
    """Return whether an event is reported: the 1st, 2nd, 4th, 8th ... of a kind are."""
    return bin(count).count("1") == 1


@dataclass
class Space:
    """One address space and the policy's settings. `plan` is the steps still to come, the first at `due`."""

    params: Params = field(default_factory=Params)
    faults: int = 0
    sinks: list[Sink] = field(default_factory=list)
    condemned_at: int | None = None
    acknowledged: bool = False
    kill_asked: bool = False
    released: bool = False
    ended: bool = False
    plan: list[Action] = field(default_factory=list)
    due: int = 0
    seen: dict[tuple[int, int], int] = field(default_factory=dict)

    # Faults

    def fault(self, fault: Fault, around: Around, now: int, fails: bool = False) -> Decision:
        """Decide about a fault. The mapping, if one is decided, takes effect unless `fails`."""
        mode = self.params.mode
        if not fault.fatal or mode not in (Mode.REPORT, Mode.ISOLATE):
            return Decision()
        self.faults += 1
        why = self.why_not(fault, around)
        if mode == Mode.REPORT:
            return self._stock(Action.REPORTED, why)
        sink = self.concerned(fault, around)
        later = sink is not None and sink.batch != fault.batch
        if sink is not None:
            sink.hits = min(sink.hits + later, LATER_BATCHES + 1)
            sink.batch = fault.batch
        if why is not Why.NONE:
            return self._stock(Action.REFUSED, why)
        if sink is not None:
            whole = around.range is not Range.MAPPED and around.holds(sink)
            return Decision(Action.SUNK_BEFORE, renew=later and whole, relink=later and not whole)
        return self._stock(Action.REFUSED, Why.FAILED) if fails else self._sink(fault, around, now)

    def why_not(self, fault: Fault, around: Around) -> Why:
        """Return the first reason against absorbing the fault, in the policy's order."""
        sink = self.concerned(fault, around)
        later = sink is not None and sink.hits + (sink.batch != fault.batch) > LATER_BATCHES
        in_gap = around.free_first <= fault.page and fault.page + PAGE - 1 <= around.free_last
        full = len(self.sinks) >= min(self.params.max_sinks, SINKS_LIMIT)
        sm = (fault.engine, fault.client_type) == (Engine.GRAPHICS, ClientType.GPC)
        other_engine = fault.engine in (Engine.CE, Engine.HOST)
        place: dict[int, Why] = {
            Range.FREE: Why.NONE,
            Range.HOLE: Why.NONE,
            Range.MAPPED: Why.PERMISSIONS,
            Range.MANAGED: Why.MANAGED,
            Range.PROTECTED: Why.PROTECTED,
        }
        reasons = [
            (fault.fault_type not in (1, 2, 3, 4), Why.FAULT_TYPE),
            (fault.access not in (READ, WRITE, ATOMIC), Why.ACCESS),
            (fault.reason == UvmReason.PERMISSIONS, Why.PERMISSIONS),
            (fault.reason != UvmReason.INVALID_ADDRESS, Why.REASON),
            (fault.replayable and not sm, Why.CLIENT),
            (not fault.replayable and not other_engine, Why.CLIENT),
            (not fault.replayable and not self.params.nonreplayable, Why.NONREPLAYABLE),
            (
                around.range not in (Range.FREE, Range.HOLE) and not lost_table(fault, around),
                place.get(around.range, Why.RANGE),
            ),
            (around.ats, Why.ATS),
            (not around.can_address, Why.UNADDRESSABLE),
            (self.released, Why.RELEASED),
            (later, Why.LOOP),
            (sink is None and not in_gap, Why.NO_GAP),
            (sink is None and full, Why.TOO_MANY),
            (around.alone, Why.ALONE),
        ]
        return next((why for holds, why in reasons if holds), Why.NONE)

    def concerned(self, fault: Fault, around: Around) -> Sink | None:
        """Return the sparse mapping that should have prevented the fault."""
        if lost_table(fault, around):
            return self.sinks[around.beside - 1]
        sink = self.sinks[around.sink - 1] if around.sink else None
        return sink if sink is not None and sink.covers(fault.address) else None

    def _stock(self, action: Action, why: Why) -> Decision:
        count = self.seen[action, why] = self.seen.get((action, why), 0) + 1
        return Decision(action, why, report=is_report(count))

    def _sink(self, fault: Fault, around: Around, now: int) -> Decision:
        base, length = self.window(fault, around)
        self.sinks.append(Sink(base, length, fault.batch))
        if self.condemned_at is None:
            self.condemned_at = now
            if not self.ended:
                self.plan = [Action.KILL, Action.STOP, Action.GIVE_UP]
                self.due = now + self.params.deadline
        page_bytes = PAGE if length == PAGE else BIG_PAGE
        return Decision(Action.SUNK, Why.NONE, base, length, page_bytes, is_report(len(self.sinks)))

    def window(self, fault: Fault, around: Around) -> tuple[int, int]:
        """Return base and length [bytes] of the widest window that may be mapped."""
        widest = PAGE if around.hmm else min(WIDEST, BIG_PAGE * 2 ** len(self.sinks))
        lengths = [length for length in (BIG_PAGE << n for n in range(6)) if length <= widest]
        windows = [(fault.address // length * length, length) for length in lengths]
        fitting = [
            (base, length)
            for base, length in windows
            if around.free_first <= base and base + length - 1 <= around.free_last
        ]
        return fitting[-1] if fitting else (fault.page, PAGE)

    # Steps

    def deadline(self, now: int) -> Action:
        """Take the step that is due."""
        if not self.plan or now < self.due:
            return Action.NONE
        step = self.plan.pop(0)
        if step is Action.KILL and not self.params.stop_channels:
            self.plan.remove(Action.STOP)
        waits = {Action.KILL: 1 if Action.STOP in self.plan else PATIENCE, Action.STOP: PATIENCE - 1}
        self.due = now + self.params.deadline * waits.get(step, 0)
        self.released = self.released or step is Action.GIVE_UP
        return step

    @property
    def next_step(self) -> Action:
        return self.plan[0] if self.plan else Action.NONE

    @property
    def deadline_ns(self) -> int:
        return self.due if self.plan else 0

    def acknowledge(self) -> Answer:
        if self.condemned_at is None:
            return Answer.INNOCENT
        if self.next_step is not Action.KILL or self.kill_asked:
            return Answer.ALREADY
        self.acknowledged = True
        self.due = max(self.due, self.condemned_at + PATIENCE * self.params.deadline)
        return Answer.OK

    def abandoned(self, now: int) -> None:
        if self.acknowledged and self.next_step is Action.KILL:
            self.due = min(self.due, now + self.params.deadline)
        self.acknowledged = False

    def kill(self, now: int) -> Answer:
        if self.condemned_at is None:
            return Answer.INNOCENT
        if self.next_step is not Action.KILL or self.kill_asked:
            return Answer.ALREADY
        self.kill_asked = True
        self.due = min(self.due, now)
        return Answer.OK

    def release(self) -> None:
        self.released = True

    def end(self) -> None:
        self.ended = True
        self.plan = []
