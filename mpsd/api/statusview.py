"""The answer of `status` (schema 1): the daemon's state, joined with facts from NVML and /proc."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpsd import __version__
from mpsd.api import failoverview as failover_view
from mpsd.api import protectionview
from mpsd.api.lastfaults import LastFaults, Record, fault_view, offender_of
from mpsd.api.usernames import user_name
from mpsd.base.conditions import Condition
from mpsd.base.errors import MpsdError
from mpsd.base.model import ClientId, ComputeMode, Gpu, GpuProcess, ProcessFacts, ProcessInstance
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.clients.starts import Start
from mpsd.config.layout import Layout
from mpsd.core.failover import outcomes
from mpsd.core.proof import proofs
from mpsd.core.state import Client, Domain, DomainState, State
from mpsd.core.victims import work_is_lost
from mpsd.gpu.base import DeviceManager
from mpsd.os import processes as procs
from mpsd.os import procfs

SCHEMA = 1
UNSTORED = "the lease is not in the descriptor store, and ends with mpsd"


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as NVML shows it at one moment; `problem`: why NVML does not show it.

    `other_processes`: facts of its processes that are neither clients nor processes of mpsd. `reasons`: why
    they are not on MPS, where their pipe directory is the cause.
    """

    gpu: Gpu
    memory_used: int | None = None
    mode: ComputeMode | None = None
    processes: Sequence[GpuProcess] = ()
    other_processes: Mapping[int, ProcessFacts] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Inputs of a status besides the state."""

    backend: str
    pid: int
    uptime_s: float
    now: float
    gpus: Sequence[GpuView]
    layout: Layout
    protections: Mapping[ClientId, Sequence[str]]
    guard_checked: Mapping[ClientId, float | None]
    settings: Mapping[str, Mapping[str, str]]
    clients_limit: int
    conditions: Sequence[Condition] = ()
    pending: Mapping[ProcessInstance, str] = field(default_factory=dict)
    extra_counters: Mapping[str, int] = field(default_factory=dict)
    orphans: Sequence[Mapping[str, Any]] = ()
    last_faults: LastFaults = field(default_factory=LastFaults)
    # Calendar seconds.
    wall: float = 0.0
    # Whether the peer may see a fault record.
    may_see: Callable[[Record], bool] = lambda _: True
    # Guard zones of each process that has a ledger.
    zones: Mapping[ProcessInstance, Mapping[str, Any]] = field(default_factory=dict)
    # Bytes in the vault of each process under the proxy.
    vault: Mapping[ProcessInstance, int] = field(default_factory=dict)
    failover: Mapping[str, Any] = field(default_factory=dict)
    # Of each client that can be read.
    starts: Mapping[ProcessInstance, Start] = field(default_factory=dict)
    # The node's level for programs of a user on GPUs.
    level_of: Callable[[Sequence[str], int], Protection] = lambda gpus, uid: Protection(
        ProtectionLevel.OBSERVE
    )
    isolation: Mapping[str, Any] = field(default_factory=dict)
    # Of the node, and of each GPU by its UUID.
    protection: Mapping[str, Any] = field(default_factory=dict)
    gpu_protection: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # How long each GPU stands still at an SM exception [ms]; None: not measured.
    stalls: Mapping[str, float | None] = field(default_factory=dict)
    # The limits of new clients of each domain, as its control daemon answers.
    limits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def query_gpus(devices: DeviceManager, gpus: Sequence[Gpu]) -> list[GpuView]:
    """Ask NVML about every GPU. Takes milliseconds: call it from a thread."""
    views = []
    for gpu in gpus:
        try:
            views.append(
                GpuView(
                    gpu,
                    devices.memory_used(gpu.uuid),
                    devices.compute_mode(gpu.uuid),
                    devices.processes(gpu.uuid),
                )
            )
        except MpsdError as error:
            views.append(GpuView(gpu, problem=str(error)))
    return views


def status(state: State, inputs: StatusInputs) -> dict[str, Any]:
    memory = {p.pid: p.memory_bytes for view in inputs.gpus for p in view.processes}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "backend": inputs.backend,
        "pid": inputs.pid,
        "uptime_s": round(inputs.uptime_s, 3),
        "draining": bool(state.drained),
        "drained_gpus": sorted(v.gpu.uuid for v in inputs.gpus if state.drained & {"*", v.gpu.uuid}),
        "protection": dict(inputs.protection),
        "problems": [condition.text for condition in inputs.conditions],
        "conditions": [condition.view() for condition in inputs.conditions],
        "kernel_isolation": dict(inputs.isolation),
        "gpus": [_gpu(state, view, inputs) for view in inputs.gpus],
        "failover": dict(inputs.failover),
        "slots": [_slot(state, row, inputs) for row in failover_view.slot_rows(state, inputs.now)],
        "domains": [_domain(state, d, inputs, memory) for d in state.domains.values()],
        "clients": [_client(state, c, inputs, memory) for c in state.clients.values() if c.living],
        "dead": [_exited_client(contexts, inputs, memory) for contexts in _exited(state)]
        + [dict(row) for row in inputs.orphans],
        "counters": {**state.counters, **inputs.extra_counters},
    }


def _gpu(state: State, view: GpuView, inputs: StatusInputs) -> dict[str, Any]:
    gpu = view.gpu
    limits = [f"{k} {v}" for k, v in inputs.settings.get(gpu.uuid, {}).items()]
    if view.mode is ComputeMode.EXCLUSIVE_PROCESS:
        limits.append(
            "compute mode EXCLUSIVE_PROCESS: no standby domain; after a fault, new clients wait for the old"
        )
    if view.problem:
        limits.append(f"NVML does not answer: {view.problem}")
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_used_bytes": view.memory_used,
        "memory_total_bytes": gpu.memory_bytes,
        "compute_mode": view.mode.value if view.mode else None,
        "not_on_mps": _not_on_mps(state, view),
        "limits": limits,
        "protection": dict(inputs.gpu_protection.get(gpu.uuid, {})),
        "sm_exception_stall_ms": inputs.stalls.get(gpu.uuid),
    }


def own_pids(state: State) -> set[int]:
    """Return the pids of clients (running, or exited and held), servers and control daemons."""
    known = {c.id.process.pid for c in state.clients.values()}
    return known | {p.pid for d in state.domains.values() for p in (d.server, d.control) if p is not None}


def _not_on_mps(state: State, view: GpuView) -> list[dict[str, Any]]:
    """Return rows of GPU processes that are neither servers nor clients."""
    known = own_pids(state)
    rows = []
    for process in view.processes:
        if process.pid in known or process.mps:
            continue
        facts = view.other_processes.get(process.pid)
        if facts is None:
            continue
        if "nvidia-cuda-mps" in facts.command.split(" ")[0] and facts.uid in (0, os.geteuid()):
            # The server of another control daemon. Other users can give a program that name.
            continue
        rows.append(
            {
                "pid": process.pid,
                "command": facts.command,
                "uid": facts.uid,
                "user": user_name(facts.uid),
                "memory_bytes": process.memory_bytes,
                "reason": view.reasons.get(process.pid, ""),
            }
        )
    return rows


def _slot(state: State, row: Mapping[str, Any], inputs: StatusInputs) -> dict[str, Any]:
    domains = [d.id for d in state.domains.values() if d.slot == row["id"]]
    last = inputs.last_faults.of_slot(row["id"], domains, row["gpus"])
    # The newest fault in a domain of this slot, or of its GPUs, also of an earlier mpsd.
    return {**row, "fault": _fault(state, last, inputs)}


def _fault(state: State, record: Record | None, inputs: StatusInputs) -> dict[str, Any] | None:
    if record is None or not inputs.may_see(record):
        return None
    offender = offender_of(record)
    runs = offender is not None and any(c.living for c in state.spaces_of(offender))
    return fault_view(record, inputs.wall, runs=runs)


def _last_fault(domain: Domain, inputs: StatusInputs) -> int | None:
    """Return the number of the domain's last fault; it may be of an earlier mpsd."""
    record = inputs.last_faults.that_took(domain.id)
    return domain.last_fault if domain.last_fault is not None or record is None else int(record["id"])


