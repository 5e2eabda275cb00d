"""What each request means. Rights that depend on the table are checked by the listener; rights that depend
on whose client it is, here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpsd import __version__, procs
from mpsd.config import BackendName
from mpsd.core import events as ev
from mpsd.core import taxonomy
from mpsd.core.proof import grounds
from mpsd.core.state import Client, DomainState, State
from mpsd.core.victims import work_is_lost
from mpsd.doctor import KERNEL_LOG, run_checks
from mpsd.errors import (
    AmbiguousError,
    DeadlineError,
    MpsdError,
    NotFoundError,
    NotReadyError,
    StoreError,
    UsageError,
)
from mpsd.gpu.base import Check
from mpsd.listener import Peer
from mpsd.model import Gpu, Liveness, ProcessInstance, ZonePolicy
from mpsd.privacy import owners, shown_to
from mpsd.statusview import Surroundings, status
from mpsd.vault.desk import Desk, must_be_open
from mpsd.wire.messages import Request

if TYPE_CHECKING:
    from mpsd.daemon import Daemon

Reply = Mapping[str, Any]
Operation = Callable[[Peer, Mapping[str, Any]], Awaitable[Reply]]
KILL_ANSWER_S = 15.0
TURNS = 64
STATUS_KEPT_S = 0.02


class Operations:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        # Threads are few, and leases are closed and guards laid in them: requests take two at most.
        self._slow = asyncio.Semaphore(2)
        # What an unprivileged user asks in heaps is made one by one, with all others' in between.
        self._turns = [asyncio.Lock() for _ in range(TURNS)]
        self._statuses: dict[int, tuple[float, State, Reply]] = {}
        self._table: Mapping[str, Operation] = {
            "status": self._status,
            "holders": self._holders,
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
            "vault_list": lambda peer, args: Desk(daemon.vault).list(peer),
            "vault_keep": lambda peer, args: Desk(daemon.vault).keep(peer, args),
            "vault_free": lambda peer, args: Desk(daemon.vault).free(peer, args),
        }

    async def handle(self, peer: Peer, request: Request) -> Reply:
        """The result of a request. Raises MpsdError, which the listener turns into an error reply."""
        operation = self._table.get(request.op)
        if operation is None:
            raise UsageError(
                f"this daemon does not know {request.op!r}", remedy="is mpsd-ctl newer than mpsd?"
            )
        return await operation(peer, request.args)

    @contextlib.asynccontextmanager
    async def _turn(self, peer: Peer) -> AsyncIterator[None]:
        """One answer of a user for each turn of the loop; administrators do not wait."""
        if peer.admin:
            yield
            return
        async with self._turns[peer.uid % TURNS]:
            await asyncio.sleep(0)
            yield

    async def _status(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        async with self._turn(peer):
            now, state = self._daemon.now(), self._daemon.runtime.state
            at, of, kept = self._statuses.get(peer.uid, (0.0, None, {}))
            if not peer.admin and of is state and now - at < STATUS_KEPT_S:
                return kept
            answer = await self._fresh_status(peer)
            if not peer.admin:
                if len(self._statuses) >= TURNS:
                    self._statuses.clear()
                self._statuses[peer.uid] = (now, state, answer)
            return answer

    async def _fresh_status(self, peer: Peer) -> Reply:
        daemon = self._daemon
        views = await daemon.gpu_views()
        daemon.saving.shown()
        around = Surroundings(
            backend=daemon.backend.name,
            pid=daemon.pid,
            uptime_s=daemon.uptime_s(),
            now=daemon.now(),
            gpus=views,
            layout=daemon.layout,
            protections=daemon.protections(),
            guard_checked=daemon.guard_checked(),
            settings={gpu.uuid: daemon.settings.limit_of(gpu.uuid) for gpu in daemon.gpus},
            clients_limit=daemon.config.limits.clients,
            problems=daemon.problems(),
            pending=daemon.pending_work(),
            extra_counters=daemon.extra_counters(),
            orphans=daemon.orphan_rows(),
            vault=daemon.vault.shown(),
            zones=daemon.guard_zones(),
            failover=daemon.failover.shown(),
            isolation=daemon.isolation.shown(),
        )
        answer: Reply = shown_to(peer, status(daemon.runtime.state, around))
        return answer

    async def _holders(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        async with self._turn(peer):
            rows = self._daemon.holders()
            return {"holders": [row for row in rows if peer.admin or row["uid"] == peer.uid]}

    async def _faults(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        since, limit = int(args.get("since_id") or 0), int(args.get("limit") or 100)
        async with self._turn(peer):
            records = [r for r in self._daemon.bulletin.journal.records() if r["id"] > since]
            seen = [r for r in records if peer.admin or peer.may_see(owners(r))]
            return {"faults": [shown_to(peer, r) for r in (seen[-limit:] if limit else seen)]}

    async def _failovers(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        since, limit = int(args.get("since_id") or 0), int(args.get("limit") or 100)
        journal = self._daemon.bulletin.failovers
        async with self._turn(peer):
            records = [r for r in (journal.records() if journal else []) if r["id"] > since]
            seen = [r for r in records if peer.admin or peer.uid in {c["uid"] for c in r["clients"]}]
            return {"failovers": [shown_to(peer, r) for r in seen[-limit:]]}

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
            # A simulated node brings a kernel log of its own and serves an ordinary user.
            kernel_log=None if simulated else KERNEL_LOG,
            privileged=not simulated,
            gpus={g.uuid: partial(daemon.backend.devices.memory_used, g.uuid) for g in daemon.gpus},
        )
        async with self._slow:
            isolation = await asyncio.to_thread(daemon.isolation.check)
            checks = [*await asyncio.to_thread(ask), isolation]
            checks += [daemon.failover.check(), _configured(daemon.absent)]
        rows = [{"name": c.name, "ok": c.ok, "finding": c.finding, "remedy": c.remedy} for c in checks]
        return {"checks": rows}

    def _client(self, peer: Peer, pid: int, start_ticks: int | None) -> Client:
        """A client of theirs; administrators may mean anybody's. Raises NotFoundError, AmbiguousError."""
        found = [
            c for c in self._daemon.runtime.state.clients.values() if c.living and c.id.process.pid == pid
        ]
        if not peer.admin and not (found and _is_of(found[0].id.process, peer.uid)):
            # The same words for another user's client and for what is none: neither is theirs to know.
            raise NotFoundError(
                f"process {pid} is not a client of yours",
                remedy="mpsd-ctl status lists your clients; root and the mpsd group may evict others",
            )
        if not found:
            raise NotFoundError(
                f"process {pid} is not a client of any domain", remedy="mpsd-ctl status lists the clients"
            )
        if start_ticks is not None and found[0].id.process.start_ticks != start_ticks:
            raise AmbiguousError(
                f"process {pid} is not the one that was meant: the pid was used again",
                remedy="look it up again with mpsd-ctl status",
            )
        return found[0]

    async def _kill(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        client = self._client(peer, int(args["pid"]), args.get("start_ticks"))
        if grounds(self._daemon.runtime.state, client.id.process, asked=True) is None:
            await self._daemon.list_clients(client.id.domain)
        liveness = procs.liveness(client.id.process)
        if args.get("dry_run"):
            return {"steps": self._planned(client, liveness), "outcome": "dry-run", "evict_ms": None}
        request, future = self._daemon.bulletin.expect()
        reason = str(args.get("reason") or f"asked for by uid {peer.uid}")
        owner = None if peer.admin else peer.uid
        self._daemon.runtime.post(
            ev.EvictRequested(client.id.process, liveness, request, reason, owner=owner)
        )
        ok, data = await self._daemon.bulletin.answered(request, future, KILL_ANSWER_S)
        if not ok:
            raise _evict_error(str(data.get("code")), str(data.get("message")))
        return dict(data)

    async def _zone_policy(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        client, wanted = self._client(peer, int(args["pid"]), args.get("start_ticks")), str(args["policy"])
        if wanted not in set(ZonePolicy):
            raise UsageError(f"{wanted!r} is no policy", remedy=f"one of: {', '.join(ZonePolicy)}")
        # Without it nobody has guard zones: a policy would look like a protection and be none.
        must_be_open(self._daemon.vault)
        daemon, process = self._daemon, client.id.process
        daemon.runtime.post(ev.ZonePolicySet(process, ZonePolicy(wanted)))
        if problem := daemon.saving.pending():
            raise StoreError(
                f"this is in force now, but would be forgotten when mpsd restarts: {problem}",
                remedy="make room there, and ask again",
            )
        return {"pid": process.pid, "start_ticks": process.start_ticks, "policy": wanted}

    def _planned(self, client: Client, liveness: Liveness) -> list[str]:
        state = self._daemon.runtime.state
        domain = state.domains[client.id.domain]
        if grounds(state, client.id.process, asked=True) is None:
            return ["nothing: only a line in a log says that it is a client, which is no proof"]
        steps = ["hold its lease" if client.leased else "it has no lease: its kernels may harm others"]
        faulted = domain.state in (DomainState.FAULTED, DomainState.HEADLESS) or domain.server is None
        if client.frozen is not None:
            steps.append("no terminate_client: mpsd has stopped the client")
        elif faulted or liveness is not Liveness.RUNNING:
            steps.append(f"no terminate_client: domain {domain.state.value}, client {liveness.value}")
        else:
            deadline = self._daemon.policy.terminate_deadline_s * 1e3
            steps.append(f"terminate_client with a deadline of {deadline:g} ms")
        return [
            *steps,
            f"SIGKILL process {client.id.process.pid}",
            "release the lease when its work has ended",
        ]

    async def _env(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        path = await self._daemon.path_for(peer.uid, args.get("gpu"), shared=bool(args.get("shared")))
        domain = self._daemon.layout.leads_to(os.path.basename(path))
        if args.get("standby"):
            domain = self._standby(os.path.basename(path))
            path = str(self._daemon.layout.pipe_dir(domain))
        gpus = self._gpus_of(domain)
        numbers = {gpu.uuid: gpu.index for gpu in self._daemon.gpus}
        return {
            "env": {"CUDA_MPS_PIPE_DIRECTORY": path, **self._visible(gpus, args.get("gpu"))},
            "domain": domain,
            "gpus": gpus,
            "numbers": [numbers.get(uuid) for uuid in gpus],
            "directory": None if domain is None else str(self._daemon.layout.pipe_dir(domain)),
            "lost": self._is_lost(domain),
            "vault": self._daemon.vault.offered_at,
            "failover": self._daemon.failover.offered_at,
        }

    def _gpus_of(self, domain: str | None) -> list[str]:
        known = self._daemon.runtime.state.domains.get(domain or "")
        return list(known.gpus) if known is not None else []

    def _visible(self, gpus: Sequence[str], asked: str | None) -> Mapping[str, str]:
        """Where the node has more GPUs than the domain: PyTorch counts them by NVML, which knows nothing of
        domains, and ends with an error when CUDA then has fewer. What was asked for is CUDA's device 0."""
        others = {gpu.uuid for gpu in self._daemon.gpus} - {*gpus}
        if not gpus or not others:
            return {}
        first = None if asked is None else self._daemon.gpu_named(asked).uuid
        return {"CUDA_VISIBLE_DEVICES": ",".join(sorted(gpus, key=lambda uuid: uuid != first))}

    def _is_lost(self, domain: str | None) -> bool:
        """Whoever starts there now fails, until the domain is another or its server has recovered."""
        known = self._daemon.runtime.state.domains.get(domain or "")
        return known is not None and work_is_lost(known)

    def _standby(self, slot: str) -> str:
        """The domain that would take the place of the active one now. Raises NotReadyError."""
        state = self._daemon.runtime.state
        found = state.slots.get(slot)
        spare = found.spare if found is not None else None
        if spare is not None and state.domains[spare].state is DomainState.WARM:
            return spare
        if found is not None and found.exclusive:
            why = "compute mode EXCLUSIVE_PROCESS allows one server: nvidia-smi -c DEFAULT allows another"
        elif not state.policy.spare:
            why = "spare = true under [domains] in mpsd's configuration keeps one"
        else:
            why = "one is being started: ask again in a moment"
        raise NotReadyError("there is no standby domain", remedy=why)

    async def _drain(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        return self._set_drain(args, on=True)

    async def _undrain(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        return self._set_drain(args, on=False)

    def _set_drain(self, args: Mapping[str, Any], *, on: bool) -> Reply:
        daemon = self._daemon
        gpus = (daemon.gpu_named(str(args["gpu"])).uuid,) if args.get("gpu") else ()
        shown = list(gpus) or [g.uuid for g in daemon.gpus]
        if not args.get("dry_run"):
            daemon.runtime.post(ev.DrainRequested(gpus, on))
            if problem := daemon.saving.pending():
                raise StoreError(
                    f"this is in force now, but would be forgotten when mpsd restarts: {problem}",
                    remedy="make room there, and ask again",
                )
        staying = [
            c.id.process.pid
            for c in daemon.runtime.state.clients.values()
            if c.living and set(daemon.runtime.state.domains[c.id.domain].gpus) & set(shown)
        ]
        return {
            "gpus": shown,
            "draining": on,
            "dry_run": bool(args.get("dry_run")),
            "clients": sorted(set(staying)),
        }


def _is_of(process: ProcessInstance, uid: int) -> bool:
    """As it is now: exec and setuid(2) may have changed whose it is since it was noticed."""
    try:
        return procs.users(process).all_are(uid)
    except NotFoundError:
        return False


def _configured(absent: Sequence[str]) -> Check:
    if not absent:
        return Check("configuration", True, "every GPU that it names is there")
    remedy = "mpsd-ctl status lists the GPUs: mend the file and restart mpsd, or see why one has gone"
    return Check("configuration", False, "; ".join(absent), remedy)


def _evict_error(code: str, message: str) -> MpsdError:
    if code == "deadline":
        return DeadlineError(message, remedy="see its state in ps: D means that the kernel holds it")
    if code == "unproven":
        remedy = "its server does not list it and it has no lease; if it is yours to end, use kill(1)"
        return AmbiguousError(message, remedy=remedy)
    return AmbiguousError(message) if code == "busy" else NotFoundError(message)


def find_gpu(gpus: tuple[Gpu, ...], name: str) -> Gpu:
    """A GPU by index, UUID or a unique prefix of its UUID. Raises NotFoundError."""
    found = [g for g in gpus if name in (str(g.index), g.uuid)] or [
        g for g in gpus if g.uuid.startswith(name)
    ]
    if len(found) != 1:
        known = ", ".join(f"{g.index}: {g.uuid}" for g in gpus)
        raise NotFoundError(f"there is no GPU {name!r}", remedy=f"GPUs here: {known}")
    return found[0]
