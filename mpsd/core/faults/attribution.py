"""Attribution: which client caused a fault, and with which confidence. Pure functions from signs to records.

The evidential value of each sign (measured, faultinject/evidence/mechanisms-faults.md):

- A fatal UVM event arrives on the tracker of the guilty address space: certain.
- The pid in an Xid 31 line belongs to a channel that the hardware happened to name. Under MPS it is often an
  innocent client. It shows the domain, never the client.
- An SM exception (Xid 13, 43) names the server or no process. Every client that could have run is a suspect.
- NVML's Xid names a GPU only. It joins a fault that other signs have already given to a domain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from mpsd.base.model import ClientId, Confidence, KernelXid, UvmEvent, UvmFaultType
from mpsd.core.faults import taxonomy
from mpsd.core.faults.records import Evidence, FaultRecord, Party, Source
from mpsd.core.state import Client, Domain, DomainState, State, UnattributedXid

EVIDENCE_KEPT = 16
DEATH_WINDOW_S = 1.0
# NVML reports an Xid about 40 ms after the kernel log.
NVML_DELAY_S = 0.5
SM_EXCEPTION_XID = 13
RESET_XID = 43
# Xids 13, 31 and 43 come up to 0.4 s after the first sign (measured on an H200).
LATE_XID_S = 1.0
# The driver may report a fault after its domain has ended. The pids of its MPS processes still show it.
FORMER_SERVER_S = 60.0
_ADDRESS = re.compile(r"0x[0-9a-f][0-9a-f_]*", re.IGNORECASE)
# A record about an exited client's work: a GPU fault of the same domain soon after is another fault.
_NO_GPU_FAULT = frozenset({"hang"})


def party(client: Client) -> Party:
    return Party(client.id, client.facts)


def fault_type_name(event: UvmEvent) -> str:
    return UvmFaultType(event.fault_type).name.lower().replace("_", " ")


def uvm_evidence(event: UvmEvent, at: float) -> Evidence:
    reason = event.reason.name.lower().replace("_", " ")
    text = f"{event.access.value} at {event.address:#x}, {fault_type_name(event)}, reason {reason}"
    return Evidence(Source.UVM, at, text)


def add_evidence(record: FaultRecord, *signs: Evidence) -> FaultRecord:
    """Return the record with these signs, oldest kept first. A repeated sign adds nothing."""
    known = {(e.source, e.text) for e in record.evidence}
    fresh = tuple(e for e in signs if (e.source, e.text) not in known)
    return replace(record, evidence=(*record.evidence, *fresh)[:EVIDENCE_KEPT])


def is_open(state: State, record: FaultRecord, now: float) -> bool:
    """Return whether the record takes more signs: for a while, or until its domain has recovered."""
    domain = state.domains.get(record.domain) if record.domain else None
    down = domain is not None and domain.state is DomainState.FAULTED
    return down or is_fresh(state, record, now)


def is_fresh(state: State, record: FaultRecord, now: float) -> bool:
    """Return whether the record's last sign is within the evidence window."""
    return now - record.last_sign <= state.policy.evidence_window_s


def open_for(state: State, domain: str, now: float) -> list[FaultRecord]:
    """Return the open records of GPU faults of a domain, newest first."""
    faults = [r for r in state.open_faults if r.fault_class not in _NO_GPU_FAULT]
    own = [r for r in faults if r.domain == domain and is_open(state, r, now)]
    return sorted(own, key=lambda r: r.id, reverse=True)


def open_on_gpu(state: State, gpu: str, now: float) -> list[FaultRecord]:
    """Return the records that a sign without a process may belong to.

    Only fresh records: a domain may stay faulted for hours while its victims live on, and by then such a sign
    belongs to another domain.
    """
    faults = [r for r in state.open_faults if r.fault_class not in _NO_GPU_FAULT and r.domain]
    return [r for r in faults if gpu in r.gpus and is_fresh(state, r, now)]