def _role(state: State, domain: Domain) -> str:
    slot = state.slots.get(domain.slot)
    if slot is not None and slot.active == domain.id:
        return "active"
    if slot is not None and slot.second == domain.id:
        return "second"
    return "spare" if slot is not None and slot.spare == domain.id else "old"


def _domain(
    state: State, domain: Domain, inputs: StatusInputs, memory: Mapping[int, int | None]
) -> dict[str, Any]:
    exited = {c.id.process.pid for c in state.clients_of(domain.id) if not c.living and not c.follows}
    return {
        "id": domain.id,
        "slot": domain.slot,
        "gpus": list(domain.gpus),
        "uid": domain.uid,
        "user": user_name(domain.uid) if domain.uid is not None else None,
        "role": _role(state, domain),
        "state": domain.state.value,
        "server_state": domain.server_state.value,
        "control_pid": domain.control.pid if domain.control else None,
        "server_pid": domain.server.pid if domain.server else None,
        "uptime_s": _domain_age(domain, inputs),
        "clients": len({c.id.process for c in state.living_of(domain.id)}),
        # Programs that work in another domain: their standby contexts.
        "idle_contexts": len(
            {c.id.process for c in state.clients_of(domain.id) if state.is_standby_context(c)}
        ),
        "clients_limit": inputs.clients_limit,
        "last_fault": _last_fault(domain, inputs),
        "fault": _fault(state, inputs.last_faults.of_domain(domain.id), inputs),
        "path": str(inputs.layout.slot_path(domain.slot)),
        # Whether other users are kept out of its directory, so that its log may decide.
        "private": domain.private,
        "reach": _reach(state, domain, inputs.now),
        # Whether its clients have lost their work.
        "lost": work_is_lost(domain),
        "refused_807": domain.refused,
        "refused_808": domain.refused_full,
        "held_gpu_bytes": _sum(memory.get(pid) for pid in exited),
        "held_host_bytes": _sum(procs.host_memory(pid) for pid in exited),
        "problem": domain.problem,
        # Whether its log announces every client.
        "log": domain.log.value,
        "limits": dict(inputs.limits.get(domain.id, {})),
    }


