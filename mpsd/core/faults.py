"""Handlers for signs of faults: from each sign to one record, and out of service with the domain."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core import domains, endings, failover, fates, strays, taxonomy
from mpsd.core import events as ev
from mpsd.core.clients import endless
from mpsd.core.draft import Draft
from mpsd.core.effects import Inspect
from mpsd.core.lifecycle import DomainTrigger, next_domain_state
from mpsd.core.records import Evidence, FaultRecord, Party, Source
from mpsd.core.state import Domain, DomainState, Stray
from mpsd.core.writing import deviceless, revise, write
from mpsd.model import Access, Confidence, LiesThere, ServerState

_VAGUE = frozenset({"sm-exception", "death-in-flight"})
_IN_SERVICE = (DomainState.ACTIVE, DomainState.WARM, DomainState.POISONED, DomainState.RETIRED)


def on_uvm_fatal(draft: Draft, event: ev.UvmFatal) -> None:
    on_fatal(draft, event, at.uvm_evidence(event.event, draft.now))


def on_fatal(draft: Draft, event: ev.UvmFatal, sign: Evidence) -> None:
    """A fault of the MMU that took the client's domain with it, however it came to be known (`sign`)."""
    client = draft.state.clients.get(event.client)
    domain = draft.state.domains.get(event.client.domain)
    if client is None or domain is None or event.event.access is Access.PREFETCH:
        draft.count("uvm_events_without_client")
        return
    when = draft.now - event.age_s
    told = fates.was_told(draft.state, domain.id, client.id.process, when)
    if told or (event.own_memory and fates.was_told(draft.state, None, client.id.process, when)):
        # Its old context may reach its memory no more; that what still runs there meets this is no fault.
        draft.count("failover_echoes")
        return
    open_records = at.open_for(draft.state, domain.id, draft.now)
    sure = (r for r in open_records if r.confidence is Confidence.CERTAIN and r.offender is not None)
    same = next((r for r in sure if r.offender and r.offender.id == client.id), None)
    if same is not None:
        # A kernel faults on many addresses at once: the first one is kept, the rest are its echo.
        draft.put_fault(at.add_evidence(same, sign))
        return
    vague = next((r for r in open_records if _could_be_uvm(r)), None)
    record = _certain(draft, vague or _new(draft, domain), at.party(client), event)
    # What came before this event was read without knowing it: it is read again.
    record = at.refine(at.add_evidence(record, sign), (*record.evidence, *strays.take(draft, record)))
    if at.elsewhere(draft.state, client):
        # Its trackers see every address space it has: which of its servers the fault takes, that one tells.
        record = draft.put_fault(replace(record, victims=(), revision=record.revision + 1))
        draft.put_domain(replace(draft.state.domains[domain.id], last_fault=record.id))
        write(draft, record)
    else:
        _out_of_service(draft, domain, record)
        failover.named(draft, domain.id, client.id.process)
    if event.event.address >= taxonomy.NULL_PAGE_BYTES:
        draft.emit(Inspect(record.id, client.id.process, event.event.address))


def _could_be_uvm(record: FaultRecord) -> bool:
    numbers = {e.xid for e in record.evidence if e.xid is not None}
    mmu = record.fault_class in taxonomy.MMU_CLASSES or record.fault_class in _VAGUE
    return record.confidence is not Confidence.CERTAIN and mmu and numbers <= {31, 32}


def _certain(draft: Draft, record: FaultRecord, offender: Party, event: ev.UvmFatal) -> FaultRecord:
    assert record.domain is not None
    return replace(
        record,
        fault_class=taxonomy.classify_uvm(event.event),
        offender=offender,
        confidence=Confidence.CERTAIN,
        suspects=(),
        victims=at.victims(draft.state, record.domain, offender.id),
        address=event.event.address,
        access=event.event.access,
        fault_type=at.fault_type_name(event.event),
        lies_there=LiesThere.NULL_PAGE if event.event.address < taxonomy.NULL_PAGE_BYTES else None,
        source_ns=event.event.timestamp_ns,
    )


