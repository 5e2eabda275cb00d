"""Handlers for signs of faults: each sign goes to one record, and the domain goes out of service with it."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from mpsd.base.model import Access, AddressKind, Confidence, ProcessInstance, ServerState
from mpsd.core import domains
from mpsd.core import events as ev
from mpsd.core.clients import mark_endless, on_server_gone
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer, Inspect
from mpsd.core.failover import outcomes, plan, suspects
from mpsd.core.failover import reports as mev
from mpsd.core.faults import attribution as at
from mpsd.core.faults import outside, poisoned, servers, sources, taxonomy, unattributed
from mpsd.core.faults.recording import deviceless, join, revise, write
from mpsd.core.faults.records import Evidence, FaultRecord, Party, Source, UnconfirmedFault
from mpsd.core.lifecycle import DomainTrigger, next_domain_state
from mpsd.core.state import Client, Domain, DomainState, State, UnattributedXid

_VAGUE = frozenset({"sm-exception", "death-in-flight"})
_IN_SERVICE = (
    DomainState.ACTIVE,
    DomainState.FULL,
    DomainState.WARM,
    DomainState.POISONED,
    DomainState.RETIRED,
)
SUSPECTED = "suspected"
SUSPECTED_STEP_S = 0.05
SUSPECTED_S = 1.0
"""How long [s] mpsd asks a domain's server for its state after a log line that decides nothing."""


def on_uvm_fatal(draft: Draft, event: ev.UvmFatal) -> None:
    on_fatal(draft, event, at.uvm_evidence(event.event, draft.now))


def on_fatal(draft: Draft, event: ev.UvmFatal, sign: Evidence) -> None:
    """Handle an MMU fault that took the client's domain with it. `sign`: how it became known."""
    client = draft.state.clients.get(event.client)
    domain = draft.state.domains.get(event.client.domain)
    if client is None or domain is None or event.event.access is Access.PREFETCH:
        draft.count("uvm_events_without_client")
        return
    when = draft.now - event.age_s
    told = outcomes.was_told_to_leave(draft.state, domain.id, client.id.process, when)
    own = event.own_memory and outcomes.was_told_to_leave(draft.state, None, client.id.process, when)
    ambiguous = not told and not own and _may_be_of_left_domain(draft.state, client, when)
    if told or own or ambiguous:
        # The program's old context has lost its memory, so work that still runs there faults as expected.
        draft.count("failover_echoes")
        if ambiguous:
            # A fault of the context in use would show on its server.
            suspect(draft, domain.id)
        return
    member = draft.state.is_member(client)
    elsewhere = (c for c in draft.state.spaces_of(client.id.process) if c.id.domain != domain.id)
    if not member and any(c.living and draft.state.is_member(c) for c in elsewhere):
        # Only an open log names it as a client here. The tracker reports this fault for its own domain, too.
        draft.count("uvm_events_without_client")
        return
    if not member:
        _hold(draft, event, sign)
        return
    open_records = at.open_for(draft.state, domain.id, draft.now)
    sure = (r for r in open_records if r.confidence is Confidence.CERTAIN and r.offender is not None)
    same = next((r for r in sure if r.offender and r.offender.id == client.id), None)
    if same is not None:
        # A kernel faults on many addresses at once: keep the first, count the rest as evidence.
        draft.put_fault(at.add_evidence(same, sign))
        return
    vague = next((r for r in open_records if _could_be_uvm(r)), None)
    record = _certain(draft, vague or _new(draft, domain), at.party(client), event)
    # Earlier signs were classified without this event: classify them again.
    record = at.refine(at.add_evidence(record, sign), (*record.evidence, *unattributed.take(draft, record)))
    if at.may_be_in_other_domain(draft.state, client):
        # Its trackers see all its address spaces: only the faulted server itself shows which domain is hit.
        record = draft.put_fault(replace(record, victims=(), revision=record.revision + 1))
        draft.put_domain(replace(draft.state.domains[domain.id], last_fault=record.id))
        write(draft, record)
    else:
        _out_of_service(draft, domain, record)
        plan.named(draft, domain.id, client.id.process)
    if event.event.address >= taxonomy.NULL_PAGE_BYTES:
        draft.emit(Inspect(record.id, client.id.process, event.event.address))