def _domain_age(domain: Domain, inputs: StatusInputs) -> float:
    """Return the age of its control daemon [s], which may exceed that of this mpsd."""
    since = inputs.now - domain.since
    return round(procfs.age_s(domain.control.start_ticks) if domain.control else since, 3)


def _sum(values: Any) -> int | None:
    """Return the sum of the known values; None if there are values and none is known."""
    found = list(values)
    known = [v for v in found if v is not None]
    return sum(known) if known or not found else None


def _reach(state: State, domain: Domain, now: float) -> str:
    where = "one GPU" if len(domain.gpus) == 1 else f"{len(domain.gpus)} GPUs"
    owner = f"user {user_name(domain.uid)}" if domain.uid is not None else "all users"
    if domain.state is DomainState.POISONED:
        return f"clients of {owner} on {where}; the kernel of an exited client runs on in it"
    if failover_view.moves_programs(state, domain, now):
        return f"a fault reaches the clients of {owner} on {where} that do not fail over"
    return f"a fault reaches all clients of {owner} on {where}"


def _identity(client: Client) -> dict[str, Any]:
    return {
        "domain": client.id.domain,
        "pid": client.id.process.pid,
        "start_ticks": client.id.process.start_ticks,
        "space": client.id.space,
        "uid": client.facts.uid,
        "user": user_name(client.facts.uid),
        "command": client.facts.command,
        "state": client.state.value,
    }


def _is_lost(state: State, client: Client) -> bool:
    """Return whether the client's work is lost with its domain. A client that is moving has lost none."""
    process, domain = client.id.process, state.domains[client.id.domain]
    dead = work_is_lost(domain) or process in domain.bereft
    return dead and state.at_home(client) and not outcomes.is_moving(state, process)


def _client(
    state: State, client: Client, inputs: StatusInputs, memory: Mapping[int, int | None]
) -> dict[str, Any]:
    attached, domain = client.attached, state.domains[client.id.domain]
    tally = state.tallies.get(client.id.process)
    zones = inputs.zones.get(client.id.process)
    protections = list(inputs.protections.get(client.id, ()))
    protections += ["lease"] if client.leased else []
    protections += ["tracker"] if client.tracked else []
    return {
        **_identity(client),
        "memory_bytes": memory.get(client.id.process.pid),
        # Age of the process, which a restart of mpsd does not reset.
        "age_s": round(procfs.age_s(client.id.process.start_ticks), 3),
        "noticed_s": round(inputs.now - client.noticed, 3),
        "attach_ms": round((attached - client.noticed) * 1e3, 3) if attached is not None else None,
        "protections": protections,
        # Seconds since the outer guard was found to match the mappings.
        "guard_checked_s": inputs.guard_checked.get(client.id),
        "proxied": client.id.process in inputs.vault,
        "vault_bytes": inputs.vault.get(client.id.process, 0),
        "guard_zones": None if zones is None else dict(zones),
        "failover": failover_view.client_view(state, client),
        "protected": _protected(state, client, inputs),
        "guard_hits": tally.count if tally is not None else 0,
        "zone_policy": (client.zone_policy or state.policy.zone_policy).value,
        "zone_policy_set": client.zone_policy is not None,
        "frozen": client.frozen is not None,
        "problem": "; ".join(p for p in (client.problem, UNSTORED if client.unstored else "") if p),
        "proof": sorted(proofs(domain, client)),
        # Whether its GPU work is lost: it must be restarted.
        "lost": _is_lost(state, client),
    }


def _protected(state: State, client: Client, inputs: StatusInputs) -> Mapping[str, Any]:
    node = inputs.level_of(state.domains[client.id.domain].gpus, client.facts.uid)
    process = client.id.process
    gpus = {view.gpu.uuid: view.gpu.index for view in inputs.gpus}
    known = protectionview.knowledge(process, node, inputs.vault, inputs.zones, inputs.starts, gpus)
    return protectionview.client_view(state, client, known, inputs.now)


def _exited(state: State) -> list[list[Client]]:
    """Return the contexts of each end of a process, those of its home first."""
    found: dict[tuple[ProcessInstance, float | None], list[Client]] = {}
    for client in state.clients.values():
        if not client.living:
            found.setdefault((client.id.process, client.died), []).append(client)
    return [sorted(contexts, key=lambda c: c.follows) for contexts in found.values()]


def _exited_client(
    contexts: Sequence[Client], inputs: StatusInputs, memory: Mapping[int, int | None]
) -> dict[str, Any]:
    client = contexts[0]
    return {
        **_identity(client),
        # All domains in which its leases are held; `domain` is its home.
        "domains": list(dict.fromkeys(c.id.domain for c in contexts)),
        "held_gpu_bytes": memory.get(client.id.process.pid),
        "held_host_bytes": procs.host_memory(client.id.process.pid),
        "since_s": round(inputs.now - (client.died or inputs.now), 3),
        "pending": inputs.pending.get(client.id.process, ""),
        # mpsd cannot see the end of its work.
        "blind": client.blind,
    }
