"""Distribution of results: fault records to the journal, events to subscribers, answers to requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from mpsd.api.lastfaults import LastFaults
from mpsd.api.privacy import owners
from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import DeadlineError
from mpsd.core.failover.participants import FailoverRecord
from mpsd.core.faults.records import FaultRecord
from mpsd.records.eventnumbers import EventNumbers
from mpsd.records.journal import Journal
from mpsd.records.recordtext import failover_json, record_json
from mpsd.records.statefile import StateFile
from mpsd.wire.messages import Gap

log = structlog.get_logger("mpsd.bulletin")

EVENTS_KEPT = 1000
# A record is revised for seconds only; far more records than can be open at a time.
RECORDS_TIMED = 1000
PublishEvent = Callable[[Mapping[str, Any], frozenset[int], int], None]


@dataclass(frozen=True, slots=True)
class Moment:
    """The time of a decision, which may be published later.

    `at`: monotonic seconds. `raw_ns`: CLOCK_MONOTONIC_RAW, the only clock that a driver's stamp can be
    compared with.
    """

    at: float
    raw_ns: int

    @classmethod
    def now(cls) -> Moment:
        return cls(time.monotonic(), time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW))

    def since_ms(self, source_ns: int | None) -> float | None:
        return round((self.raw_ns - source_ns) / 1e6, 3) if source_ns else None


class Bulletin:
    """Numbers events, keeps the last of them for late subscribers, and passes them to the listener."""

    def __init__(
        self,
        journal: Journal,
        failovers: Journal | None,
        numbers: EventNumbers,
        slot_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`failovers`: their own journal; None keeps no fail-over records. `slot_of`: a domain's slot."""
        self.journal = journal
        self.last_faults = LastFaults(journal.records())
        self._slot_of = slot_of
        self._numbers = numbers
        self.failovers = failovers
        # Of records of earlier daemons, too.
        earlier = failovers.records()[-RECORDS_TIMED:] if failovers is not None else []
        self._sent_ms: dict[int, float | None] = {row["id"]: row.get("sent_ms") for row in earlier}
        self.wall_at_zero = time.time() - time.monotonic()
        self._publish_event: PublishEvent | None = None
        self._events: deque[tuple[int, frozenset[int], Mapping[str, Any]]] = deque(maxlen=EVENTS_KEPT)
        self._answers: dict[str, asyncio.Future[tuple[bool, Mapping[str, object]]]] = {}
        self._requests = 0
        # Of the first revision of each record: time to its record [ms], slot.
        self._first: dict[int, tuple[float | None, str | None]] = {}

    def connect(self, publish_event: PublishEvent) -> None:
        self._publish_event = publish_event

    def events_since(self, seq: int) -> list[tuple[int, frozenset[int], Mapping[str, Any]]]:
        return [entry for entry in self._events if entry[0] > seq]

    def gap_after(self, seq: int) -> Gap:
        """Return why a reader that knows the events up to this number cannot get all later ones."""
        if seq > self._numbers.last:
            return Gap.NEVER
        if 0 < seq < self._numbers.first:
            return Gap.EARLIER
        oldest = self._events[0][0] if self._events else self._numbers.last + 1
        return Gap.FORGOTTEN if 0 < seq < oldest - 1 else Gap.NONE

    def publish(self, kind: str, owners: frozenset[int], data: Mapping[str, object], moment: Moment) -> None:
        """Publish an event of `moment`. `owners`: its users; root and the group see all events."""
        seq = self._numbers.next()
        event = {"kind": kind, "at": self._wall(moment.at), **data}
        self._events.append((seq, owners, event))
        if self._publish_event is not None:
            self._publish_event(event, owners, seq)

    def publish_condition(self, condition: Condition, owners: frozenset[int], *, begins: bool) -> None:
        """Publish that a condition begins or ends now."""
        change = {"change": "begins" if begins else "ends"}
        self.publish("condition", owners, {**change, **condition.view()}, Moment.now())

    def _wall(self, at: float) -> float:
        return round(self.wall_at_zero + at, 6)

    def record(self, record: FaultRecord, moment: Moment) -> None:
        """Write a revision of a fault record, made at that moment, to the journal and the stream."""
        if record.id not in self._first:
            slot = self._slot_of(record.domain) if record.domain is not None else None
            self._first[record.id] = moment.since_ms(record.source_ns), slot
            while len(self._first) > RECORDS_TIMED:
                del self._first[next(iter(self._first))]
        record_ms, slot = self._first[record.id]
        shown = {**record_json(record, self.wall_at_zero, record_ms), "slot": slot}
        self.journal.append(shown)
        self.last_faults.note(shown)
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
        """Write a revision of a fail-over record. The first one is made right after all clients were told."""
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
        """Return the files of this object, for a retry after a failed write."""
        return [self._numbers.file, *self._journals()]

    def conditions(self) -> list[Condition]:
        """Return a condition for each file that is not complete."""
        states = [(journal.path, journal.problem) for journal in self._journals()]
        states.append((self._numbers.file.path, self._numbers.problem))
        return [Condition(Code.FILE_NOT_KEPT, str(path), problem) for path, problem in states if problem]

    def close(self) -> None:
        for journal in self._journals():
            journal.close()
        self._numbers.close()

    def expect(self) -> tuple[str, asyncio.Future[tuple[bool, Mapping[str, object]]]]:
        """Return a fresh request id and the future of its answer."""
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
