"""Who did it, and how sure: pure functions from signs to fault records.

What a sign may prove (measured, faultinject/reports):
- A fatal UVM event comes on the tracker of the guilty address space: certain.
- The pid in an Xid 31 line is that of the channel the hardware happened to name; under MPS it is often
  an innocent's. It shows which domain, never which client.
- An SM exception (Xid 13, 43) names the server or nobody. Everybody who could have run is a suspect.
- NVML's Xid names a GPU only. It joins a fault that other signs have already given to a domain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mpsd.core import taxonomy
from mpsd.core.records import Evidence, FaultRecord, Party, Source
from mpsd.core.state import Client, Domain, DomainState, State, Stray
from mpsd.model import ClientId, Confidence, KernelXid, UvmEvent, UvmFaultType

EVIDENCE_KEPT = 16
DEATH_WINDOW_S = 1.0
# NVML tells of an Xid some 40 ms after the kernel's log did.
TWIN_S = 0.5
RESET_XID = 43
_ADDRESS = re.compile(r"0x[0-9a-f][0-9a-f_]*", re.IGNORECASE)
# A record of what a dead client's work did: a GPU fault of the same domain soon after is another fault.
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
    """The record with these signs, oldest kept first; a repeated sign adds nothing."""
    known = {(e.source, e.text) for e in record.evidence}
    fresh = tuple(e for e in signs if (e.source, e.text) not in known)
    return replace(record, evidence=(*record.evidence, *fresh)[:EVIDENCE_KEPT])


def is_open(state: State, record: FaultRecord, now: float) -> bool:
    """A record takes signs of its domain for a while, or for as long as that has not recovered."""
    domain = state.domains.get(record.domain) if record.domain else None
    down = domain is not None and domain.state is DomainState.FAULTED
    return down or is_fresh(state, record, now)


def is_fresh(state: State, record: FaultRecord, now: float) -> bool:
    return now - record.last_sign <= state.policy.evidence_window_s


def open_for(state: State, domain: str, now: float) -> list[FaultRecord]:
    """Open records of GPU faults of a domain, newest first."""
    faults = [r for r in state.open_faults if r.fault_class not in _NO_GPU_FAULT]
    own = [r for r in faults if r.domain == domain and is_open(state, r, now)]
    return sorted(own, key=lambda r: r.id, reverse=True)


def open_on_gpu(state: State, gpu: str, now: float) -> list[FaultRecord]:
    """Records that a sign naming no process could belong to.

    Only fresh ones: a domain may stay faulted for hours while its victims hang about, and by then such
    a sign is another domain's.
    """
    faults = [r for r in state.open_faults if r.fault_class not in _NO_GPU_FAULT and r.domain]
    return [r for r in faults if gpu in r.gpus and is_fresh(state, r, now)]


def device_fault(state: State, domain: Domain, now: float) -> FaultRecord | None:
    """A fresh fault of one of the domain's GPUs that takes servers with it."""
    for record in reversed(state.open_faults):
        here = record.domain is None and set(record.gpus) & set(domain.gpus)
        fatal = any(e.xid in taxonomy.FATAL_DEVICE_XIDS for e in record.evidence)
        if here and fatal and is_fresh(state, record, now):
            return record
    return None


def likeliest(records: Iterable[FaultRecord], sign: Evidence) -> FaultRecord:
    """The record whose address the sign speaks of, else the newest."""
    newest = sorted(records, key=lambda r: r.id, reverse=True)
    named = (r for r in newest if r.address is not None and names_address(sign.says, r.address))
    return next(named, newest[0])


def kernels_own(records: Iterable[FaultRecord], sign: Evidence) -> list[FaultRecord]:
    """Those to which the kernel's log has just added the very Xid that NVML tells of, which names nobody."""
    told = [r for r in records if any(_is_twin(e, sign) for e in r.evidence)]
    return [r for r in told if not any(e.source is Source.NVML and e.xid == sign.xid for e in r.evidence)]


def is_strangers(strays: Iterable[Stray], own: Iterable[FaultRecord], sign: Evidence, gpu: str) -> bool:
    """Whether it is rather that of a line which named a process that is none of ours.

    NVML tells of Xids in the order of those lines, of each once. `own`: records as above.
    """
    foreign = [s.evidence for s in strays if s.foreign and s.gpu == gpu and s.xid == sign.xid]
    lines = sorted((e for e in foreign if e.source is not Source.NVML), key=lambda e: e.at)
    told = sum(e.source is Source.NVML for e in foreign)
    waiting = [e.at for e in lines[told:] if _is_twin(e, sign)]
    ours = [e.at for r in own for e in r.evidence if _is_twin(e, sign)]
    return bool(waiting) and all(waiting[0] < at for at in ours)


def _is_twin(line: Evidence, sign: Evidence) -> bool:
    sources = (line.source, sign.source) == (Source.KERNEL_LOG, Source.NVML)
    return sources and line.xid == sign.xid and 0 <= sign.at - line.at <= TWIN_S


def owner_of_pid(state: State, gpu: str | None, pid: int, now: float) -> Domain | None:
    """The domain that a pid in a kernel log line belongs to: its server, or a client, past or present."""
    candidates = [d for d in state.domains.values() if gpu is None or gpu in d.gpus]
    for at_home in (True, False):
        # Of a process in two domains it is the one where its work runs.
        for domain in candidates:
            own = (domain.server, domain.former_server, domain.control)
            members = {p.pid for p in own if p is not None}
            here = (c for c in state.clients_of(domain.id) if state.at_home(c) or not at_home)
            if pid in members | {c.id.process.pid for c in here}:
                return domain
    for gone in reversed(state.departed):
        recent = now - gone.at <= state.policy.evidence_window_s
        if gone.id.process.pid == pid and recent:
            return next((d for d in candidates if d.id == gone.id.domain), None)
    return None


