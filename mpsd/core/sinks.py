"""Handlers for the records of the kernel part: a fault that it sank is its client's own affair and the
client's end; one that the stock driver answered is a sign like a tracker's, of the same fault.

The offender is certain: the module knows which process made the address space that faulted.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core import events as ev
from mpsd.core import faults, hitrecords, hits, killing, taxonomy
from mpsd.core.draft import Draft
from mpsd.core.effects import Acknowledge
from mpsd.core.records import Evidence, FaultRecord, HitOutcome, Source
from mpsd.core.state import Client
from mpsd.model import KernelAction, KernelFault, ProcessInstance, ZonePolicy, ZoneRole

REASON = "the kernel part absorbed a stray access"
_STEPS = {
    KernelAction.KILL: "nobody put it out in time: the kernel part holds its address space and has killed it",
    KernelAction.STOP: "the kernel part stopped its channels",
    KernelAction.GIVE_UP: "the kernel part absorbs nothing more of it, and let its address space go",
}


# Since the module tells of steps once they are taken; one that came before it tells of them beforehand.
_NOT_TAKEN = "the kernel part found none of its files to hold, and did not act: it ended, or let go of them"
_WORK_LEFT = "its process has ended, its work has not ended: the kernel part holds its address space"
# A death and the step that brought it are heard of in any order.
SAME_END_S = 1.0


def on_kernel_fault(draft: Draft, event: ev.KernelFaultSeen) -> None:
    fault = event.fault
    if fault.action is KernelAction.ORPHAN:
        _orphan(draft, fault)
        return
    client = _client_of(draft, fault.process)
    if client is None:
        draft.count("kernel_records_of_others")
    elif fault.action is KernelAction.SUNK:
        _sunk(draft, client, event)
    elif fault.action in (KernelAction.REPORTED, KernelAction.REFUSED):
        fatal = ev.UvmFatal(client.id, fault.event, event.own_memory, event.age_s)
        faults.on_fatal(draft, fatal, _evidence(draft, fault))
    elif fault.action in _STEPS:
        _step(draft, client, fault)
    else:
        draft.count("kernel_records_unknown")


def _client_of(draft: Draft, process: ProcessInstance | None) -> Client | None:
    """Of a process in several domains the client where its work runs."""
    if process is None:
        return None
    return max(draft.state.spaces_of(process), key=lambda c: (c.living, draft.state.at_home(c)), default=None)


def _evidence(draft: Draft, fault: KernelFault) -> Evidence:
    seen = fault.event
    answer = (
        f"absorbed, {fault.sink_bytes >> 10} KiB" if fault.action is KernelAction.SUNK else "stock answer"
    )
    why = f" ({fault.why})" if fault.why else ""
    text = (
        f"{seen.access.value} at {seen.address:#x}, {at.fault_type_name(seen)}, engine {fault.engine}: "
        f"{answer}{why}"
    )
    return Evidence(Source.KERNEL_PART, draft.now, text)


def _sunk(draft: Draft, client: Client, event: ev.KernelFaultSeen) -> None:
    fault, known = event.fault, hits.record_of(draft, client, ZoneRole.SINK)
    before = dict(known.hit.spaces).get(fault.space, 0) if known is not None and known.hit is not None else 0
    # What is told once more counts once.
    count, space = max(0, fault.faults - before), (fault.space, max(fault.faults, before))
    draft.count("faults_isolated", count)
    hit = ev.GuardHit(client.id, fault.event, ZoneRole.SINK, count, event.liveness, event.idle)
    sign = _evidence(draft, fault)
    fault_class = "pbdma-fault" if fault.engine == "host" else taxonomy.classify_uvm(fault.event)
    # Whatever a program's policy is: it sees no error, and computes with wrong values from here on.
    stray = hits.Stray(hit, ZonePolicy.EVICT, fault_class, sign, REASON, space)
    outcome = hits.absorbed(draft, client, stray)
    if outcome is HitOutcome.EVICTING and not fault.acknowledged:
        draft.emit(Acknowledge(fault.space))


def on_kill_refused(draft: Draft, event: ev.KillRefused) -> None:
    """The module's deadline is what is left; the record does not say for ever that somebody puts it out."""
    killing.on_kill_refused(draft, event)
    for client in tuple(draft.state.spaces_of(event.process))[:1]:
        record = _record_of(draft, client)
        if record is not None and record.hit is not None and record.hit.outcome is HitOutcome.EVICTING:
            facts = replace(record.hit, outcome=HitOutcome.WITHHELD, why=event.reason)
            hitrecords.write(draft, replace(record, hit=facts))


def _step(draft: Draft, client: Client, fault: KernelFault) -> None:
    record = _record_of(draft, client)
    if record is None:
        draft.count("kernel_steps_without_record")
        return
    late = fault.action is KernelAction.KILL and _had_gone(draft, record)
    text = _NOT_TAKEN if fault.why else _WORK_LEFT if late else _STEPS[fault.action]
    sign = Evidence(Source.KERNEL_PART, draft.now, text)
    hitrecords.write(draft, at.add_evidence(record, sign))


def _record_of(draft: Draft, client: Client) -> FaultRecord | None:
    own = (r for r in reversed(draft.state.hits) if r.offender and r.offender.id.process == client.id.process)
    return next((r for r in own if r.hit is not None and r.hit.role is ZoneRole.SINK), None)


def _had_gone(draft: Draft, record: FaultRecord) -> bool:
    """Whether it was not this step that ended it: they come while a lease keeps the address space."""
    facts = record.hit
    if facts is None or facts.outcome is not HitOutcome.ENDED:
        return facts is not None and facts.outcome is HitOutcome.EVICTED
    return draft.now - record.at - (facts.outcome_s or 0.0) > SAME_END_S


def _orphan(draft: Draft, fault: KernelFault) -> None:
    """Work whose address space is gone: the channel group dies now, and no process is known."""
    draft.count("orphan_faults")
    text = f"{_evidence(draft, fault).text}: work whose address space is gone"
    gpu = fault.gpu_uuid or None
    draft.publish("orphan-fault", None, gpu=gpu, address=f"{fault.event.address:#x}")
    faults.join_or_stray(draft, gpu, 31, Evidence(Source.KERNEL_PART, draft.now, text))