def _new(draft: Draft, domain: Domain, fault_class: str = "sm-exception") -> FaultRecord:
    """A record that knows the domain only: everybody in it is a suspect."""
    number = draft.state.next_fault
    draft.state = replace(draft.state, next_fault=number + 1)
    draft.count("faults")
    return FaultRecord(
        number,
        draft.now,
        domain.id,
        domain.gpus,
        fault_class,
        suspects=at.suspects(draft.state, domain.id, draft.now),
        victims=at.victims(draft.state, domain.id, None),
    )


def _out_of_service(draft: Draft, domain: Domain, record: FaultRecord) -> None:
    """The order matters: once the record is out, the stable path already leads elsewhere."""
    record = failover.by_turn(draft, replace(record, revision=record.revision + 1))
    draft.put_fault(record)
    current = draft.state.domains[domain.id]
    draft.put_domain(replace(current, last_fault=record.id))
    if current.state in _IN_SERVICE:
        domains.leave(draft, domain.id, DomainTrigger.FAULT)
    write(draft, record)


def on_inspected(draft: Draft, event: ev.Inspected) -> None:
    record = draft.fault(event.fault)
    if record is None:
        return
    fault_class = record.fault_class
    if event.lies_there is LiesThere.FREED and fault_class == "mmu-invalid-address":
        fault_class = "mmu-use-after-unmap"
    revise(draft, record, replace(record, lies_there=event.lies_there, fault_class=fault_class))


def domain_sign(draft: Draft, domain: Domain, sign: Evidence) -> None:
    """A sign that belongs to this domain for sure, but names no client that could be believed."""
    existing = at.open_for(draft.state, domain.id, draft.now)
    if sign.source is Source.SERVER_STATE and domain.server is not None:
        # That of a server which came after the one whose death was recorded.
        existing = [r for r in existing if r.fault_class not in taxonomy.DEATHS]
    if existing:
        old = new = at.likeliest(existing, sign)
        if domain.state in _IN_SERVICE and old.fault_class != "server-death":
            if old.confidence is Confidence.CERTAIN and old.offender is not None:
                new = replace(old, victims=at.victims(draft.state, domain.id, old.offender.id))
            new = failover.by_turn(draft, new)
            domains.leave(draft, domain.id, DomainTrigger.FAULT)
        revise(draft, old, at.refine(new, (*strays.take(draft, old), sign)))
        return
    if domain.state not in (*_IN_SERVICE, DomainState.HEADLESS):
        return
    device = at.device_fault(draft.state, domain, draft.now)
    if device is not None:
        # The device's doing, so nobody's: no record of its own, and no suspects.
        device = draft.put_fault(at.add_evidence(device, sign))
        draft.put_domain(replace(domain, last_fault=device.id))
        if domain.state in _IN_SERVICE:
            domains.leave(draft, domain.id, DomainTrigger.FAULT)
        return
    record = _new(draft, domain)
    record = at.refine(record, (*strays.take(draft, record), sign))
    _out_of_service(draft, domain, _blame(draft, record))


def _blame(draft: Draft, record: FaultRecord) -> FaultRecord:
    assert record.domain is not None
    dead = at.dead_in_flight(draft.state, record.domain, draft.now)
    numbers = {e.xid for e in record.evidence}
    if dead is not None and 31 in numbers and record.fault_class in taxonomy.MMU_CLASSES:
        # Named, but not for certain: an untracked client's own fault would look the same.
        return replace(
            record,
            fault_class="death-in-flight",
            offender=dead,
            confidence=Confidence.LIKELY,
            suspects=(),
            victims=at.victims(draft.state, record.domain, dead.id),
        )
    alone = draft.state.clients.get(record.suspects[0].id) if len(record.suspects) == 1 else None
    if alone is not None and draft.state.is_in_waiting(alone):
        # Nothing of it is to run there: a context in waiting is suspected, never named for being alone.
        return record
    return at.blame_one(record)