def _may_be_of_left_domain(state: State, client: Client, when: float) -> bool:
    """Return whether a fault of this client at `when` may be of a context that its process was told to leave.

    That context also writes to snapshot buffers and to memory that the program maps itself, which the vault
    does not hold. Such faults come soon after the process was told, and until that domain has stopped.
    """
    process, window = client.id.process, state.policy.evidence_window_s
    for domain in state.domains.values():
        left = domain.id != client.id.domain and outcomes.was_told_to_leave(state, domain.id, process, when)
        if left and not outcomes.was_told_to_leave(state, domain.id, process, when - window):
            old = [c for c in state.spaces_of(process) if c.id.domain == domain.id and c.living]
            if not (all(at.is_distinguishable(client, c) for c in old) if old else client.apart):
                return True
    return False


def _hold(draft: Draft, event: ev.UvmFatal, sign: Evidence) -> None:
    """Keep a fault of a process that only an open log calls a client, until the server lists the process.

    The process may run outside MPS. A record would then name it for the next fault of the domain.
    """
    client = draft.state.clients[event.client]
    if client.fault is None or draft.now - client.fault.sign.at > draft.state.policy.evidence_window_s:
        held = UnconfirmedFault(event.event, event.own_memory, draft.now - event.age_s, sign)
        draft.put_client(replace(client, fault=held))
        draft.count("faults_unconfirmed")
        draft.emit(AskServer(client.id.domain, clients=True))
        suspect(draft, client.id.domain)


def on_confirmed(draft: Draft, domain: str, process: ProcessInstance) -> None:
    """Handle the faults of a process that its server has listed: its own one, and that of its domain."""
    for client in [c for c in draft.state.spaces_of(process) if c.id.domain == domain and c.listed]:
        held = client.fault
        if held is not None:
            draft.put_client(replace(client, fault=None))
        if held is not None and draft.now - held.sign.at <= draft.state.policy.evidence_window_s:
            event = ev.UvmFatal(client.id, held.event, held.own_memory, draft.now - held.at)
            on_fatal(draft, event, held.sign)
        for record in at.open_for(draft.state, domain, draft.now):
            vague = record.offender is None and (record.suspects or record.fault_class in _VAGUE)
            if vague and client.noticed <= record.at and at.is_fresh(draft.state, record, draft.now):
                suspects, victims = (_with(p, at.party(client)) for p in (record.suspects, record.victims))
                revise(draft, record, replace(record, suspects=suspects, victims=victims))


def _with(parties: tuple[Party, ...], party: Party) -> tuple[Party, ...]:
    known = any(p.id.process == party.id.process for p in parties)
    return parties if known else (*parties, party)


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
        lies_there=AddressKind.NULL_PAGE if event.event.address < taxonomy.NULL_PAGE_BYTES else None,
        source_ns=event.event.timestamp_ns,
    )


def _new(draft: Draft, domain: Domain, fault_class: str = "sm-exception") -> FaultRecord:
    """Return a record that knows the domain only: every client in it is a suspect."""
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
    """Take the domain out of service, then write the record.

    In this order a reader of the record finds the stable path switched already.
    """
    record = plan.name_by_replay(draft, replace(record, revision=record.revision + 1))
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
    if event.lies_there is AddressKind.FREED and fault_class == "mmu-invalid-address":
        fault_class = "mmu-use-after-unmap"
    revise(draft, record, replace(record, lies_there=event.lies_there, fault_class=fault_class))


