"""Signs that belong to a GPU and, as yet, to no domain: they wait for a fault that could own them.

A kernel's exception is told of so by the kernel log and NVML. The server whose it is logs it as a rule in the
same milliseconds, and sometimes hundreds later: meanwhile the servers of that GPU are asked how they stand.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer
from mpsd.core.records import Evidence, FaultRecord
from mpsd.core.state import SERVING, Stray
from mpsd.core.writing import deviceless

STRAYS_KEPT = 64
ASK_S, ASKED_S = 0.004, 0.5
"""When the servers are asked again at first, and after what time no more."""


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


def add(draft: Draft, stray: Stray) -> None:
    # Only the first arms the timer: one process that faults all the time must not put it off for ever.
    if not any(s.gpu == stray.gpu for s in draft.state.strays):
        draft.emit(ArmTimer("strays", stray.gpu, draft.state.policy.evidence_window_s))
    asks = not stray.foreign and not _own(draft, stray.gpu)
    draft.count("strays_dropped", max(0, len(draft.state.strays) + 1 - STRAYS_KEPT))
    draft.state = replace(draft.state, strays=(*draft.state.strays, stray)[-STRAYS_KEPT:])
    if asks:
        on_ask(draft, stray.gpu)


def _own(draft: Draft, gpu: str) -> list[Stray]:
    """Those that may be a domain's."""
    return [s for s in draft.state.strays if s.gpu == gpu and not s.foreign]


def on_ask(draft: Draft, gpu: str) -> None:
    """Nobody has claimed these signs yet: whose server is no more ACTIVE?"""
    age = max((draft.now - s.evidence.at for s in _own(draft, gpu)), default=ASKED_S)
    if age >= ASKED_S:
        return
    asked = [d for d in draft.state.domains_on(gpu) if d.state in SERVING and d.server is not None]
    draft.emit(*(AskServer(domain.id) for domain in asked), ArmTimer("strays-ask", gpu, max(ASK_S, age)))


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
