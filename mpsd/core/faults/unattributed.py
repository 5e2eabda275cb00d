"""Unattributed Xids: signs of a GPU without a domain. They wait for a fault that could own them."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, WatchServers
from mpsd.core.failover.participants import Standing
from mpsd.core.faults import attribution as at
from mpsd.core.faults.records import Evidence, FaultRecord, Source
from mpsd.core.state import State, UnattributedXid

UNATTRIBUTED_RETAINED = 64


def take(draft: Draft, record: FaultRecord) -> tuple[Evidence, ...]:
    """Claim the unattributed Xids of the record's GPUs, unless another domain's open fault could own them."""
    rivals = [
        r
        for gpu in record.gpus
        for r in at.open_on_gpu(draft.state, gpu, draft.now)
        if r.domain != record.domain
    ]
    if rivals:
        return ()
    taken = at.matching_unattributed(draft.state, record.gpus, draft.now)
    kept = tuple(s for s in draft.state.strays if s not in taken)
    draft.state = replace(draft.state, strays=kept)
    return tuple(s.evidence for s in taken)


def is_exception(unattributed: UnattributedXid) -> bool:
    """Return whether the kernel log reports an SM exception without naming a process."""
    return (
        unattributed.xid == at.SM_EXCEPTION_XID
        and unattributed.evidence.source is Source.KERNEL_LOG
        and not unattributed.foreign
    )


def has_ready_participant(state: State, domain: str) -> bool:
    """Return whether a participant with its home in this domain could fail over at once."""
    return any(m.home == domain and m.standing is Standing.READY for m in state.members.values())


def _watch(draft: Draft, unattributed: UnattributedXid) -> None:
    """Watch the servers for a fault that they report late, while programs pause.

    Without a participant that could fail over at once there is no hurry, and no watch.
    """
    if not is_exception(unattributed) or any(
        s.gpu == unattributed.gpu and is_exception(s) for s in draft.state.strays
    ):
        return
    here = [d for d in draft.state.domains.values() if unattributed.gpu in d.gpus and not d.is_dead]
    servers = {d.id: d.server for d in here if d.server is not None}
    if any(has_ready_participant(draft.state, name) for name in servers):
        draft.emit(WatchServers(unattributed.gpu, servers))


def add(draft: Draft, unattributed: UnattributedXid) -> None:
    """Keep an unattributed Xid until its domain reports a fault or the evidence window ends."""
    _watch(draft, unattributed)
    # Only the first arms the timer: a process that faults continuously must not delay it forever.
    if not any(s.gpu == unattributed.gpu for s in draft.state.strays):
        draft.emit(ArmTimer("strays", unattributed.gpu, at.join_window_s(draft.state)))
    draft.count("strays_dropped", max(0, len(draft.state.strays) + 1 - UNATTRIBUTED_RETAINED))
    draft.state = replace(draft.state, strays=(*draft.state.strays, unattributed)[-UNATTRIBUTED_RETAINED:])