def domain_sign(draft: Draft, domain: Domain, sign: Evidence) -> None:
    """Handle a sign that certainly belongs to this domain, but names no client reliably."""
    existing = at.open_for(draft.state, domain.id, draft.now)
    if sign.source is Source.SERVER_STATE and domain.server is not None:
        # The state belongs to a later server than the recorded death.
        existing = [r for r in existing if r.fault_class not in taxonomy.DEATHS]
    if existing:
        old = new = at.likeliest(existing, sign)
        if domain.state in _IN_SERVICE and old.fault_class != "server-death":
            if old.confidence is Confidence.CERTAIN and old.offender is not None:
                new = replace(old, victims=at.victims(draft.state, domain.id, old.offender.id))
            new = plan.name_by_replay(draft, new)
            domains.leave(draft, domain.id, DomainTrigger.FAULT)
        revise(draft, old, at.refine(new, (*unattributed.take(draft, old), sign)))
        return
    if domain.state not in (*_IN_SERVICE, DomainState.HEADLESS):
        return
    device = at.device_fault(draft.state, domain, draft.now)
    if device is not None:
        # The device caused it, no client did: no record of its own, and no suspects.
        join(draft, device, sign)
        draft.put_domain(replace(domain, last_fault=device.id))
        if domain.state in _IN_SERVICE:
            domains.leave(draft, domain.id, DomainTrigger.FAULT)
        return
    record = _new(draft, domain)
    record = at.refine(record, (*unattributed.take(draft, record), sign))
    _out_of_service(draft, domain, _blame(draft, record))


def _blame(draft: Draft, record: FaultRecord) -> FaultRecord:
    assert record.domain is not None
    lacking = draft.state.domains[record.domain].may_lack_clients
    # Nor does mpsd know the clients that ended before it took the domain over.
    lacking |= draft.state.adopting or draft.now - draft.state.adopted < at.DEATH_WINDOW_S
    if lacking or at.may_have_unlisted(draft.state, record.domain, draft.now):
        # The offender may be a client that mpsd does not know.
        return record
    exited = at.exited_in_flight(draft.state, record.domain, draft.now)
    numbers = {e.xid for e in record.evidence}
    if exited is not None and 31 in numbers and record.fault_class in taxonomy.MMU_CLASSES:
        # Likely, not certain: a fault of an untracked client would look the same.
        return replace(
            record,
            fault_class="death-in-flight",
            offender=exited,
            confidence=Confidence.LIKELY,
            suspects=(),
            victims=at.victims(draft.state, record.domain, exited.id),
        )
    alone = draft.state.clients.get(record.suspects[0].id) if len(record.suspects) == 1 else None
    if alone is not None and draft.state.is_standby_context(alone):
        # No work should run in an idle standby context: suspect it, but never name it for being alone.
        return record
    return at.name_only_suspect(record)


def on_kernel_log(draft: Draft, event: mev.KernelLogFollowed) -> None:
    draft.state = replace(draft.state, log_read_since=draft.now if event.is_read else None)


def _note_exception(draft: Draft, gpu: str | None, xid: int) -> None:
    if xid == at.SM_EXCEPTION_XID:
        known = {**draft.state.exceptions, gpu or "": draft.now}
        draft.state = replace(draft.state, exceptions=MappingProxyType(known))


def on_kernel_xid(draft: Draft, event: ev.KernelXidSeen) -> None:
    _note_exception(draft, event.gpu, event.xid.xid)
    sign = at.kernel_evidence(event.xid, draft.now)
    device = taxonomy.device_class(event.xid.xid)
    if device is not None:
        _device_fault(draft, device, event.gpu, sign)
        return
    if event.xid.xid not in taxonomy.CLIENT_XIDS:
        draft.count("xids_ignored")
        return
    if event.xid.pid is None:
        join_or_add_unattributed(draft, event.gpu, event.xid.xid, sign)
        return
    if poisoned.claim(draft, event.gpu, event.xid.xid, sign, event.xid.pid):
        return
    left_domain = outcomes.recently_left_domain(draft.state, event.xid.pid, draft.now)
    if left_domain is not None:
        _echo(draft, left_domain, sign)
        return
    domain = at.owner_of_pid(draft.state, event.gpu, event.xid.pid, draft.now)
    if domain is not None:
        domain_sign(draft, domain, sign)
        if at.is_reset(draft.state, domain, event.gpu, event.xid, draft.now):
            plan.fence(draft, domain)
    elif (former := at.former_domain(draft.state, event.xid.pid, draft.now)) is not None:
        if not _echo(draft, former, sign) and event.gpu is not None:
            unattributed.add(draft, UnattributedXid(event.gpu, event.xid.xid, sign))
    elif (claimed := at.domain_that_claims(draft.state, event.gpu, event.xid.pid)) is not None:
        # The sign waits until the server has told of the fault.
        suspect(draft, claimed.id)
        unattributed.add(draft, UnattributedXid(event.gpu or claimed.gpus[0], event.xid.xid, sign))
    elif event.gpu is not None:
        outside.on_line(draft, event.gpu, event.xid, sign)
    else:
        draft.count("xids_of_unknown_gpus")


