"""The operations that answer requests.

The listener checks rights by the table of operations. Rights that depend on the owner of a client are
checked here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from difflib import get_close_matches
from functools import partial
from typing import Any

from mpsd import __version__
from mpsd.api import failoverview as failover_view
from mpsd.api import limitsview
from mpsd.api.doctor import KERNEL_LOG, condition_checks, library_checks, run_checks
from mpsd.api.node import Node
from mpsd.api.privacy import owners, visible_to
from mpsd.api.statusview import StatusInputs, status
from mpsd.api.vaultoperations import VaultOperations, require_vault
from mpsd.base import audit
from mpsd.base.errors import (
    AmbiguousError,
    DeadlineError,
    MpsdError,
    NotFoundError,
    NotReadyError,
    RefusedError,
    StoreError,
    UsageError,
)
from mpsd.base.model import Gpu, Liveness, ProcessInstance, ZonePolicy
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.clients.starts import Start, Starts
from mpsd.config.schema import BackendName
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.failover import budgets
from mpsd.core.failover import reports as mev
from mpsd.core.faults import taxonomy
from mpsd.core.proof import grounds
from mpsd.core.state import Client, DomainState, State
from mpsd.core.victims import work_is_lost
from mpsd.os import processes
from mpsd.peers import Peer
from mpsd.peers.credentials import requester
from mpsd.wire.messages import Request

Reply = Mapping[str, Any]
Operation = Callable[[Peer, Mapping[str, Any]], Awaitable[Reply]]
KILL_ANSWER_S = 15.0
USER_LOCKS = 64
STATUS_CACHE_S = 0.02


class Operations:
    def __init__(self, daemon: Node) -> None:
        self._daemon = daemon
        # Requests take at most two of the few threads: leases are closed and guards laid in them too.
        self._slow = asyncio.Semaphore(2)
        # Many requests of one unprivileged user are answered one at a time, between those of other users.
        self._turns = [asyncio.Lock() for _ in range(USER_LOCKS)]
        self._starts = Starts()
        self._statuses: dict[int, tuple[float, State, Reply]] = {}
        self._table: Mapping[str, Operation] = {
            "status": self._status,
            "holders": self._holders,
            "gpus": self._gpus,
            "faults": self._faults,
            "failovers": self._failovers,
            "explain": self._explain,
            "kill": self._kill,
            "env": self._env,
            "doctor": self._doctor,
            "drain": self._drain,
            "undrain": self._undrain,
            "version": self._version,
            "zone_policy": self._zone_policy,
            "protect": self._protect,
            "vault_list": lambda peer, args: VaultOperations(daemon.vault).list(peer),
            "vault_keep": lambda peer, args: VaultOperations(daemon.vault).keep(peer, args),
            "vault_free": lambda peer, args: VaultOperations(daemon.vault).free(peer, args),
        }

    async def handle(self, peer: Peer, request: Request) -> Reply:
        """Return the result of a request. Raise MpsdError, which the listener turns into an error reply."""
        operation = self._table.get(request.op)
        if operation is None:
            raise UsageError(
                f"this daemon does not know {request.op!r}", remedy="use mpsd and mpsd-ctl of one release"
            )
        return await operation(peer, request.args)

    @contextlib.asynccontextmanager
    async def _admission(self, peer: Peer) -> AsyncIterator[None]:
        """Admit one answer per user for each turn of the event loop; administrators do not wait."""
        if peer.admin:
            yield
            return
        async with self._turns[peer.uid % USER_LOCKS]:
            await asyncio.sleep(0)
            yield

    async def _status(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        async with self._admission(peer):
            now, state = self._daemon.now(), self._daemon.runtime.state
            at, of, kept = self._statuses.get(peer.uid, (0.0, None, {}))
            if not peer.admin and of is state and now - at < STATUS_CACHE_S:
                return kept
            answer = await self._fresh_status(peer)
            if not peer.admin:
                if len(self._statuses) >= USER_LOCKS:
                    self._statuses.clear()
                self._statuses[peer.uid] = (now, state, answer)
            return answer

    async def _fresh_status(self, peer: Peer) -> Reply:
        daemon = self._daemon
        views = await daemon.gpu_views()
        starts = await self._starts.of(daemon.runtime.state.clients.values())
        daemon.saving.shown()
        inputs = StatusInputs(
            backend=daemon.backend.name,
            pid=daemon.pid,
            uptime_s=daemon.uptime_s(),
            now=daemon.now(),
            gpus=views,
            layout=daemon.layout,
            protections=daemon.protections(),
            guard_checked=daemon.guard_checked(),
            settings=limitsview.of_gpus(daemon.runtime.state, daemon.limits, daemon.gpus),
            limits=limitsview.of_domains(daemon.runtime.state, daemon.limits),
            clients_limit=daemon.config.limits.clients,
            conditions=daemon.conditions(),
            pending=daemon.pending_work(),
            extra_counters=daemon.extra_counters(),
            orphans=daemon.orphan_rows(),
            last_faults=daemon.bulletin.last_faults,
            wall=time.time(),
            may_see=lambda record: peer.admin or peer.may_see(owners(record)),
            vault=daemon.vault.shown(),
            zones=daemon.guard_zones(),
            failover=daemon.failover.shown(),
            starts=starts,
            level_of=daemon.protection.of,
            isolation=daemon.isolation.shown(),
            protection=daemon.protection.view(),
            gpu_protection=daemon.protection.views(),
            stalls=daemon.protection.stalls(daemon.runtime.state),
        )
        answer: Reply = visible_to(peer, status(daemon.runtime.state, inputs))
        return answer

    async def _holders(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        async with self._admission(peer):
            rows = self._daemon.holders()
            return {"holders": [row for row in rows if peer.admin or row["uid"] == peer.uid]}

    async def _gpus(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        return {"gpus": [{"index": g.index, "uuid": g.uuid, "name": g.name} for g in self._daemon.gpus]}

    async def _faults(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        since, limit = int(args.get("since_id") or 0), int(args.get("limit") or 100)
        async with self._admission(peer):
            records = [r for r in self._daemon.bulletin.journal.records() if r["id"] > since]
            seen = [r for r in records if peer.admin or peer.may_see(owners(r))]
            return {"faults": [visible_to(peer, r) for r in (seen[-limit:] if limit else seen)]}

    async def _failovers(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        since, limit = int(args.get("since_id") or 0), int(args.get("limit") or 100)
        journal = self._daemon.bulletin.failovers
        async with self._admission(peer):
            records = [r for r in (journal.records() if journal else []) if r["id"] > since]
            seen = [r for r in records if peer.admin or peer.uid in {c["uid"] for c in r["clients"]}]
            return {"failovers": [visible_to(peer, r) for r in seen[-limit:]]}

    async def _explain(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        return {"text": taxonomy.explain(str(args["class"]))}

    async def _version(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        devices = self._daemon.backend.devices
        async with self._slow:
            driver = await asyncio.to_thread(devices.driver_version)
        return {"version": __version__, "backend": self._daemon.backend.name, "driver": driver}

    async def _doctor(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        daemon = self._daemon
        simulated = daemon.backend.name == BackendName.SIMULATED
        ask = partial(
            run_checks,
            daemon.backend.checks,
            str(daemon.layout.run_dir),
            str(daemon.layout.log_dir),
            pipe_dirs=[str(daemon.layout.pipe_dir(name)) for name in daemon.runtime.state.domains],
            # A simulated node has its own kernel log and serves an ordinary user.
            kernel_log=None if simulated else KERNEL_LOG,
            privileged=not simulated,
            private=daemon.config.domains.private,
            gpus={str(g.index): partial(daemon.backend.devices.memory_used, g.uuid) for g in daemon.gpus},
            ways=self._ways(),
            still_open=self._still_open(),
        )
        async with self._slow:
            isolation = await asyncio.to_thread(daemon.isolation.check)
            checks = [*await asyncio.to_thread(ask), isolation]
            checks += [await asyncio.to_thread(daemon.failover.check), daemon.percentages.check()]
            checks += condition_checks(daemon.conditions())
            checks += library_checks(await self._libraries(peer))
            levels = daemon.protection
            checks = [*levels.checks(), *levels.stall_checks(daemon.runtime.state), *checks]
        rows = [{"name": c.name, "ok": c.ok, "finding": c.finding, "remedy": c.remedy} for c in checks]
        return {"checks": rows}

    async def _libraries(self, peer: Peer) -> Mapping[int, Start]:
        """Return the libcudas of the clients that this peer may see, by pid."""
        clients = [c for c in self._daemon.runtime.state.clients.values() if peer.may_see([c.facts.uid])]
        return {process.pid: start for process, start in (await self._starts.now(clients)).items()}

    def _still_open(self) -> list[str]:
        """Return the users' domains that other users can enter."""
        domains = self._daemon.runtime.state.domains.values()
        return [d.id for d in domains if d.uid is not None and d.control is not None and not d.private]

    def _ways(self) -> dict[str, tuple[int | None, str]]:
        """Return the user and the pipe directory of each domain that has started, as clients use them."""
        state, layout = self._daemon.runtime.state, self._daemon.layout
        found: dict[str, tuple[int | None, str]] = {}
        for domain in state.domains.values():
            leads = state.slots[domain.slot].active == domain.id
            path = layout.slot_path(domain.slot) if leads else layout.pipe_dir(domain.id)
            if domain.state in (DomainState.WARM, DomainState.ACTIVE, DomainState.FULL, DomainState.RETIRED):
                found[domain.id] = domain.uid, str(path)
        return found

    def _client(self, peer: Peer, operation: str, pid: int, start_ticks: int | None) -> Client:
        """Return a client of the peer; for an administrator any. Raise NotFoundError, AmbiguousError."""
        found = [
            c for c in self._daemon.runtime.state.clients.values() if c.living and c.id.process.pid == pid
        ]
        if not peer.admin and not (found and _belongs_to(found[0].id.process, peer.uid)):
            # The same text for another user's client and for a pid that is no client: both are private.
            if found:
                what = f"process {pid} belongs to another user"
                audit.refusals.refuse(peer.uid, operation, partial(requester, peer), what)
            raise NotFoundError(
                f"process {pid} is not a client of yours",
                remedy="mpsd-ctl status lists your clients; root and the mpsd group may evict any client",
            )
        if not found:
            raise NotFoundError(
                f"process {pid} is not a client of any domain", remedy="mpsd-ctl status lists the clients"
            )
        if start_ticks is not None and found[0].id.process.start_ticks != start_ticks:
            raise AmbiguousError(
                f"process {pid} is another process now: the pid was used again",
                remedy="look up the pid with mpsd-ctl status",
            )
        return found[0]

    async def _kill(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        client = self._client(peer, "kill", int(args["pid"]), args.get("start_ticks"))
        if grounds(self._daemon.runtime.state, client.id.process, asked=True) is None:
            await self._daemon.list_clients(client.id.domain)
        liveness = processes.liveness(client.id.process)
        if args.get("dry_run"):
            return {"steps": self._planned(client, liveness), "outcome": "dry-run", "evict_ms": None}
        request, future = self._daemon.bulletin.expect()
        reason = str(args.get("reason") or f"requested by uid {peer.uid}")
        owner = None if peer.admin else peer.uid
        self._daemon.runtime.post(
            ev.EvictRequested(client.id.process, liveness, request, reason, owner, requester(peer))
        )
        ok, data = await self._daemon.bulletin.answered(request, future, KILL_ANSWER_S)
        if not ok:
            raise _evict_error(str(data.get("code")), str(data.get("message")))
        return dict(data)

    async def _zone_policy(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        client = self._client(peer, "zone_policy", int(args["pid"]), args.get("start_ticks"))
        wanted = str(args["policy"])
        if wanted not in set(ZonePolicy):
            raise UsageError(f"{wanted!r} is not a policy", remedy=f"one of: {', '.join(ZonePolicy)}")
        # Without the vault no client has guard zones, and a policy would have no effect.
        require_vault(self._daemon.vault)
        daemon, process = self._daemon, client.id.process
        daemon.runtime.post(ev.ZonePolicySet(process, ZonePolicy(wanted)))
        audit.record(
            "policy",
            wanted,
            requester(peer),
            pid=process.pid,
            start_ticks=process.start_ticks,
            uid=client.facts.uid,
            domain=client.id.domain,
        )
        self._require_saved()
        return {"pid": process.pid, "start_ticks": process.start_ticks, "policy": wanted}

    def _require_saved(self) -> None:
        if problem := self._daemon.saving.pending():
            raise StoreError(
                f"the change is in force, but a restart of mpsd would lose it: {problem}",
                remedy="free disk space there, and repeat the command",
            )

    async def _protect(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        """Switch the fail-over of a program off while it runs."""
        client = self._client(peer, "protect", int(args["pid"]), args.get("start_ticks"))
        daemon, process = self._daemon, client.id.process
        failover_view.require_switchable(daemon.runtime.state, process, str(args["level"]))
        steps = failover_view.switch_steps(daemon.runtime.state.members[process])
        dry_run = bool(args.get("dry_run"))
        if not dry_run:
            daemon.runtime.post(mev.MemberSwitchedOff(process))
            audit.record(
                "protect",
                "guard",
                requester(peer),
                pid=process.pid,
                start_ticks=process.start_ticks,
                uid=client.facts.uid,
                domain=client.id.domain,
                reason=str(args.get("reason") or ""),
            )
            self._require_saved()
        row = {"pid": process.pid, "start_ticks": process.start_ticks, "level": "guard"}
        return {**row, "dry_run": dry_run, "steps": steps}

    def _planned(self, client: Client, liveness: Liveness) -> list[str]:
        state = self._daemon.runtime.state
        domain = state.domains[client.id.domain]
        if grounds(state, client.id.process, asked=True) is None:
            return ["nothing: only a log line says that it is a client, which is no proof"]
        steps = ["hold its lease" if client.leased else "no lease: its kernels may harm other clients"]
        faulted = domain.state in (DomainState.FAULTED, DomainState.HEADLESS) or domain.server is None
        if client.frozen is not None:
            steps.append("no terminate_client: mpsd has stopped the client (freeze)")
        elif faulted or liveness is not Liveness.RUNNING:
            steps.append(f"no terminate_client: domain {domain.state.value}, client {liveness.value}")
        else:
            deadline = self._daemon.policy.terminate_deadline_s * 1e3
            steps.append(f"terminate_client with a deadline of {deadline:g} ms")
        return [
            *steps,
            f"SIGKILL process {client.id.process.pid}",
            "release the lease after its kernels have ended",
        ]

    async def _env(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        refused = self._daemon.refusal(args.get("gpu"))
        if refused is not None:
            # An error reply: a client of an earlier release would take any result for leave to start.
            raise RefusedError(refused.text, remedy=refused.remedy)
        path = await self._daemon.path_for(
            peer.uid, args.get("gpu"), shared=bool(args.get("shared")), admin=peer.admin
        )
        domain = self._daemon.layout.domain_of_slot(os.path.basename(path))
        if args.get("standby"):
            domain = self._standby(os.path.basename(path))
            path = str(self._daemon.layout.pipe_dir(domain))
        gpus = self._gpus_of(domain)
        numbers = {gpu.uuid: gpu.index for gpu in self._daemon.gpus}
        asked = args.get("gpu")
        first = self._daemon.gpu_named(asked).uuid if asked else next(iter(gpus), "")
        return {
            "env": {"CUDA_MPS_PIPE_DIRECTORY": path, **self._visible(gpus, args.get("gpu"))},
            "domain": domain,
            "gpus": gpus,
            "numbers": [numbers.get(uuid) for uuid in gpus],
            "gpu_index": numbers.get(first),
            "directory": None if domain is None else str(self._daemon.layout.pipe_dir(domain)),
            "lost": self._is_lost(domain),
            "backend": self._daemon.backend.name,
            **self._protection_of(peer.uid, gpus, domain),
            "percentages": self._percentages(domain),
        }

    def _protection_of(self, uid: int, gpus: Sequence[str], domain: str | None) -> Mapping[str, Any]:
        """Return the level of a program that this user starts now, and the sockets that its level has.

        The sockets follow the allowed level: an obstacle can end while the program runs.
        """
        daemon, protection = self._daemon, self._daemon.protection
        now = self._within_budgets(protection.of(gpus, uid), uid, domain)
        vault = protection.allows(ProtectionLevel.GUARD, gpus, uid)
        failover = protection.allows(ProtectionLevel.FAILOVER, gpus, uid)
        return {
            "protection": {"level": now.level.value, "why": now.why, "remedy": now.remedy},
            "vault": daemon.vault.offered_at if vault else "",
            "failover": daemon.failover.offered_at if failover else "",
        }

    def _within_budgets(self, now: Protection, uid: int, name: str | None) -> Protection:
        """Return the level that a further client of this domain gets with the budgets of fail-over."""
        state = self._daemon.runtime.state
        domain = state.domains.get(name or "")
        if domain is None or now.level is not ProtectionLevel.FAILOVER:
            return now
        account = state.slots[domain.slot].accountable
        gpu, why = budgets.obstacle(state, domain.gpus, uid if account is None else account)
        if not gpu:
            return now
        index = next((g.index for g in self._daemon.gpus if g.uuid == gpu), gpu)
        remedy = "it fails over as soon as other clients end (mpsd-ctl status)"
        return Protection(ProtectionLevel.GUARD, f"GPU {index} {why}", remedy)

    def _percentages(self, domain: str | None) -> Reply | None:
        known = self._daemon.runtime.state.domains.get(domain or "")
        if known is None:
            return None
        return self._daemon.percentages.offer(known, self._daemon.percentage_limit)

    def _gpus_of(self, domain: str | None) -> list[str]:
        known = self._daemon.runtime.state.domains.get(domain or "")
        return list(known.gpus) if known is not None else []

    def _visible(self, gpus: Sequence[str], asked: str | None) -> Mapping[str, str]:
        """Return CUDA_VISIBLE_DEVICES if the node has more GPUs than the domain, the asked GPU first.

        PyTorch counts GPUs by NVML, which ignores domains, and fails if CUDA then has fewer.
        """
        others = {gpu.uuid for gpu in self._daemon.gpus} - {*gpus}
        if not gpus or not others:
            return {}
        first = None if asked is None else self._daemon.gpu_named(asked).uuid
        return {"CUDA_VISIBLE_DEVICES": ",".join(sorted(gpus, key=lambda uuid: uuid != first))}

    def _is_lost(self, domain: str | None) -> bool:
        """Return whether new clients fail there until the slot changes or the server has recovered."""
        known = self._daemon.runtime.state.domains.get(domain or "")
        return known is not None and work_is_lost(known)

    def _standby(self, slot: str) -> str:
        """Return the standby domain that would take over now. Raise NotReadyError."""
        state = self._daemon.runtime.state
        found = state.slots.get(slot)
        standby = found.spare if found is not None else None
        if standby is not None and state.domains[standby].state is DomainState.WARM:
            return standby
        if found is not None and found.exclusive:
            why = "compute mode EXCLUSIVE_PROCESS allows one server; nvidia-smi -c DEFAULT allows more"
        elif not state.policy.spare:
            why = "set [domains] spare = true in mpsd's configuration"
        elif state.policy.on_demand and (found is None or not slots.has_server(state, found)):
            why = "it starts with the first client of the slot: repeat the command then"
        else:
            why = "it is starting: repeat the command in a moment"
        raise NotReadyError("there is no standby domain", remedy=why)

    async def _drain(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        return self._set_drain(peer, args, on=True)

    async def _undrain(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        return self._set_drain(peer, args, on=False)

    def _set_drain(self, peer: Peer, args: Mapping[str, Any], *, on: bool) -> Reply:
        daemon = self._daemon
        gpus = (daemon.gpu_named(str(args["gpu"])).uuid,) if args.get("gpu") else ()
        shown = list(gpus) or [g.uuid for g in daemon.gpus]
        present = [g.uuid for g in daemon.gpus]
        before = daemon.runtime.state.drained
        already = {uuid for uuid in present if before & {"*", uuid}}
        if not args.get("dry_run"):
            for event in drain_requests(before, gpus, present, on=on):
                daemon.runtime.post(event)
            audit.record("setting", "drained" if on else "undrained", requester(peer), gpus=shown)
            self._require_saved()
        staying = [
            c.id.process.pid
            for c in daemon.runtime.state.clients.values()
            if c.living and set(daemon.runtime.state.domains[c.id.domain].gpus) & set(shown)
        ]
        return {
            "gpus": shown,
            "draining": on,
            "dry_run": bool(args.get("dry_run")),
            "changed": bool(set(shown) - already if on else already & set(shown)),
            "clients": sorted(set(staying)),
        }


def drain_requests(
    drained: Set[str], gpus: Sequence[str], present: Sequence[str], *, on: bool
) -> list[ev.DrainRequested]:
    """Return the events that drain or undrain these GPUs; none means every GPU.

    If every GPU is drained in one and some are undrained, the others are named, so that they stay drained.
    """
    others = [uuid for uuid in present if uuid not in gpus]
    if on or not gpus or "*" not in drained:
        return [ev.DrainRequested(tuple(gpus), on)]
    stay = [ev.DrainRequested(tuple(others), on=True)] if others else []
    return [ev.DrainRequested((), on=False), *stay]


def _belongs_to(process: ProcessInstance, uid: int) -> bool:
    """Return whether a process belongs to a user now: exec and setuid(2) may have changed its owner."""
    try:
        return processes.users(process).all_are(uid)
    except NotFoundError:
        return False


def _evict_error(code: str, message: str) -> MpsdError:
    if code == "deadline":
        return DeadlineError(
            message, remedy="look at its state in ps: D means that it is blocked in the kernel"
        )
    if code == "unproven":
        remedy = "its server does not list it and it has no lease; to end it anyway, use kill(1)"
        return AmbiguousError(message, remedy=remedy)
    return AmbiguousError(message) if code == "busy" else NotFoundError(message)


def find_gpu(gpus: tuple[Gpu, ...], name: str) -> Gpu:
    """Return a GPU by index, UUID or unique prefix of its UUID. Raise NotFoundError."""
    found = [g for g in gpus if name in (str(g.index), g.uuid)] or [
        g for g in gpus if g.uuid.startswith(name)
    ]
    if len(found) != 1:
        known = ", ".join(f"{g.index}: {g.uuid}" for g in gpus)
        if found:
            raise NotFoundError(f"several GPUs begin with {name!r}", remedy=f"GPUs of this machine: {known}")
        near = get_close_matches(name, [g.uuid for g in gpus], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise NotFoundError(f"there is no GPU {name!r}", remedy=f"{hint}GPUs of this machine: {known}")
    return found[0]