def is_reset(state: State, domain: Domain, gpu: str | None, xid: KernelXid, now: float) -> bool:
    """Whether this line says that the driver has reset the channels of a domain that was lost already.

    The clients of an MPS server share its channel group on a GPU, so what kernels of any of them had in
    flight there has ended: after this Xid none was ever seen to write (faultinject/reports, -failover). It
    says nothing of another GPU of the domain. Without a sign of another kind, such lines may be old ones.
    """
    servers = {p.pid for p in (domain.server, domain.former_server) if p is not None}
    lost_here = domain.state is DomainState.FAULTED and domain.gpus == (gpu,)
    signs = (e for record in open_for(state, domain.id, now) for e in record.evidence)
    lost_before = any((e.source, e.xid) != (Source.KERNEL_LOG, RESET_XID) for e in signs)
    return lost_here and lost_before and xid.xid == RESET_XID and xid.pid in servers


def former_domain(state: State, pid: int, now: float) -> str | None:
    """The name of the domain of which this pid was a client until just now, though it may be gone itself."""
    for gone in reversed(state.departed):
        if gone.id.process.pid == pid and now - gone.at <= state.policy.evidence_window_s:
            return gone.id.domain
    return None


def suspects(state: State, domain: str, now: float) -> tuple[Party, ...]:
    """Every process that could have run work in the domain, one party for each.

    Whoever left just now is among them: an offender often ends by its own error before any sign of its
    fault arrives, and must not leave the last innocent behind as the only suspect.
    """
    seen: dict[object, Party] = {}
    for client in sorted(state.clients_of(domain), key=lambda c: c.id):
        seen.setdefault(client.id.process, party(client))
    for gone in state.departed:
        if gone.id.domain == domain and now - gone.at <= DEATH_WINDOW_S:
            seen.setdefault(gone.id.process, Party(gone.id, gone.facts))
    return tuple(seen.values())


def victims(state: State, domain: str, offender: ClientId | None) -> tuple[Party, ...]:
    """Living clients of the domain, the offender's process left out."""
    spared = offender.process if offender else None
    others = [c for c in state.living_of(domain) if c.id.process != spared and state.at_home(c)]
    return tuple(party(c) for c in sorted(others, key=lambda c: c.id))


def elsewhere(state: State, client: Client) -> bool:
    """Whether a fault of this client may be that of another domain, of which its process is a client as well
    (a second copy of libcuda)."""
    others = [c for c in state.spaces_of(client.id.process) if c.living and c.id.domain != client.id.domain]
    return any(not _told_apart(client, other) for other in others)


def _told_apart(client: Client, other: Client) -> bool:
    """Whether a fault of `client` is surely none of `other`: their address spaces are known to be two.

    One that came after the first was leased, and is not leased itself, cannot be in that lease.
    """
    newer = other.attached is None and client.attached is not None and other.noticed > client.attached
    return client.apart and (other.apart or newer)


def dead_in_flight(state: State, domain: str, now: float) -> Party | None:
    """The one client that died just now without a lease, if there is exactly one."""
    found = [
        Party(gone.id, gone.facts)
        for gone in state.departed
        if gone.id.domain == domain and not gone.leased and now - gone.at <= DEATH_WINDOW_S
    ]
    return found[0] if len(found) == 1 else None


def names_address(text: str, address: int) -> bool:
    """Whether a kernel log line speaks of the page that holds this address."""
    page = address >> 12
    found = (int(m.group().replace("_", ""), 16) for m in _ADDRESS.finditer(text) if len(m.group()) > 3)
    return any(value >> 12 == page for value in found)


def refine(record: FaultRecord, signs: Iterable[Evidence]) -> FaultRecord:
    """The record with the class that these signs allow, and the signs themselves."""
    for sign in signs:
        record = add_evidence(replace(record, fault_class=_refined_class(record, sign)), sign)
    return record


def _refined_class(record: FaultRecord, sign: Evidence) -> str:
    current = record.fault_class
    if sign.source is not Source.KERNEL_LOG:
        return _by_number(current, sign.xid)
    if sign.xid == 13 and current in ("sm-exception", "sm-trap"):
        return taxonomy.classify_sm(sign.says) or current
    current = _by_number(current, sign.xid)
    if sign.xid == 31 and current in taxonomy.MMU_CLASSES:
        known = record.address is None or names_address(sign.says, record.address)
        return taxonomy.refine_mmu(current, sign.says) if known else current
    return current


def _by_number(current: str, xid: int | None) -> str:
    """What the bare number says of a record that knows nothing better."""
    if current != "sm-exception":
        return current
    return {31: "mmu-invalid-address", 32: "pbdma-fault", 43: "sm-trap"}.get(xid or 0, current)


def kernel_evidence(xid: KernelXid, at: float) -> Evidence:
    says = xid.text.replace(f"name={xid.name}", "") if xid.name else xid.text
    return Evidence(Source.KERNEL_LOG, at, xid.text, xid.xid, says)


def matching_strays(state: State, gpus: tuple[str, ...], now: float) -> tuple[Stray, ...]:
    window = state.policy.evidence_window_s
    return tuple(s for s in state.strays if s.gpu in gpus and not s.foreign and now - s.evidence.at <= window)


def blame_one(record: FaultRecord) -> FaultRecord:
    """Where only one process could have done it, name it: likely, never certain."""
    if record.offender is None and len(record.suspects) == 1:
        return replace(
            record, offender=record.suspects[0], confidence=Confidence.LIKELY, suspects=(), victims=()
        )
    return record
