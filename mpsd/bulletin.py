"""What the daemon tells: fault records to the journal, events to subscribers, answers to requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from mpsd.core.records import FaultRecord
from mpsd.core.standby import FailoverRecord
from mpsd.errors import DeadlineError
from mpsd.eventnumbers import EventNumbers
from mpsd.journal import Journal
from mpsd.privacy import owners
from mpsd.recordtext import failover_json, record_json
from mpsd.statefile import StateFile
from mpsd.wire.messages import Gap

log = structlog.get_logger("mpsd.bulletin")

EVENTS_KEPT = 1000
# A record is revised for seconds only; far more records than can be open at a time.
RECORDS_TIMED = 1000
Sink = Callable[[Mapping[str, Any], frozenset[int], int], None]


@dataclass(frozen=True, slots=True)
class Moment:
    """When something was decided, which may be told later: monotonic seconds, and the only clock that a
    driver's stamp can be compared with, CLOCK_MONOTONIC_RAW."""

    at: float
    raw_ns: int

    @classmethod
    def now(cls) -> Moment:
        return cls(time.monotonic(), time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW))

    def since_ms(self, source_ns: int | None) -> float | None:
        return round((self.raw_ns - source_ns) / 1e6, 3) if source_ns else None


class Bulletin:
    """Numbers events, keeps the last of them for late subscribers, and hands them to the listener."""

    def __init__(self, journal: Journal, failovers: Journal | None, numbers: EventNumbers) -> None:
        """`failovers`: a journal of their own; None keeps none of them."""
        self.journal = journal
        self._numbers = numbers
        self.failovers = failovers
        self._sent_ms: dict[int, float | None] = {}
        self.wall_at_zero = time.time() - time.monotonic()
        self._sink: Sink | None = None
        self._events: deque[tuple[int, frozenset[int], Mapping[str, Any]]] = deque(maxlen=EVENTS_KEPT)
        self._answers: dict[str, asyncio.Future[tuple[bool, Mapping[str, object]]]] = {}
        self._requests = 0
        self._record_ms: dict[int, float | None] = {}

    def connect(self, sink: Sink) -> None:
        self._sink = sink

    def events_since(self, seq: int) -> list[tuple[int, frozenset[int], Mapping[str, Any]]]:
        return [entry for entry in self._events if entry[0] > seq]

    def gap_after(self, seq: int) -> Gap:
        """Why a reader who knows the events up to this number cannot be told all that came after it."""
        if seq > self._numbers.last:
            return Gap.NEVER
        if 0 < seq < self._numbers.first:
            return Gap.EARLIER
        oldest = self._events[0][0] if self._events else self._numbers.last + 1
        return Gap.FORGOTTEN if 0 < seq < oldest - 1 else Gap.NONE

    def publish(self, kind: str, owners: frozenset[int], data: Mapping[str, object], moment: Moment) -> None:
        """`owners`: the users whose event this is; root and the group see all. `moment`: of the event."""
        seq = self._numbers.next()
        event = {"kind": kind, "at": self._wall(moment.at), **data}
        self._events.append((seq, owners, event))
        if self._sink is not None:
            self._sink(event, owners, seq)

    def _wall(self, at: float) -> float:
        return round(self.wall_at_zero + at, 6)

    def record(self, record: FaultRecord, moment: Moment) -> None:
        """Write a revision of a fault record, made at that moment, to the journal and the stream."""
        if record.id not in self._record_ms:
            self._record_ms[record.id] = moment.since_ms(record.source_ns)
            while len(self._record_ms) > RECORDS_TIMED:
                del self._record_ms[next(iter(self._record_ms))]
        shown = record_json(record, self.wall_at_zero, self._record_ms[record.id])
        self.journal.append(shown)
        self.publish("fault", owners(shown), shown, moment)
        if record.revision == 1:
            who = shown["offender"]["pid"] if shown["offender"] else None
            log.warning(
                "fault",
                id=record.id,
                fault_class=record.fault_class,
                domain=record.domain,
                offender=who,
                confidence=record.confidence.value,
            )

    def failover(self, record: FailoverRecord, moment: Moment) -> None:
        """As record(), of a fail-over's. The moment of its first revision is right after all were told."""
        if record.id not in self._sent_ms:
            self._sent_ms[record.id] = moment.since_ms(record.source_ns)
            while len(self._sent_ms) > RECORDS_TIMED:
                del self._sent_ms[next(iter(self._sent_ms))]
        shown = failover_json(record, self.wall_at_zero, self._sent_ms[record.id])
        if self.failovers is not None:
            self.failovers.append(shown)
        self.publish("failover", frozenset(f.uid for f in record.fates), shown, moment)

    def _journals(self) -> list[Journal]:
        return [j for j in (self.journal, self.failovers) if j is not None]

    def files(self) -> list[Journal | StateFile]:
        """What is written, to be written again where that failed."""
        return [self._numbers.file, *self._journals()]

    def problems(self) -> list[str]:
        found = [j.problem for j in self._journals() if j.problem]
        return found + ([self._numbers.problem] if self._numbers.problem else [])

    def close(self) -> None:
        for journal in self._journals():
            journal.close()

    def expect(self) -> tuple[str, asyncio.Future[tuple[bool, Mapping[str, object]]]]:
        """A fresh request id and the future that its answer will come by."""
        self._requests += 1
        name = f"r{self._requests}"
        future = asyncio.get_running_loop().create_future()
        self._answers[name] = future
        return name, future

    def answer(self, request: str, ok: bool, data: Mapping[str, object]) -> None:
        future = self._answers.pop(request, None)
        if future is not None and not future.done():
            future.set_result((ok, data))

    async def answered(
        self, request: str, future: asyncio.Future[tuple[bool, Mapping[str, object]]], deadline_s: float
    ) -> tuple[bool, Mapping[str, object]]:
        """Wait for an answer. Raises DeadlineError."""
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise DeadlineError(f"no answer within {deadline_s:g} s", remedy="see mpsd-ctl status") from None
        finally:
            self._answers.pop(request, None)
