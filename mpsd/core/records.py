"""Fault records: what happened, who did it, how sure we are, and why we think so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mpsd.model import (
    Access,
    ClientId,
    Confidence,
    LiesThere,
    Nearby,
    ProcessFacts,
    ZonePolicy,
    ZoneRole,
)


class Source(StrEnum):
    """Where a piece of evidence came from, most telling first."""

    UVM = "uvm"
    KERNEL_PART = "kernel-part"
    KERNEL_LOG = "kernel-log"
    SERVER_LOG = "server-log"
    SERVER_STATE = "server-state"
    NVML = "nvml"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Evidence:
    """`at` is the daemon's monotonic clock, in seconds, when the sign was read.

    `says` is what the driver itself says in `text`: classes are read from it, never from a name that a
    process gave itself.
    """

    source: Source
    at: float
    text: str
    xid: int | None = None
    says: str = ""


@dataclass(frozen=True, slots=True)
class Party:
    """A client as a record remembers it, long after the client has gone."""

    id: ClientId
    facts: ProcessFacts


class HitOutcome(StrEnum):
    """What became of a client whose stray access a guard zone absorbed."""

    EVICTING = "being evicted"
    EVICTED = "evicted"
    ABSORBED = "absorbed"
    FROZEN = "frozen"
    WITHHELD = "left alone"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class HitFacts:
    """What a guard zone absorbed, and what was done.

    `count`: accesses that were reported, which are fewer than were made: only the first one in each block
    of a zone faults. `last`: monotonic seconds of the latest; `told`: the count in the last revision.
    `why`: why the client was left alone. `outcome_s`: from the hit to the outcome. `alone`: whether no
    other client noticed anything until then; None while that is open. `spaces`: what the kernel part counted
    last, for each of the latest address spaces.
    """

    role: ZoneRole
    policy: ZonePolicy
    last: float
    outcome: HitOutcome
    count: int = 1
    told: int = 0
    telling: bool = False
    nearby: Nearby | None = None
    kernel: str | None = None
    why: str = ""
    outcome_s: float | None = None
    alone: bool | None = None
    spaces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault. Later signs of the same fault give a new revision, never a second record.

    `domain` is None for a fault of the device itself. `at` is monotonic seconds; the journal adds
    the calendar time. `source_ns` is the driver's own CLOCK_MONOTONIC_RAW stamp where it gave one.
    """

    id: int
    at: float
    domain: str | None
    gpus: tuple[str, ...]
    fault_class: str
    offender: Party | None = None
    confidence: Confidence = Confidence.UNKNOWN
    suspects: tuple[Party, ...] = ()
    victims: tuple[Party, ...] = ()
    address: int | None = None
    access: Access | None = None
    fault_type: str | None = None
    lies_there: LiesThere | None = None
    source_ns: int | None = None
    evidence: tuple[Evidence, ...] = ()
    refused: int = 0
    action: str = ""
    revision: int = 0
    hit: HitFacts | None = None

    @property
    def last_sign(self) -> float:
        return max((e.at for e in self.evidence), default=self.at)
