"""Domains that are ended while work of exited clients runs in them.

The leases stay until the server has gone, because a kernel faults if its memory is removed. It faults as well
when its server is killed (seen on an H200, evidence/failover-other.md). The driver reports that as an MMU
fault (Xid 31), and the kernel log names any process with a present or past context there. A participant that
has failed over to another domain is not the offender of such a fault, and its new domain has not faulted.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.faults.recording import join
from mpsd.core.faults.records import Evidence
from mpsd.core.state import Client, ClientState, Domain, DomainState, ServerEnd, State

MMU_FAULT = 31
KEPT = 16
_HAS_SERVER = frozenset({DomainState.FULL, DomainState.POISONED, DomainState.RETIRED, DomainState.HEADLESS})


def clients_with_work(state: State, domain: Domain) -> list[Client]:
    """Return the exited clients with work that may run for as long as the server lives."""
    if domain.server is None or domain.state not in _HAS_SERVER:
        return []
    exited = (ClientState.LINGERING, ClientState.HELD)
    return [c for c in state.clients_of(domain.id) if c.state in exited]


def begin(draft: Draft, domain: Domain) -> None:
    """Note that the server of this domain is about to be ended together with that work."""
    exited = (d.id for d in draft.state.departed if d.id.domain == domain.id and d.member)
    here = (c.id for c in draft.state.clients_of(domain.id) if draft.state.is_member(c))
    pids = {c.process.pid for c in (*exited, *here)}
    pids |= {domain.server.pid} if domain.server is not None else set()
    _put(draft, ServerEnd(domain.id, domain.gpus, frozenset(pids)))


def server_gone(draft: Draft, name: str) -> None:
    """Note that the server has gone. If the work was seen to end before, no report of its end is expected."""
    for ending in draft.state.endings:
        if ending.domain == name and ending.at is None:
            works = any(not c.living for c in draft.state.clients_of(name))
            _put(draft, replace(ending, at=draft.now), keep=works)


def claim(draft: Draft, gpu: str | None, xid: int, sign: Evidence, pid: int | None = None) -> bool:
    """Return whether this sign reports the end of such work. Each source reports it once.

    `pid`: the process that the sign names; NVML names none.
    """
    for ending in reversed(draft.state.endings):
        is_late = ending.at is not None and draft.now - ending.at > draft.state.policy.evidence_window_s
        is_its = gpu in ending.gpus and (pid is None or pid in ending.pids)
        if xid != MMU_FAULT or is_late or not is_its or sign.source.value in ending.told:
            continue
        _put(draft, replace(ending, told=ending.told | {sign.source.value}))
        draft.count("endings_told")
        for record in reversed(draft.state.open_faults):
            if record.domain == ending.domain and record.fault_class == "hang":
                join(draft, record, sign)
                break
        return True
    return False


def _put(draft: Draft, ending: ServerEnd, *, keep: bool = True) -> None:
    others = tuple(e for e in draft.state.endings if e.domain != ending.domain)
    draft.state = replace(draft.state, endings=(*others, *([ending] if keep else []))[-KEPT:])