def _echo(draft: Draft, domain: str, sign: Evidence) -> bool:
    """Add a late sign to the fault of its domain. Return False if that is not open any more."""
    records = at.open_for(draft.state, domain, draft.now)
    if records:
        record = at.likeliest(records, sign)
        revise(draft, record, at.refine(record, (sign,)))
    return bool(records)


def on_nvml_xid(draft: Draft, event: ev.NvmlXidSeen) -> None:
    _note_exception(draft, event.xid.gpu_uuid, event.xid.xid)
    sign = Evidence(Source.NVML, draft.now, f"NVML Xid {event.xid.xid}", event.xid.xid)
    device = taxonomy.device_class(event.xid.xid)
    if device is not None:
        _device_fault(draft, device, event.xid.gpu_uuid, sign)
    elif event.xid.xid in taxonomy.CLIENT_XIDS:
        join_or_add_unattributed(draft, event.xid.gpu_uuid, event.xid.xid, sign)


def join_or_add_unattributed(draft: Draft, gpu: str | None, xid: int, sign: Evidence) -> None:
    """Give the sign to the only open fault of that GPU, or keep it as unattributed for a later fault."""
    if gpu is None:
        draft.count("xids_of_unknown_gpus")
        return
    records = at.open_on_gpu(draft.state, gpu, draft.now)
    own = at.with_kernel_xid(records, sign)
    if outside.claim(draft, gpu, xid, sign, own):
        return
    records = own or records
    if len({r.domain for r in records}) == 1:
        record = at.likeliest(records, sign)
        revise(draft, record, at.refine(record, (sign,)))
    elif records or not poisoned.claim(draft, gpu, xid, sign):
        unattributed.add(draft, UnattributedXid(gpu, xid, sign))


def _device_fault(draft: Draft, fault_class: str, gpu: str | None, sign: Evidence) -> None:
    gpus = (gpu,) if gpu else ()
    if gpu is not None and sign.xid in taxonomy.LOST_XIDS:
        draft.put_lost_gpu(gpu, f"Xid {sign.xid}: {taxonomy.CLASSES[fault_class].title}")
    if gpu is not None and sign.xid in taxonomy.FATAL_DEVICE_XIDS:
        _blame_device(draft, fault_class, gpu, sign)
    for record in draft.state.open_faults:
        same = record.domain is None and record.gpus == gpus and record.fault_class == fault_class
        if same and at.is_open(draft.state, record, draft.now):
            join(draft, record, sign)
            return
    deviceless(draft, fault_class, gpu, (sign,))


def on_gpu_lost(draft: Draft, event: ev.GpuLost) -> None:
    draft.put_lost_gpu(event.gpu, event.why)


def _blame_device(draft: Draft, fault_class: str, gpu: str, sign: Evidence) -> None:
    """Reclassify a record that only server signs support: the server reported the device's fault first."""
    for record in at.open_on_gpu(draft.state, gpu, draft.now):
        told_by_server = all(e.source in (Source.SERVER_LOG, Source.SERVER_STATE) for e in record.evidence)
        if record.fault_class == "sm-exception" and told_by_server:
            changed = replace(
                record, fault_class=fault_class, offender=None, confidence=Confidence.UNKNOWN, suspects=()
            )
            revise(draft, record, at.add_evidence(changed, sign))


def on_server_fatal(draft: Draft, event: ev.ServerFatalLogged) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None:
        return
    if sources.log_may_decide(draft.state, domain):
        domain_sign(draft, domain, Evidence(Source.SERVER_LOG, draft.now, event.text))
    else:
        draft.count("log_faults_asked")
        suspect(draft, domain.id)


def suspect(draft: Draft, name: str) -> None:
    """Ask for the state of a server, at once and then for a while, without any other consequence.

    The state may turn to FAULT only after the sign. The answer decides (on_server_state).
    """
    domain = draft.state.domains[name]
    if domain.state not in _IN_SERVICE:
        return
    asking = draft.now - domain.suspected < SUSPECTED_S
    draft.put_domain(replace(domain, suspected=draft.now))
    if not asking:
        draft.emit(AskServer(name), ArmTimer(SUSPECTED, name, SUSPECTED_STEP_S))


