"""Faults of processes outside MPS: the kernel log names the process, and its channels belong to it alone.

No user can forge that line. Its pid is a claim until the process is pinned: mpsd looks at once whether a
process with this pid and name runs, since before the line, and whether NVML counts it as a client of an MPS
server. A process that has exited by then is named by the kernel log's word, if no domain of the GPU may have
clients that mpsd does not know. No line takes a domain out of service here.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ClientId, Confidence, KernelXid
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Identify
from mpsd.core.faults import attribution as at
from mpsd.core.faults import unattributed
from mpsd.core.faults.recording import deviceless, join, revise
from mpsd.core.faults.records import Evidence, FaultRecord, LoggedProcess, Party, Source
from mpsd.core.state import State, UnattributedXid

MPS_NAME = "nvidia-cuda-mps"
"""Start of the names of MPS processes. The driver names a server for the faults of its clients."""


def on_line(draft: Draft, gpu: str, xid: KernelXid, sign: Evidence) -> None:
    """Handle a line about a process that is no client: it joins its record, or waits for a look."""
    assert xid.pid is not None
    record = _record_of(draft, gpu, xid.pid)
    if record is not None:
        join(draft, record, sign)
        return
    logged = LoggedProcess(xid.pid, xid.name)
    asked = any(s.gpu == gpu and s.logged == logged for s in draft.state.strays)
    unattributed.add(draft, UnattributedXid(gpu, xid.xid, sign, foreign=True, logged=logged))
    if not asked:
        draft.emit(Identify(gpu, logged, draft.now))


def on_identified(draft: Draft, event: ev.ProcessIdentified) -> None:
    """Record the waiting signs of this process."""
    own = [s for s in draft.state.strays if s.gpu == event.gpu and s.logged == event.logged]
    if own:
        _record(draft, event, own)


def on_unattributed(draft: Draft, gpu: str) -> None:
    """Report the unattributed Xids of a GPU after the evidence window. No program fails over for it.

    An Xid that belongs to a recorded fault by GPU and time joins that record.
    """
    window = at.join_window_s(draft.state)
    here = [s for s in draft.state.strays if s.gpu == gpu]
    old = [s for s in here if draft.now - s.evidence.at >= window * 0.99]
    for logged in dict.fromkeys(s.logged for s in old if s.logged is not None):
        _record(draft, ev.ProcessIdentified(gpu, logged, None, None), [s for s in old if s.logged == logged])
    old = [s for s in old if s in draft.state.strays]
    draft.state = replace(draft.state, strays=tuple(s for s in draft.state.strays if s not in old))
    late = [s.evidence for s in old if not _join_recorded(draft, s)]
    if late:
        deviceless(draft, "unattributed-xid", gpu, tuple(late))
    if len(here) > len(old):
        oldest = min((s.evidence.at for s in draft.state.strays if s.gpu == gpu), default=None)
        if oldest is not None:
            draft.emit(ArmTimer("strays", gpu, max(0.0, oldest + window - draft.now)))


def _join_recorded(draft: Draft, sign: UnattributedXid) -> bool:
    """Add the sign to the record nearest in time. Return False if there is none."""
    when = sign.evidence.at
    domains = [] if sign.foreign else at.recorded_near(draft.state, sign.gpu, when)
    others = [r for r in _records_near(draft.state, sign.gpu, when) if _may_take(r, sign.evidence)]
    found = sorted((*domains, *others), key=lambda r: (abs(when - r.at), -r.id))
    if not found:
        return False
    record = found[0]
    # Several domains may own the sign: then it says nothing about the class.
    is_sure = len(found) == 1 and record.domain is not None
    revise(draft, record, (at.refine if is_sure else _refine_nothing)(record, (sign.evidence,)))
    return True


def _refine_nothing(record: FaultRecord, signs: tuple[Evidence, ...]) -> FaultRecord:
    return at.add_evidence(record, *signs)


def _may_take(record: FaultRecord, sign: Evidence) -> bool:
    """Return whether the sign can be of the record's fault: NVML reports each Xid of a fault once."""
    known = any((e.xid, e.source) == (sign.xid, Source.NVML) for e in record.evidence)
    return sign.source is not Source.NVML or not known


def _record(draft: Draft, event: ev.ProcessIdentified, own: list[UnattributedXid]) -> None:
    gpu, logged, facts = event.gpu, event.logged, event.facts
    nvml = [s for s in draft.state.strays if s.foreign and s.gpu == gpu and s.logged is None]
    nvml = [s for s in nvml if s.xid in {o.xid for o in own}]
    taken = (*own, *nvml)
    draft.state = replace(draft.state, strays=tuple(s for s in draft.state.strays if s not in taken))
    signs = tuple(s.evidence for s in taken)
    record = _record_of(draft, gpu, logged.pid)
    if record is not None:
        join(draft, record, *signs)
        return
    named = not event.on_mps and not logged.name.startswith(MPS_NAME)
    # It may have joined a domain since the line.
    named = named and at.owner_of_pid(draft.state, gpu, logged.pid, draft.now) is None
    named = named and at.domain_that_claims(draft.state, gpu, logged.pid) is None
    # An unknown client of a domain may be innocent. NVML lists such a client as one of MPS.
    named = named and (event.on_mps is False or not _may_be_client(draft.state, gpu, draft.now))
    deviceless(
        draft,
        "unattributed-xid",
        gpu,
        signs,
        logged=logged if named else None,
        offender=Party(ClientId("", facts.instance), facts) if named and facts is not None else None,
        confidence=Confidence.LIKELY if named else Confidence.UNKNOWN,
    )


def _may_be_client(state: State, gpu: str, now: float) -> bool:
    """Return whether a process that mpsd does not know may be a client of a domain on this GPU."""
    return state.adopting or any(
        d.may_lack_clients or d.foreign is not None or at.may_have_unlisted(state, d.id, now)
        for d in state.domains_on(gpu)
    )


def _record_of(draft: Draft, gpu: str, pid: int) -> FaultRecord | None:
    """Return the fresh record of a fault of this process."""
    near = reversed(_records_near(draft.state, gpu, draft.now))
    return next((r for r in near if r.logged is not None and r.logged.pid == pid), None)


def _records_near(state: State, gpu: str, when: float) -> list[FaultRecord]:
    """Return the records of this GPU without a domain that a sign of that time may belong to."""
    window = at.join_window_s(state)
    own = (r for r in state.open_faults if r.domain is None and r.fault_class == "unattributed-xid")
    return [r for r in own if r.gpus == (gpu,) and r.at - window <= when <= r.last_sign + window]


def claim(draft: Draft, gpu: str, xid: int, sign: Evidence, own: list[FaultRecord]) -> bool:
    """Return whether NVML's Xid belongs to a log line about a process outside MPS.

    `own`: records of domains with the same Xid from the kernel log.
    """
    recorded = [r for r in _records_near(draft.state, gpu, draft.now) if r.logged is not None]
    waiting = [s.evidence for s in draft.state.strays if s.foreign and s.gpu == gpu]
    lines = [*waiting, *(e for r in recorded for e in r.evidence)]
    if not at.is_of_foreign_process(lines, own, sign):
        return False
    # The driver prints several lines for one fault: NVML repeats its number for each.
    its = at.with_kernel_xid(recorded, sign) or [r for r in recorded if at.has_line_of(r, sign)]
    if its:
        join(draft, its[-1], sign)
    else:
        unattributed.add(draft, UnattributedXid(gpu, xid, sign, foreign=True))
    return True