def on_kernel_xid(draft: Draft, event: ev.KernelXidSeen) -> None:
    sign = at.kernel_evidence(event.xid, draft.now)
    device = taxonomy.device_class(event.xid.xid)
    if device is not None:
        _device_fault(draft, device, event.gpu, sign)
        return
    if event.xid.xid not in taxonomy.CLIENT_XIDS:
        draft.count("xids_ignored")
        return
    if event.xid.pid is None:
        join_or_stray(draft, event.gpu, event.xid.xid, sign)
        return
    if endings.take(draft, event.gpu, event.xid.xid, sign, event.xid.pid):
        return
    left = fates.left_lately(draft.state, event.xid.pid, draft.now)
    if left is not None:
        _echo(draft, left, sign)
        return
    domain = at.owner_of_pid(draft.state, event.gpu, event.xid.pid, draft.now)
    if domain is not None:
        domain_sign(draft, domain, sign)
        if at.is_reset(draft.state, domain, event.gpu, event.xid, draft.now):
            failover.fence(draft, domain)
    elif _echo_of_gone(draft, event.xid.pid, sign):
        return
    elif event.gpu is not None:
        strays.add(draft, Stray(event.gpu, event.xid.xid, sign, foreign=True))
    else:
        draft.count("xids_of_unknown_gpus")


def _echo_of_gone(draft: Draft, pid: int, sign: Evidence) -> bool:
    """Whether the line is a late sign of a fault whose domain, of which this was a client, has ended."""
    domain = at.former_domain(draft.state, pid, draft.now)
    return domain is not None and _echo(draft, domain, sign)


def _echo(draft: Draft, domain: str, sign: Evidence) -> bool:
    """Add a late sign to the fault of its domain. False where that is not open any more."""
    records = at.open_for(draft.state, domain, draft.now)
    if records:
        record = at.likeliest(records, sign)
        revise(draft, record, at.refine(record, (sign,)))
    return bool(records)


def on_nvml_xid(draft: Draft, event: ev.NvmlXidSeen) -> None:
    sign = Evidence(Source.NVML, draft.now, f"NVML Xid {event.xid.xid}", event.xid.xid)
    device = taxonomy.device_class(event.xid.xid)
    if device is not None:
        _device_fault(draft, device, event.xid.gpu_uuid, sign)
    elif event.xid.xid in taxonomy.CLIENT_XIDS:
        join_or_stray(draft, event.xid.gpu_uuid, event.xid.xid, sign)


def join_or_stray(draft: Draft, gpu: str | None, xid: int, sign: Evidence) -> None:
    """Give the sign to the one open fault of that GPU, or let it wait for one."""
    if gpu is None:
        draft.count("xids_of_unknown_gpus")
        return
    records = at.open_on_gpu(draft.state, gpu, draft.now)
    own = at.kernels_own(records, sign)
    if at.is_strangers(draft.state.strays, own, sign, gpu):
        strays.add(draft, Stray(gpu, xid, sign, foreign=True))
        return
    records = own or records
    if len({r.domain for r in records}) == 1:
        record = at.likeliest(records, sign)
        revise(draft, record, at.refine(record, (sign,)))
    elif records or not endings.take(draft, gpu, xid, sign):
        strays.add(draft, Stray(gpu, xid, sign))


def _device_fault(draft: Draft, fault_class: str, gpu: str | None, sign: Evidence) -> None:
    gpus = (gpu,) if gpu else ()
    if gpu is not None and sign.xid in taxonomy.FATAL_DEVICE_XIDS:
        _blame_device(draft, fault_class, gpu, sign)
    for record in draft.state.open_faults:
        same = record.domain is None and record.gpus == gpus and record.fault_class == fault_class
        if same and at.is_open(draft.state, record, draft.now):
            draft.put_fault(at.add_evidence(record, sign))
            return
    deviceless(draft, fault_class, gpu, (sign,))


def _blame_device(draft: Draft, fault_class: str, gpu: str, sign: Evidence) -> None:
    """A server may have told of its loss first: what its log alone suspected was the device."""
    for record in at.open_on_gpu(draft.state, gpu, draft.now):
        told_by_server = all(e.source in (Source.SERVER_LOG, Source.SERVER_STATE) for e in record.evidence)
        if record.fault_class == "sm-exception" and told_by_server:
            changed = replace(
                record, fault_class=fault_class, offender=None, confidence=Confidence.UNKNOWN, suspects=()
            )
            revise(draft, record, at.add_evidence(changed, sign))