def on_suspected(draft: Draft, name: str) -> None:
    """Ask again until the time since the last sign is over."""
    domain = draft.state.domains[name]
    if domain.state in _IN_SERVICE and draft.now - domain.suspected < SUSPECTED_S:
        draft.emit(AskServer(name, patient=True), ArmTimer(SUSPECTED, name, SUSPECTED_STEP_S))


def on_server_at_fault(draft: Draft, event: ev.ServerAtFault) -> None:
    """Attribute an unattributed SM exception to a server that is in the driver since.

    Not if it may belong to a process outside mpsd, or to a domain that has just faulted.
    """
    domain = draft.state.domains.get(event.domain)
    if not unattributed.has_ready_participant(draft.state, event.domain):
        # No participant could move early there, and another server's fault may keep this one in the driver.
        return
    here = [s for s in draft.state.strays if s.gpu == event.gpu]
    waits = any(unattributed.is_exception(s) for s in here) and not any(s.foreign for s in here)
    if domain is None or domain.server != event.server or not waits:
        return
    if domain.state in _IN_SERVICE and not at.open_on_gpu(draft.state, event.gpu, draft.now):
        text = f"server {event.server.pid} has been in a driver call since the Xid of an SM exception"
        domain_sign(draft, domain, Evidence(Source.PROCESS, draft.now, text))


def on_server_state(draft: Draft, event: ev.ServerStateSeen) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is DomainState.STOPPING:
        return
    before = domain.server_state
    domain = draft.put_domain(replace(domain, server_state=event.state))
    if event.state is ServerState.ACTIVE and before is not ServerState.ACTIVE:
        servers.became_active(draft, domain)
    if event.state is ServerState.FAULT:
        sign = Evidence(Source.SERVER_STATE, draft.now, "the control daemon reports the server in FAULT")
        domain_sign(draft, domain, sign)
    elif event.state is ServerState.ACTIVE and domain.state is DomainState.FAULTED:
        servers.recovered(draft, domain)
    elif event.state is ServerState.GONE:
        servers.no_successor(draft, domain)
        on_server_gone(draft, domain.id)


def on_control_died(draft: Draft, event: ev.ControlDied) -> None:
    """Record the death of a control daemon. Its server dies with it: both deaths are one fault."""
    if not servers.on_control_died(draft, event):
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
    if servers.on_server_died(draft, event) and in_use:
        _process_record(draft, event.domain, "server-death", f"server {event.server} died")


def _process_record(draft: Draft, name: str, fault_class: str, text: str) -> None:
    domain = draft.state.domains[name]
    record = replace(_new(draft, domain, fault_class), suspects=(), revision=1)
    draft.put_domain(replace(domain, last_fault=record.id))
    write(draft, at.add_evidence(record, Evidence(Source.PROCESS, draft.now, text)))
    plan.link(draft, name, record.id)


def on_work_runs(draft: Draft, event: ev.WorkRuns) -> None:
    """Mark the domain as poisoned: a kernel of an exited client does not end. The record names the client."""
    # Work of a process that only a line in an open log calls a client says nothing about the domain.
    members = [c for c in event.clients if at.is_member(draft.state, c)]
    held = mark_endless(draft, members)
    if not held:
        return
    client, domain = held[0], draft.state.domains[held[0].id.domain]
    if domain.state is DomainState.STOPPING:
        # The work ends with the server.
        return
    limit = draft.state.policy.linger_limit_s
    text = f"work of {client.id.process} has not ended {limit:g} s after its death: {event.left}"
    # Beside an endless kernel a short kernel of another client looks endless too: it is never scheduled.
    others = any(
        c.id.process != client.id.process and not draft.state.is_idle(c)
        for c in draft.state.clients_of(domain.id)
    )
    others = others or suspects.may_lack_work(draft.state, domain)
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
        # Participants fail over: the kernel is ended once no client is left in this domain.
        domains.leave(draft, domain.id, DomainTrigger.POISON, planned=True)
    write(draft, record)
    plan.link(draft, domain.id, record.id)
