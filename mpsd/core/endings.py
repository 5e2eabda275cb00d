"""Domains that are ended with work in them, of clients that are dead.

Their leases stay until the server has gone: a kernel from under which its memory is taken faults. It does so
all the same when its server is killed (seen on an H200, -moves-programs-left), and the driver tells of that
as of a fault of the MMU, Xid 31, in which the kernel's log names any of those with a context there, or who
had one: who went on in another domain is not to be blamed for it, nor is that domain lost.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core.draft import Draft
from mpsd.core.records import Evidence
from mpsd.core.state import Client, ClientState, Domain, DomainState, Ending, State

MMU_FAULT = 31
KEPT = 16
_HAS_SERVER = frozenset({DomainState.POISONED, DomainState.RETIRED, DomainState.HEADLESS})


def held(state: State, domain: Domain) -> list[Client]:
    """The dead whose work may go on here for as long as the server does."""
    if domain.server is None or domain.state not in _HAS_SERVER:
        return []
    dead = (ClientState.LINGERING, ClientState.HELD)
    return [c for c in state.clients_of(domain.id) if c.state in dead]


def begin(draft: Draft, domain: Domain) -> None:
    """Its server is to be ended, with that work."""
    gone = (d.id for d in draft.state.departed if d.id.domain == domain.id)
    pids = {c.process.pid for c in (*gone, *(c.id for c in draft.state.clients_of(domain.id)))}
    pids |= {domain.server.pid} if domain.server is not None else set()
    _put(draft, Ending(domain.id, domain.gpus, frozenset(pids)))


def over(draft: Draft, name: str) -> None:
    """Its server has gone. Where the work was seen to end before that, nobody will tell of its end."""
    for ending in draft.state.endings:
        if ending.domain == name and ending.at is None:
            works = any(not c.living for c in draft.state.clients_of(name))
            _put(draft, replace(ending, at=draft.now), keep=works)


def take(draft: Draft, gpu: str | None, xid: int, sign: Evidence, pid: int | None = None) -> bool:
    """Whether this is the end of such work, and is told with that. Once each: what comes then is of another.

    `pid`: whom the sign names; NVML names nobody.
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
                draft.put_fault(at.add_evidence(record, sign))
                break
        return True
    return False


def _put(draft: Draft, ending: Ending, *, keep: bool = True) -> None:
    others = tuple(e for e in draft.state.endings if e.domain != ending.domain)
    draft.state = replace(draft.state, endings=(*others, *([ending] if keep else []))[-KEPT:])
