"""Signs that belong to a GPU and, as yet, to no domain: they wait for a fault that could own them."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, WatchServers
from mpsd.core.records import Evidence, FaultRecord, Source
from mpsd.core.standby import Standing
from mpsd.core.state import State, Stray
from mpsd.core.writing import deviceless

STRAYS_KEPT = 64
SM_EXCEPTION = 13


def take(draft: Draft, record: FaultRecord) -> tuple[Evidence, ...]:
    """Claim the strays of this GPU, unless another domain's open fault could own them as well."""
    rivals = [
        r
        for gpu in record.gpus
        for r in at.open_on_gpu(draft.state, gpu, draft.now)
        if r.domain != record.domain
    ]
    if rivals:
        return ()
    taken = at.matching_strays(draft.state, record.gpus, draft.now)
    kept = tuple(s for s in draft.state.strays if s not in taken)
    draft.state = replace(draft.state, strays=kept)
    return tuple(s.evidence for s in taken)


def is_exception(stray: Stray) -> bool:
    """Whether the kernel's log tells of an exception of the SMs, and of nobody with it."""
    return stray.xid == SM_EXCEPTION and stray.evidence.source is Source.KERNEL_LOG and not stray.foreign


def is_ready_to_go(state: State, domain: str) -> bool:
    """Whether a program that works there could go on elsewhere at once."""
    return any(m.home == domain and m.standing is Standing.READY for m in state.members.values())


def _watch(draft: Draft, stray: Stray) -> None:
    """Its domain's server may say late that it was one of its clients; programs stand still until then.

    Where none of them could go on elsewhere there is no hurry.
    """
    if not is_exception(stray) or any(s.gpu == stray.gpu and is_exception(s) for s in draft.state.strays):
        return
    here = [d for d in draft.state.domains.values() if stray.gpu in d.gpus and not d.is_dead]
    servers = {d.id: d.server for d in here if d.server is not None}
    if any(is_ready_to_go(draft.state, name) for name in servers):
        draft.emit(WatchServers(stray.gpu, servers))


def add(draft: Draft, stray: Stray) -> None:
    _watch(draft, stray)
    # Only the first arms the timer: one process that faults all the time must not put it off for ever.
    if not any(s.gpu == stray.gpu for s in draft.state.strays):
        draft.emit(ArmTimer("strays", stray.gpu, draft.state.policy.evidence_window_s))
    draft.count("strays_dropped", max(0, len(draft.state.strays) + 1 - STRAYS_KEPT))
    draft.state = replace(draft.state, strays=(*draft.state.strays, stray)[-STRAYS_KEPT:])


def on_strays(draft: Draft, gpu: str) -> None:
    """No domain claimed these signs: one record says so, and moves nobody."""
    window = draft.state.policy.evidence_window_s
    here = [s for s in draft.state.strays if s.gpu == gpu]
    old = [s for s in here if draft.now - s.evidence.at >= window * 0.99]
    kept = tuple(s for s in draft.state.strays if s not in old)
    draft.state = replace(draft.state, strays=kept)
    # The same from two sources, of which one came later: it waited for its own domain in vain, too.
    late = [s.evidence for s in old if not _join_unattributed(draft, gpu, s.evidence)]
    if late:
        deviceless(draft, "unattributed-xid", gpu, tuple(late))
    if len(here) > len(old):
        oldest = min(s.evidence.at for s in here if s not in old)
        draft.emit(ArmTimer("strays", gpu, max(0.0, oldest + window - draft.now)))


def _join_unattributed(draft: Draft, gpu: str, sign: Evidence) -> bool:
    """Whether a record without a domain tells of this very Xid by another source."""
    window = draft.state.policy.evidence_window_s
    for record in draft.state.open_faults:
        told = (record.domain, record.gpus, record.fault_class) == (None, (gpu,), "unattributed-xid")
        same = [e for e in record.evidence if e.xid == sign.xid]
        near = any(abs(e.at - sign.at) <= window for e in same)
        if told and near and all(e.source is not sign.source for e in same):
            draft.put_fault(at.add_evidence(record, sign))
            return True
    return False
