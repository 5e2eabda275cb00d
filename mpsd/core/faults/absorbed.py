"""Handlers for the records of the kernel module.

An absorbed fault harms no other client: mpsd evicts its client. A fault that the stock driver answered is a
sign of the same fault as a tracker's event. The offender is certain, because the module knows which process
owns the address space that faulted.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import KernelAction, KernelFault, ProcessInstance, ZonePolicy, ZoneRole
from mpsd.core import events as ev
from mpsd.core import killing
from mpsd.core.draft import Draft
from mpsd.core.effects import Acknowledge
from mpsd.core.faults import attribution as at
from mpsd.core.faults import hitrecords, hits, signs, taxonomy
from mpsd.core.faults.records import Evidence, FaultRecord, HitOutcome, Source
from mpsd.core.state import Client

REASON = "the kernel module absorbed a stray access"
_STEPS = {
    KernelAction.KILL: (
        "the kernel module killed the client, which mpsd had not evicted in time, and holds its address space"
    ),
    KernelAction.STOP: "the kernel module stopped the client's channels",
    KernelAction.GIVE_UP: "the kernel module released the client's address space and absorbs no more of it",
}


# Newer modules report a step after it was taken; older ones report it before, without a reason.
_NOT_TAKEN = "the kernel module did not act: the client has ended or closed its UVM files"
_WORK_LEFT = "the client has ended, its work has not ended: the kernel module holds its address space"
# A death and the step that caused it arrive in any order.
SAME_END_S = 1.0


def on_kernel_fault(draft: Draft, event: ev.KernelFaultSeen) -> None:
    """Handle one record of the kernel module, by its action."""
    fault = event.fault
    if fault.action is KernelAction.ORPHAN:
        _orphan(draft, fault)
        return
    client = _client_of(draft, fault.process)
    if client is None:
        draft.count("kernel_records_of_others")
    elif fault.action is KernelAction.SUNK:
        _absorbed(draft, client, event)
    elif fault.action in (KernelAction.REPORTED, KernelAction.REFUSED):
        fatal = ev.UvmFatal(client.id, fault.event, event.own_memory, event.age_s)
        signs.on_fatal(draft, fatal, _evidence(draft, fault))
    elif fault.action in _STEPS:
        _step(draft, client, fault)
    else:
        draft.count("kernel_records_unknown")


def _client_of(draft: Draft, process: ProcessInstance | None) -> Client | None:
    """Return the process's client; for a process in several domains, the one in its home domain."""
    if process is None:
        return None
    state = draft.state
    spaces = state.spaces_of(process)
    return max(spaces, key=lambda c: (c.living, state.is_member(c), state.at_home(c)), default=None)


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


def _absorbed(draft: Draft, client: Client, event: ev.KernelFaultSeen) -> None:
    """Record an absorbed fault and evict its client."""
    fault, known = event.fault, hits.record_of(draft, client, ZoneRole.SINK)
    before = dict(known.hit.spaces).get(fault.space, 0) if known is not None and known.hit is not None else 0
    # A repeated report counts once.
    count, space = max(0, fault.faults - before), (fault.space, max(fault.faults, before))
    draft.count("faults_isolated", count)
    hit = ev.GuardHit(client.id, fault.event, ZoneRole.SINK, count, event.liveness, event.idle)
    sign = _evidence(draft, fault)
    fault_class = "pbdma-fault" if fault.engine == "host" else taxonomy.classify_uvm(fault.event)
    # EVICT whatever the policy: the program sees no error and computes with wrong values from here on.
    access = hits.AbsorbedAccess(hit, ZonePolicy.EVICT, fault_class, sign, REASON, space)
    outcome = hits.absorbed(draft, client, access)
    if outcome is HitOutcome.EVICTING and not fault.acknowledged:
        draft.emit(Acknowledge(fault.space))


def on_kill_refused(draft: Draft, event: ev.KillRefused) -> None:
    """Correct the record of a client that mpsd did not kill: only the module's deadline remains."""
    killing.on_kill_refused(draft, event)
    for client in tuple(draft.state.spaces_of(event.process))[:1]:
        record = _record_of(draft, client)
        if record is not None and record.hit is not None and record.hit.outcome is HitOutcome.EVICTING:
            facts = replace(record.hit, outcome=HitOutcome.WITHHELD, why=event.reason)
            hitrecords.write(draft, replace(record, hit=facts))


def _step(draft: Draft, client: Client, fault: KernelFault) -> None:
    """Add a step of the kernel module to the client's record."""
    record = _record_of(draft, client)
    if record is None:
        draft.count("kernel_steps_without_record")
        return
    late = fault.action is KernelAction.KILL and _process_exited(draft, record)
    text = _NOT_TAKEN if fault.why else _WORK_LEFT if late else _STEPS[fault.action]
    sign = Evidence(Source.KERNEL_PART, draft.now, text)
    hitrecords.write(draft, at.add_evidence(record, sign))


def _record_of(draft: Draft, client: Client) -> FaultRecord | None:
    own = (r for r in reversed(draft.state.hits) if r.offender and r.offender.id.process == client.id.process)
    return next((r for r in own if r.hit is not None and r.hit.role is ZoneRole.SINK), None)


def _process_exited(draft: Draft, record: FaultRecord) -> bool:
    """Return whether the client ended before this step.

    Steps continue after that while a lease keeps the address space.
    """
    facts = record.hit
    if facts is None or facts.outcome is not HitOutcome.ENDED:
        return facts is not None and facts.outcome is HitOutcome.EVICTED
    return draft.now - record.at - (facts.outcome_s or 0.0) > SAME_END_S


def _orphan(draft: Draft, fault: KernelFault) -> None:
    """Record a fault of work with no address space any more: the driver ends its channel group.

    Its process is unknown.
    """
    draft.count("orphan_faults")
    text = f"{_evidence(draft, fault).text}: work whose address space is gone"
    gpu = fault.gpu_uuid or None
    draft.publish("orphan-fault", None, gpu=gpu, address=f"{fault.event.address:#x}")
    signs.join_or_add_unattributed(draft, gpu, 31, Evidence(Source.KERNEL_PART, draft.now, text))
