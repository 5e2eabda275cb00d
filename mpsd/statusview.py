"""The `status` answer (schema 1): the daemon's state joined with what NVML and /proc say now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpsd import __version__, procs
from mpsd.core.proof import proofs
from mpsd.core.state import Client, Domain, DomainState, State
from mpsd.core.victims import work_is_lost
from mpsd.errors import MpsdError
from mpsd.failover import view as failover_view
from mpsd.gpu.base import DeviceManager
from mpsd.layout import Layout
from mpsd.linux import procfs
from mpsd.model import ClientId, ComputeMode, Gpu, GpuProcess, ProcessFacts, ProcessInstance
from mpsd.usernames import user_name

SCHEMA = 1
UNSTORED = "the lease is not in the descriptor store: it ends with mpsd"


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU as NVML shows it at one moment; `problem` where it could not be asked.

    `strangers`: those of its processes that were not known as ours, described.
    """

    gpu: Gpu
    memory_used: int | None = None
    mode: ComputeMode | None = None
    processes: Sequence[GpuProcess] = ()
    strangers: Mapping[int, ProcessFacts] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a status needs besides the state."""

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
    problems: Sequence[str] = ()
    pending: Mapping[ProcessInstance, str] = field(default_factory=dict)
    extra_counters: Mapping[str, int] = field(default_factory=dict)
    orphans: Sequence[Mapping[str, Any]] = ()
    # Zones of each process that brought a ledger.
    zones: Mapping[ProcessInstance, Mapping[str, Any]] = field(default_factory=dict)
    # Bytes in the vault of each process that is proxied.
    vault: Mapping[ProcessInstance, int] = field(default_factory=dict)
    failover: Mapping[str, Any] = field(default_factory=dict)
    isolation: Mapping[str, Any] = field(default_factory=dict)


def look_at_gpus(devices: DeviceManager, gpus: Sequence[Gpu]) -> list[GpuView]:
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


def status(state: State, around: Surroundings) -> dict[str, Any]:
    memory = {p.pid: p.memory_bytes for view in around.gpus for p in view.processes}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "backend": around.backend,
        "pid": around.pid,
        "uptime_s": round(around.uptime_s, 3),
        "draining": bool(state.drained),
        "drained_gpus": sorted(v.gpu.uuid for v in around.gpus if state.drained & {"*", v.gpu.uuid}),
        "problems": list(around.problems),
        "kernel_isolation": dict(around.isolation),
        "gpus": [_gpu(state, view, around) for view in around.gpus],
        "failover": dict(around.failover),
        "slots": failover_view.slot_rows(state, around.now),
        "domains": [_domain(state, d, around, memory) for d in state.domains.values()],
        "clients": [_client(state, c, around, memory) for c in state.clients.values() if c.living],
        "dead": [_dead(c, around, memory) for c in state.clients.values() if not c.living]
        + [dict(row) for row in around.orphans],
        "counters": {**state.counters, **around.extra_counters},
    }


def _gpu(state: State, view: GpuView, around: Surroundings) -> dict[str, Any]:
    gpu = view.gpu
    limits = [f"{k} {v}" for k, v in around.settings.get(gpu.uuid, {}).items()]
    if view.mode is ComputeMode.EXCLUSIVE_PROCESS:
        limits.append(
            "compute mode EXCLUSIVE_PROCESS: no spare domain; after a fault, newcomers wait for the old"
        )
    if view.problem:
        limits.append(f"not readable: {view.problem}")
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_used_bytes": view.memory_used,
        "memory_total_bytes": gpu.memory_bytes,
        "compute_mode": view.mode.value if view.mode else None,
        "not_on_mps": _not_on_mps(state, view),
        "limits": limits,
    }


def own_pids(state: State) -> set[int]:
    """Our clients, living or held, servers and control daemons."""
    known = {c.id.process.pid for c in state.clients.values()}
    return known | {p.pid for d in state.domains.values() for p in (d.server, d.control) if p is not None}


def _not_on_mps(state: State, view: GpuView) -> list[dict[str, Any]]:
    """GPU processes that are neither servers nor clients of ours, living or held."""
    known = own_pids(state)
    rows = []
    for process in view.processes:
        if process.pid in known or process.mps:
            continue
        facts = view.strangers.get(process.pid)
        if facts is None:
            continue
        if "nvidia-cuda-mps" in facts.command.split(" ")[0]:
            continue
        rows.append(
            {
                "pid": process.pid,
                "command": facts.command,
                "uid": facts.uid,
                "user": user_name(facts.uid),
                "memory_bytes": process.memory_bytes,
            }
        )
    return rows


def _role(state: State, domain: Domain) -> str:
    slot = state.slots.get(domain.slot)
    if slot is not None and slot.active == domain.id:
        return "active"
    return "spare" if slot is not None and slot.spare == domain.id else "old"


def _domain(
    state: State, domain: Domain, around: Surroundings, memory: Mapping[int, int | None]
) -> dict[str, Any]:
    dead = [c for c in state.clients_of(domain.id) if not c.living]
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
        "uptime_s": _domain_age(domain, around),
        "clients": len({c.id.process for c in state.living_of(domain.id)}),
        # Contexts of programs whose work runs elsewhere.
        "idle_contexts": len({c.id.process for c in state.clients_of(domain.id) if state.is_in_waiting(c)}),
        "clients_limit": around.clients_limit,
        "last_fault": domain.last_fault,
        "path": str(around.layout.slot_path(domain.slot)),
        "reach": _reach(domain),
        # Whether the work of whoever lives in it is.
        "lost": work_is_lost(domain),
        "refused_807": domain.refused,
        "held_gpu_bytes": _sum(memory.get(c.id.process.pid) for c in dead),
        "held_host_bytes": _sum(procs.host_memory(c.id.process.pid) for c in dead),
        "problem": domain.problem,
    }


def _domain_age(domain: Domain, around: Surroundings) -> float:
    """Since its control daemon was started, which may have been before this mpsd was."""
    since = around.now - domain.since
    return round(procfs.age_s(domain.control.start_ticks) if domain.control else since, 3)


def _sum(values: Any) -> int | None:
    """A total of what is known; None where something is held and nothing about it is known."""
    found = list(values)
    known = [v for v in found if v is not None]
    return sum(known) if known or not found else None


def _reach(domain: Domain) -> str:
    where = "one GPU" if len(domain.gpus) == 1 else f"{len(domain.gpus)} GPUs"
    whose = f"user {user_name(domain.uid)}" if domain.uid is not None else "all users"
    if domain.state is DomainState.POISONED:
        return f"clients of {whose} on {where}; a dead client's kernel runs on in it"
    return f"a fault here takes the clients of {whose} on {where}"


def _who(client: Client) -> dict[str, Any]:
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


def _client(
    state: State, client: Client, around: Surroundings, memory: Mapping[int, int | None]
) -> dict[str, Any]:
    attached, domain = client.attached, state.domains[client.id.domain]
    tally = state.tallies.get(client.id.process)
    zones = around.zones.get(client.id.process)
    protections = list(around.protections.get(client.id, ()))
    protections += ["lease"] if client.leased else []
    protections += ["tracker"] if client.tracked else []
    return {
        **_who(client),
        "memory_bytes": memory.get(client.id.process.pid),
        # Of the process: a restart of mpsd does not make it younger.
        "age_s": round(procfs.age_s(client.id.process.start_ticks), 3),
        "noticed_s": round(around.now - client.noticed, 3),
        "attach_ms": round((attached - client.noticed) * 1e3, 3) if attached is not None else None,
        "protections": protections,
        # Since the guard's ranges were found to fit the mappings, seconds.
        "guard_checked_s": around.guard_checked.get(client.id),
        "proxied": client.id.process in around.vault,
        "vault_bytes": around.vault.get(client.id.process, 0),
        "guard_zones": None if zones is None else dict(zones),
        "failover": failover_view.of_client(state, client),
        "guard_hits": tally.count if tally is not None else 0,
        "zone_policy": (client.zone_policy or state.policy.zone_policy).value,
        "zone_policy_set": client.zone_policy is not None,
        "frozen": client.frozen is not None,
        "problem": "; ".join(p for p in (client.problem, UNSTORED if client.unstored else "") if p),
        "proof": sorted(proofs(domain, client)),
    }


def _dead(client: Client, around: Surroundings, memory: Mapping[int, int | None]) -> dict[str, Any]:
    return {
        **_who(client),
        "held_gpu_bytes": memory.get(client.id.process.pid),
        "held_host_bytes": procs.host_memory(client.id.process.pid),
        "since_s": round(around.now - (client.died or around.now), 3),
        "pending": around.pending.get(client.id.process, ""),
        # Nobody sees the end of its work.
        "blind": client.blind,
    }
