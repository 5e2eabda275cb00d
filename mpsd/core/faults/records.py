"""Fault records: the fault, its offender, the confidence, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mpsd.base.model import (
    Access,
    AddressKind,
    ClientId,
    Confidence,
    Nearby,
    ProcessFacts,
    UvmEvent,
    ZonePolicy,
    ZoneRole,
)


class Source(StrEnum):
    """Source of an item of evidence, strongest first."""

    UVM = "uvm"
    KERNEL_PART = "kernel-part"
    KERNEL_LOG = "kernel-log"
    SERVER_LOG = "server-log"
    SERVER_STATE = "server-state"
    NVML = "nvml"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sign of a fault. `at`: the daemon's monotonic clock [s] when the sign was read.

    `says`: the driver's own words in `text`. Classes are read from them, never from a name that a process
    gave itself.
    """

    source: Source
    at: float
    text: str
    xid: int | None = None
    says: str = ""


@dataclass(frozen=True, slots=True)
class UnconfirmedFault:
    """A memory fault of a process that only an open log calls a client. `at`: its time [monotonic s].

    Such a process may run outside MPS. The fault is one of the domain once the server lists the process.
    """

    event: UvmEvent
    own_memory: bool
    at: float
    sign: Evidence


@dataclass(frozen=True, slots=True)
class Party:
    """A client as a record keeps it after the client has gone."""

    id: ClientId
    facts: ProcessFacts


@dataclass(frozen=True, slots=True)
class MovedClient:
    """A client that fails over instead of losing its work.

    `pause_ms`: from the first sign of the fault until its calls went on; None while it has not reported that.
    `why`: work in flight that may be missing; empty if none is.
    """

    party: Party
    pause_ms: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A process as the kernel log names it. The pid is not pinned: the process may have exited since."""

    pid: int
    name: str


class HitOutcome(StrEnum):
    """Outcome for a client after a guard zone absorbed its stray access."""

    EVICTING = "being evicted"
    EVICTED = "evicted"
    ABSORBED = "absorbed"
    FROZEN = "frozen"
    WITHHELD = "left alone"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class HitFacts:
    """Facts about a guard hit and the reaction to it.

    `count`: reported accesses, fewer than were made, because only the first access to each block of a zone
    faults. `last`: monotonic seconds of the latest. `told`: the count in the last revision. `why`: why the
    client was left alone. `outcome_s`: time from the hit to the outcome. `alone`: no other client was harmed
    until then; None while that is open. `spaces`: the kernel module's last count for each of the latest
    address spaces.
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

    `domain` is None for a fault of the device itself, or of a process outside MPS. `at`: monotonic seconds;
    the journal adds the calendar time. `source_ns`: the driver's CLOCK_MONOTONIC_RAW stamp, if it gave one.
    `victims`: the clients that lost their GPU work; a client that fails over is in `moved`. `logged`: the
    kernel log's word about a process outside MPS. `due`: signs or moves wait for the next revision.
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
    moved: tuple[MovedClient, ...] = ()
    logged: LoggedProcess | None = None
    address: int | None = None
    access: Access | None = None
    fault_type: str | None = None
    lies_there: AddressKind | None = None
    source_ns: int | None = None
    evidence: tuple[Evidence, ...] = ()
    refused: int = 0
    action: str = ""
    revision: int = 0
    hit: HitFacts | None = None
    due: bool = False

    @property
    def last_sign(self) -> float:
        return max((e.at for e in self.evidence), default=self.at)