def on_server_fatal(draft: Draft, event: ev.ServerFatalLogged) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is not None:
        domain_sign(draft, domain, Evidence(Source.SERVER_LOG, draft.now, event.text))


def on_server_at_fault(draft: Draft, event: ev.ServerAtFault) -> None:
    """Not where the exception may be somebody else's: of a stranger, or of a domain that has just faulted."""
    domain = draft.state.domains.get(event.domain)
    if not strays.is_ready_to_go(draft.state, event.domain):
        # Nobody is served by haste there, and it may be a server that is kept by another one's fault.
        return
    here = [s for s in draft.state.strays if s.gpu == event.gpu]
    waits = any(strays.is_exception(s) for s in here) and not any(s.foreign for s in here)
    if domain is None or domain.server != event.server or not waits:
        return
    if domain.state in _IN_SERVICE and not at.open_on_gpu(draft.state, event.gpu, draft.now):
        text = f"server {event.server.pid} has been in the driver since the kernel's log told of an exception"
        domain_sign(draft, domain, Evidence(Source.PROCESS, draft.now, text))


def on_server_state(draft: Draft, event: ev.ServerStateSeen) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is DomainState.STOPPING:
        return
    domain = draft.put_domain(replace(domain, server_state=event.state))
    if event.state is ServerState.FAULT:
        sign = Evidence(Source.SERVER_STATE, draft.now, "the server is in FAULT")
        domain_sign(draft, domain, sign)
    elif event.state is ServerState.ACTIVE and domain.state is DomainState.FAULTED:
        domains.recovered(draft, domain)


def on_control_died(draft: Draft, event: ev.ControlDied) -> None:
    """A control daemon takes its server with it: whichever death is heard of first, it is one fault."""
    if not domains.on_control_died(draft, event):
        return
    text = f"control daemon {event.process} died"
    sign = Evidence(Source.PROCESS, draft.now, text)
    records = at.open_for(draft.state, event.domain, draft.now)
    same = next((r for r in records if r.fault_class == "server-death"), None)
    if same is None:
        _process_record(draft, event.domain, "control-death", text)
    else:
        revise(draft, same, at.add_evidence(replace(same, fault_class="control-death"), sign))


def on_server_died(draft: Draft, event: ev.ServerDied) -> None:
    in_use = any(draft.state.living_of(event.domain))
    if domains.on_server_died(draft, event) and in_use:
        _process_record(draft, event.domain, "server-death", f"server {event.server} died")


def _process_record(draft: Draft, name: str, fault_class: str, text: str) -> None:
    domain = draft.state.domains[name]
    record = replace(_new(draft, domain, fault_class), suspects=(), revision=1)
    draft.put_domain(replace(domain, last_fault=record.id))
    write(draft, at.add_evidence(record, Evidence(Source.PROCESS, draft.now, text)))
    failover.link(draft, name, record.id)


def on_work_runs(draft: Draft, event: ev.WorkRuns) -> None:
    """A dead client's kernel does not end: its domain is poisoned, and the record names it."""
    held = endless(draft, event.clients)
    if not held:
        return
    client, domain = held[0], draft.state.domains[held[0].id.domain]
    if domain.state is DomainState.STOPPING:
        # It is ended with its server.
        return
    limit = draft.state.policy.linger_limit_s
    text = f"work of {client.id.process} has not ended {limit:g} s after its death: {event.left}"
    # Beside another's endless kernel a short one looks the same: it never has its turn.
    others = any(
        c.id.process != client.id.process and not draft.state.is_idle(c)
        for c in draft.state.clients_of(domain.id)
    )
    record = replace(
        _new(draft, domain, "hang"),
        offender=at.party(client),
        confidence=Confidence.LIKELY if others else Confidence.CERTAIN,
        suspects=(),
        victims=(),
        revision=1,
    )
    draft.put_domain(replace(domain, last_fault=record.id))
    record = at.add_evidence(record, Evidence(Source.PROCESS, draft.now, text))
    if next_domain_state(domain.state, DomainTrigger.POISON) is not None:
        # Who can goes on elsewhere: the kernel ends when nobody is left here.
        domains.leave(draft, domain.id, DomainTrigger.POISON, planned=True)
    write(draft, record)
    failover.link(draft, domain.id, record.id)
