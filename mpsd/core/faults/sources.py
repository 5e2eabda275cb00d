"""Which users can forge each source of a decision, and whether a source may decide about a domain.

A decision takes a domain out of service, moves, names or ends clients. It needs a source that only root or
the user of that domain can write. Any other source only asks: the control daemon for the server's state and
its clients. `mpsd-ctl faults --explain sources` shows this table; mpsd/docs/security.md explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from mpsd.core.faults.records import Source
from mpsd.core.state import Domain, State


class Forger(StrEnum):
    """The users that can make a source say something that did not happen, besides the kernel and the GPU."""

    NONE = "no user"
    ROOT = "root"
    OWNER = "the domain's user"
    CLIENT = "that client"
    EVERYBODY = "every local user"


class Claim(StrEnum):
    """Sources of decisions that are no evidence in a fault record."""

    CLIENT_LIST = "client-list"
    CLIENT_REPORT = "client-report"
    REQUEST = "request"


FORGERS: Mapping[Source | Claim, Forger] = MappingProxyType(
    {
        Source.UVM: Forger.NONE,
        Source.KERNEL_PART: Forger.NONE,
        Source.KERNEL_LOG: Forger.NONE,
        Source.NVML: Forger.NONE,
        Source.PROCESS: Forger.NONE,
        Source.SERVER_STATE: Forger.ROOT,
        # The server of a user's domain runs as that user, and its list is its own.
        Claim.CLIENT_LIST: Forger.OWNER,
        # In a private domain. Every local user can enter the other domains and write to their logs.
        Source.SERVER_LOG: Forger.OWNER,
        Claim.CLIENT_REPORT: Forger.CLIENT,
        Claim.REQUEST: Forger.CLIENT,
    }
)
_MEANING: Mapping[Source | Claim, str] = MappingProxyType(
    {
        Source.UVM: "tracker of a client's own address space: names it",
        Source.KERNEL_PART: "record of the kernel module: names its client",
        Source.KERNEL_LOG: "Xid line of the driver: shows the domain or the GPU, never the client; names a "
        "process outside MPS",
        Source.NVML: "Xid of a GPU: joins a known fault, or reports a lost GPU",
        Source.PROCESS: "pidfds and /proc of clients, servers and control daemons",
        Source.SERVER_STATE: "the control daemon's answer: a server in FAULT takes its domain out of service",
        Claim.CLIENT_LIST: "the control daemon's answer: makes a process a client of that domain",
        Source.SERVER_LOG: "text of a domain's log: decides about a private domain, otherwise only asks",
        Claim.CLIENT_REPORT: "fail-over socket and guard ledger: affect the reporting client alone",
        Claim.REQUEST: "control socket, by the peer's credentials: affects the peer's own clients",
    }
)


def forger(source: Source | Claim, domain: Domain) -> Forger:
    """Return which users can forge this source about this domain."""
    if source is Source.SERVER_LOG and not domain.private:
        return Forger.EVERYBODY
    if source is Claim.CLIENT_LIST and domain.uid is None:
        return Forger.ROOT
    return FORGERS[source]


def may_decide(source: Source | Claim, domain: Domain) -> bool:
    """Return whether a sign of this source may take this domain out of service."""
    return forger(source, domain) in (Forger.NONE, Forger.ROOT, Forger.OWNER)


def log_may_decide(state: State, domain: Domain) -> bool:
    """Return whether the domain's log may decide now.

    Its text may act only on processes of the domain's user, and root can join the domain too.
    """
    clients = all(domain.owns(c.facts) for c in state.clients_of(domain.id) if c.living)
    participants = all(m.uid == domain.uid for m in state.members.values() if m.home == domain.id)
    return may_decide(Source.SERVER_LOG, domain) and clients and participants


def explain() -> str:
    """Return the table as plain text, for `mpsd-ctl faults --explain sources`."""
    shared = f"{Forger.OWNER} if the domain is private, else {Forger.EVERYBODY}"
    names = {source: shared if source is Source.SERVER_LOG else FORGERS[source].value for source in FORGERS}
    lines = ["sources of decisions, what each one does, and which users can forge it"]
    for source in FORGERS:
        lines += [f"  {source.value}: {_MEANING[source]}", f"      forged by: {names[source]}"]
    return "\n".join(lines)