def device_fault(state: State, domain: Domain, now: float) -> FaultRecord | None:
    """Return a fresh fault of one of the domain's GPUs that ends servers with it."""
    for record in reversed(state.open_faults):
        here = record.domain is None and set(record.gpus) & set(domain.gpus)
        fatal = any(e.xid in taxonomy.FATAL_DEVICE_XIDS for e in record.evidence)
        if here and fatal and is_fresh(state, record, now):
            return record
    return None


def likeliest(records: Iterable[FaultRecord], sign: Evidence) -> FaultRecord:
    """Return the record of the address that the sign names, else the newest."""
    newest = sorted(records, key=lambda r: r.id, reverse=True)
    named = (r for r in newest if r.address is not None and names_address(sign.says, r.address))
    return next(named, newest[0])


def with_kernel_xid(records: Iterable[FaultRecord], sign: Evidence) -> list[FaultRecord]:
    """Return the records to which the kernel log has just added the same Xid that NVML now reports."""
    told = [r for r in records if has_line_of(r, sign)]
    return [r for r in told if not any(e.source is Source.NVML and e.xid == sign.xid for e in r.evidence)]


def has_line_of(record: FaultRecord, sign: Evidence) -> bool:
    """Return whether the record has the kernel log's line about the Xid that NVML now reports."""
    return any(_is_same_xid(e, sign) for e in record.evidence)


def is_of_foreign_process(foreign: Iterable[Evidence], own: Iterable[FaultRecord], sign: Evidence) -> bool:
    """Return whether NVML's Xid rather belongs to a log line that named a process outside mpsd.

    NVML reports Xids in the order of the log lines, each once. `foreign`: the signs about such processes on
    this GPU. `own`: records as returned above.
    """
    same = [e for e in foreign if e.xid == sign.xid]
    lines = sorted((e for e in same if e.source is not Source.NVML), key=lambda e: e.at)
    told = sum(e.source is Source.NVML for e in same)
    waiting = [e.at for e in lines[told:] if _is_same_xid(e, sign)]
    ours = [e.at for r in own for e in r.evidence if _is_same_xid(e, sign)]
    return bool(waiting) and all(waiting[0] < at for at in ours)


def _is_same_xid(line: Evidence, sign: Evidence) -> bool:
    sources = (line.source, sign.source) == (Source.KERNEL_LOG, Source.NVML)
    return sources and line.xid == sign.xid and 0 <= sign.at - line.at <= NVML_DELAY_S


def owner_of_pid(state: State, gpu: str | None, pid: int, now: float) -> Domain | None:
    """Return the domain of a pid in a kernel log line: its server, or a present or past client."""
    candidates = [d for d in state.domains.values() if gpu is None or gpu in d.gpus]
    for at_home in (True, False):
        # For a process in two domains, prefer its home domain.
        for domain in candidates:
            own = (domain.server, domain.former_server, domain.control)
            members = {p.pid for p in own if p is not None}
            clients = (c for c in state.clients_of(domain.id) if state.is_member(c))
            here = (c for c in clients if state.at_home(c) or not at_home)
            if pid in members | {c.id.process.pid for c in here}:
                return domain
    for departed in reversed(state.departed):
        recent = now - departed.at <= join_window_s(state)
        if departed.id.process.pid == pid and departed.member and recent:
            return next((d for d in candidates if d.id == departed.id.domain), None)
    return None


def domain_that_claims(state: State, gpu: str | None, pid: int) -> Domain | None:
    """Return a domain whose open log alone names this pid as a client, and whose list has not told yet."""
    claimed = (c for c in state.clients.values() if c.living and c.id.process.pid == pid and not c.absent)
    domains = (state.domains[c.id.domain] for c in claimed)
    return next((d for d in domains if gpu is None or gpu in d.gpus), None)


def is_reset(state: State, domain: Domain, gpu: str | None, xid: KernelXid, now: float) -> bool:
    """Return whether this line says that the driver has reset the channels of a faulted domain.

    The clients of an MPS server share its channel group on a GPU, so after this Xid no kernel of any client
    was ever seen to write (evidence/mechanisms-failover.md). The line says nothing about another GPU of the
    domain. Without a sign of another kind such a line may be an old one.
    """
    servers = {p.pid for p in (domain.server, domain.former_server) if p is not None}
    lost_here = domain.state is DomainState.FAULTED and domain.gpus == (gpu,)
    signs = (e for record in open_for(state, domain.id, now) for e in record.evidence)
    lost_before = any((e.source, e.xid) != (Source.KERNEL_LOG, RESET_XID) for e in signs)
    return lost_here and lost_before and xid.xid == RESET_XID and xid.pid in servers


def former_domain(state: State, pid: int, now: float) -> str | None:
    """Return the domain of which this pid was a client until recently, or a process of MPS.

    The domain may be gone as well.
    """
    for departed in reversed(state.departed):
        recent = departed.member and now - departed.at <= join_window_s(state)
        if departed.id.process.pid == pid and recent:
            return departed.id.domain
    for ended in reversed(state.ended):
        if pid in ended.pids and now - ended.at <= FORMER_SERVER_S:
            return ended.id
    return None


def join_window_s(state: State) -> float:
    """Return the time [s] between a record and an Xid of its fault, at most."""
    return max(state.policy.evidence_window_s, LATE_XID_S)


def recorded_near(state: State, gpu: str, when: float) -> list[FaultRecord]:
    """Return the records of GPU faults of domains that a sign of that time may belong to, nearest first.

    `when`: monotonic seconds. A record counts for the evidence window before its time and after its last
    sign, open or not.
    """
    window = join_window_s(state)
    faults = (r for r in state.open_faults if r.domain and gpu in r.gpus)
    faults = (r for r in faults if r.fault_class not in _NO_GPU_FAULT)
    near = [r for r in faults if r.at - window <= when <= r.last_sign + window]
    return sorted(near, key=lambda r: (abs(when - r.at), -r.id))


def suspects(state: State, domain: str, now: float) -> tuple[Party, ...]:
    """Return every client that could have run work in the domain, one party for each process.

    Text of a log that every local user can write adds none (State.is_member).
    Clients that left just now are included: an offender often exits by its own error before a sign of its
    fault arrives, and must not leave an innocent client as the only suspect.
    """
    seen: dict[object, Party] = {}
    members = (c for c in state.clients_of(domain) if state.is_member(c))
    for client in sorted(members, key=lambda c: c.id):
        seen.setdefault(client.id.process, party(client))
    for departed in state.departed:
        if departed.member and departed.id.domain == domain and now - departed.at <= DEATH_WINDOW_S:
            seen.setdefault(departed.id.process, Party(departed.id, departed.facts))
    return tuple(seen.values())


def may_have_unlisted(state: State, domain: str, now: float) -> bool:
    """Return whether the domain may have, or have just had, a client that no list has shown or denied yet."""
    here = (c for c in state.clients_of(domain) if not state.is_member(c))
    recent = (d for d in state.departed if d.id.domain == domain and now - d.at <= DEATH_WINDOW_S)
    return any(not c.absent for c in here) or any(not (d.member or d.absent) for d in recent)


def victims(state: State, domain: str, offender: ClientId | None) -> tuple[Party, ...]:
    """Return the living clients of the domain without the offender's process."""
    spared = offender.process if offender else None
    others = [c for c in state.living_of(domain) if c.id.process != spared and state.at_home(c)]
    others = [c for c in others if state.is_member(c)]
    return tuple(party(c) for c in sorted(others, key=lambda c: c.id))


def may_be_in_other_domain(state: State, client: Client) -> bool:
    """Return whether a fault of this client may belong to another domain of its process.

    A process with a second driver instance is a client of two domains.
    """
    spaces = (c for c in state.spaces_of(client.id.process) if c.living and state.is_member(c))
    others = [c for c in spaces if c.id.domain != client.id.domain]
    return any(not is_distinguishable(client, other) for other in others)


def is_distinguishable(client: Client, other: Client) -> bool:
    """Return whether a fault of `client` cannot belong to `other`: their address spaces are known to differ.

    An address space that appeared after the first was leased, and is not leased yet, cannot be in that lease.
    """
    newer = other.attached is None and client.attached is not None and other.noticed > client.attached
    return client.apart and (other.apart or newer)


def is_member(state: State, client: ClientId) -> bool:
    """Return whether a source that may decide says that this is, or was, a client of its domain."""
    known = state.clients.get(client)
    if known is not None:
        return state.is_member(known)
    return any(departed.id == client and departed.member for departed in state.departed)


def exited_in_flight(state: State, domain: str, now: float) -> Party | None:
    """Return the client that died just now without a lease, if there is exactly one."""
    found = [
        Party(departed.id, departed.facts)
        for departed in state.departed
        if departed.id.domain == domain and departed.member and not departed.leased
        if now - departed.at <= DEATH_WINDOW_S
    ]
    return found[0] if len(found) == 1 else None


def names_address(text: str, address: int) -> bool:
    """Return whether a kernel log line names the page of this address."""
    page = address >> 12
    found = (int(m.group().replace("_", ""), 16) for m in _ADDRESS.finditer(text) if len(m.group()) > 3)
    return any(value >> 12 == page for value in found)


def refine(record: FaultRecord, signs: Iterable[Evidence]) -> FaultRecord:
    """Return the record with the signs added, and with the class that they allow."""
    for sign in signs:
        record = add_evidence(replace(record, fault_class=_refined_class(record, sign)), sign)
    return record


def _refined_class(record: FaultRecord, sign: Evidence) -> str:
    current = record.fault_class
    if sign.source is not Source.KERNEL_LOG:
        return _by_number(current, sign.xid)
    if sign.xid == SM_EXCEPTION_XID and current in ("sm-exception", "sm-trap"):
        return taxonomy.classify_sm(sign.says) or current
    current = _by_number(current, sign.xid)
    if sign.xid == 31 and current in taxonomy.MMU_CLASSES:
        known = record.address is None or names_address(sign.says, record.address)
        return taxonomy.refine_mmu(current, sign.says) if known else current
    return current


def _by_number(current: str, xid: int | None) -> str:
    """Return the class from the bare Xid number, for a record without a better class."""
    if current != "sm-exception":
        return current
    return {31: "mmu-invalid-address", 32: "pbdma-fault", 43: "sm-trap"}.get(xid or 0, current)


def kernel_evidence(xid: KernelXid, at: float) -> Evidence:
    says = xid.text.replace(f"name={xid.name}", "") if xid.name else xid.text
    return Evidence(Source.KERNEL_LOG, at, xid.text, xid.xid, says)


def matching_unattributed(state: State, gpus: tuple[str, ...], now: float) -> tuple[UnattributedXid, ...]:
    window = join_window_s(state)
    return tuple(s for s in state.strays if s.gpu in gpus and not s.foreign and now - s.evidence.at <= window)


def may_have_logged_exception(state: State, gpus: tuple[str, ...], when: float) -> bool:
    """Return whether the driver may have logged an SM exception (Xid 13) of a fault of that time.

    `when`: monotonic seconds. Any such line on one of these GPUs counts, from a while before, whichever fault
    it was attributed to: soon after another fault that may be wrong.
    """
    since = state.log_read_since
    times = [state.exceptions.get(gpu, -math.inf) for gpu in (*gpus, "")]
    return since is None or max(since, *times) >= when - join_window_s(state)


def name_only_suspect(record: FaultRecord) -> FaultRecord:
    """Name the only suspect as the offender: likely, never certain."""
    if record.offender is None and len(record.suspects) == 1:
        return replace(
            record, offender=record.suspects[0], confidence=Confidence.LIKELY, suspects=(), victims=()
        )
    return record
