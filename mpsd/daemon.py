"""The daemon, assembled: adapters, runtime, listener, and the little that must be done from time to time.

Long because everything meets here; every decision and every adapter lies elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from mpsd import layout, workwatch
from mpsd.adoption import KIND, LEVEL, Adoption, to_file
from mpsd.attacher import Attacher
from mpsd.bulletin import Bulletin
from mpsd.config import Config, DomainMode, GuardSetting
from mpsd.core import events as ev
from mpsd.core.state import DomainState, Policy, State
from mpsd.errors import BusyError, DeadlineError, MpsdError, NotReadyError, UnsupportedError
from mpsd.fdstore import open_store
from mpsd.gpu.base import Backend, KernelLog, XidSource
from mpsd.guard import Guards
from mpsd.host import Callbacks, Hosts
from mpsd.journal import Journal
from mpsd.layout import Layout
from mpsd.leasestore import LeaseStore
from mpsd.listener import Listener
from mpsd.model import ClientId, ComputeMode, Gpu, GuardClass, KernelXid, NvmlXid, ProcessInstance
from mpsd.notify import Notifier, watchdog_interval_s
from mpsd.ops import Operations, find_gpu
from mpsd.orphans import Orphans
from mpsd.performer import Hands, Performer
from mpsd.runtime import Runtime, doomed_at
from mpsd.settings import ControlSettings
from mpsd.statefile import StateFile
from mpsd.statusview import GpuView, look_at_gpus

log = structlog.get_logger("mpsd.daemon")

TICK_S = 1.0
MODE_EVERY, LIST_EVERY, TRIM_EVERY = 5, 10, 60
STOP_PATIENCE_S = 30.0
STORE_DEADLINE_S = 5.0
# Anybody who can become many users (a user namespace has 65536) must not start as many servers.
MAX_SLOTS = 64
LOG_SPACE_NEEDED = 256 << 10
NVML_PATIENCE_S = 0.03
# What `auto` means. The measurements behind it: faultinject/reports/README.md.
SAFE_GUARDS = frozenset({GuardClass.LOW})


def policy_of(config: Config, backend: Backend) -> Policy:
    """The operator's choices as core takes them."""
    domains, asked_ms = config.domains, config.eviction.terminate_deadline_ms
    return Policy(
        spare=domains.spare,
        kill_victims_after_s=domains.kill_victims_after_s,
        exclusive_drain_s=domains.exclusive_drain_s,
        laggard_report_s=domains.laggard_report_s,
        linger_limit_s=config.lease.linger_limit_s,
        terminate_deadline_s=asked_ms / 1e3 if asked_ms else backend.terminate_deadline_s,
        stop_deadline_s=domains.stop_deadline_s,
        start_retry_s=domains.start_retry_s,
        start_retry_max_s=domains.start_retry_max_s,
        evidence_window_s=config.journal.evidence_window_s,
    )


def guard_classes(config: Config, backend: Backend) -> frozenset[GuardClass]:
    """The classes of range that are on; none where the GPU may use host pointers: a guard breaks them."""
    if backend.host_pointers_work:
        return frozenset()
    chosen = {kind: getattr(config.guard, kind.value) for kind in GuardClass}
    return frozenset(
        kind
        for kind, setting in chosen.items()
        if setting is GuardSetting.ON or (setting is GuardSetting.AUTO and kind in SAFE_GUARDS)
    )


def slot_name(gpus: Sequence[str], uid: int | None) -> str:
    """A short name that fits into a socket path: the first GPU's number, how many more, and whose."""
    more = f"+{len(gpus) - 1}" if len(gpus) > 1 else ""
    return f"{gpus[0].split('-')[1][:8]}{more}-{'all' if uid is None else f'u{uid}'}"


class Daemon:
    """One running mpsd. `run` returns when it was told to stop; everything it supervises lives on."""

    def __init__(self, config: Config, backend: Backend, environ: MutableMapping[str, str]) -> None:
        self.config = config
        self.backend = backend
        self.pid = os.getpid()
        self.layout = Layout(Path(config.run_dir), Path(config.log_dir), Path(config.state_dir))
        self.policy = policy_of(config, backend)
        self.settings = ControlSettings(config.limits)
        self._environ = environ
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._save_pending = False
        self._default_path_problem = ""
        self._hosts_left = False
        self._log_disk_full = False
        self._unknown_domains: Sequence[str] = ()
        self._modes: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[list[GpuView]] | None = None
        self._views: Sequence[GpuView] = ()

    def now(self) -> float:
        return time.monotonic()

    def uptime_s(self) -> float:
        return time.monotonic() - self._began

    def stop(self) -> None:
        self._stop.set()

    async def run(self, *, stop_domains: bool = False) -> None:
        """Serve until stopped. Raises MpsdError when this machine or configuration does not allow it."""
        self.layout.prepare()
        lock = self.layout.lock()
        notifier = Notifier.from_environ(self._environ)
        try:
            self._assemble(notifier)
            await self._serve(notifier, stop_domains=stop_domains)
            left = sorted(self.runtime.state.domains)
            log.info(
                "stopped", domains=left, note="they live on until the next mpsd" if left else "none is left"
            )
        finally:
            notifier.close()
            os.close(lock)

    def _assemble(self, notifier: Notifier) -> None:
        loop = asyncio.get_running_loop()
        self.gpus = tuple(self.backend.devices.gpus())
        if not self.gpus:
            raise UnsupportedError("there is no GPU on this machine", remedy="run mpsd-ctl doctor")
        journal = Journal.open(
            self.layout.state_dir, self.config.journal.max_records, self.config.journal.max_bytes
        )
        self.bulletin = Bulletin(journal)
        store = self.config.store
        self._store = LeaseStore(
            open_store(store.kind.value, self.layout.run_dir, store.max_descriptors, self._environ, notifier)
        )
        self._statefile = StateFile(self.layout.state_file, KIND, LEVEL)
        interval_s = self.config.lease.probe_interval_ms / 1e3
        self._work = workwatch.WorkWatch(self.backend.work, interval_s, self._post)
        self._attacher = Attacher(self.backend.uvm, self._work, self._store, self._post)
        self._orphans = Orphans(self.backend.uvm, self.backend.work, interval_s, self._store)
        guard = self.config.guard
        self._guards = Guards(
            guard_classes(self.config, self.backend), guard.max_ranges, guard.follow_interval_s, self._post
        )
        self._hosts = Hosts(
            self.backend.control_binary,
            self.backend.control_environment,
            self.layout,
            self.settings,
            Callbacks(self._post, self._attacher.notice, self._client_left, self._save_soon),
            start_deadline_s=self.config.domains.start_deadline_s,
        )
        hands = Hands(
            self._hosts,
            self._attacher,
            self._guards,
            self._work,
            self.layout,
            self.bulletin,
            self._post,
        )
        self._performer = Performer(hands)
        first = State(
            policy=self.policy,
            next_fault=journal.last_id + 1,
            # Records and logs speak of domains by name: a name is not given twice.
            next_domain=self.layout.last_domain() + 1,
        )
        self.runtime = Runtime(first, self._performer.perform, self._changed, doomed_at(self._environ))
        self._loop = loop

    def _post(self, event: ev.Event) -> None:
        self.runtime.post(event)

    async def _serve(self, notifier: Notifier, *, stop_domains: bool) -> None:
        listener = Listener(
            self.layout.socket,
            Operations(self).handle,
            self.config.group,
            history=self.bulletin.events_since,
        )
        sources = self._open_sources()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        await self._adopt()
        await listener.start()
        self.bulletin.connect(listener.publish)
        background = [
            self._loop.create_task(self._guards.follow()),
            self._loop.create_task(self._tick()),
            self._loop.create_task(self._ping(notifier)),
        ]
        self._prestart()
        notifier.ready(f"supervising {len(self.gpus)} GPU(s)")
        log.info("ready", gpus=len(self.gpus), backend=self.backend.name, socket=str(self.layout.socket))
        try:
            await self._stop.wait()
        finally:
            notifier.stopping()
            if stop_domains:
                await self._stop_domains()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await listener.close()
            for source in sources:
                self._loop.remove_reader(source.fileno())
                source.close()
            await self._close()

    async def _close(self) -> None:
        if self._modes is not None:
            self._modes.cancel()
        await self._work.close()
        await self._performer.close()
        self._hosts_left = bool(self.runtime.state.domains)
        await self._hosts.close()
        await self._attacher.settled()
        self._save()
        held = bool(self._attacher.leases) or len(self._orphans) > 0
        self._attacher.close()
        await self._orphans.close()
        # With nothing kept alive by it any more, the store leaves no process behind.
        await self._store.close(STORE_DEADLINE_S, end=not held and not self._hosts_left)
        self.bulletin.journal.close()

    def _open_sources(self) -> list[XidSource | KernelLog]:
        """Xids and the kernel log, where they can be had; what is missing is said, not fatal."""
        sources: list[XidSource | KernelLog] = []
        self._source_problems: list[str] = []
        try:
            xids = self.backend.devices.watch_xids()
            self._loop.add_reader(xids.fileno(), self._read_xids, xids)
            sources.append(xids)
        except MpsdError as error:
            self._source_problems.append(f"Xids are not seen: {error}")
        kernel_log = self.backend.kernel_log
        if kernel_log is None:
            self._source_problems.append("the kernel log is not readable: SM exceptions stay unclassed")
        else:
            self._loop.add_reader(kernel_log.fileno(), self._read_kernel_log, kernel_log)
            sources.append(kernel_log)
        return sources

    def _read_xids(self, source: XidSource) -> None:
        for xid in self._drained(source):
            assert isinstance(xid, NvmlXid)
            self._post(ev.NvmlXidSeen(xid))

    def _read_kernel_log(self, source: KernelLog) -> None:
        for xid in self._drained(source):
            assert isinstance(xid, KernelXid)
            gpu = next((g.uuid for g in self.gpus if g.pci.startswith(xid.pci.lower())), None)
            self._post(ev.KernelXidSeen(gpu, xid))

    def _drained(self, source: XidSource | KernelLog) -> Sequence[NvmlXid | KernelXid]:
        try:
            return source.drain()
        except (MpsdError, OSError) as error:
            # It would stay readable for ever.
            self._loop.remove_reader(source.fileno())
            self._source_problems.append(f"signs of faults are missing: {error}")
            return ()

    async def _adopt(self) -> None:
        saved = self._statefile.load()
        if saved is not None:
            self.settings.restore(saved["settings"])
            if saved["drained"]:
                wanted = () if "*" in saved["drained"] else tuple(saved["drained"])
                self._post(ev.DrainRequested(wanted, True))
        adoption = Adoption(self.layout, self._hosts, self._attacher, self._store, self._orphans, self._post)
        adoption.run(saved)
        self._unknown_domains = adoption.unknown
        await adoption.join_living()
        lost = self._attacher.discard_kept()
        if lost:
            log.info("leases of nobody were given up", leases=lost)
        self._post(ev.AdoptionDone())

    def _prestart(self) -> None:
        shared = self.config.domains.mode is DomainMode.SHARED
        for group in self.groups():
            if shared or (self.config.domains.serve_default_path and group == self.groups()[0]):
                self._post(self._slot_wanted(group, None))

    def groups(self) -> list[tuple[str, ...]]:
        """The sets of GPUs that domains are made for: those that span several, then one for each other."""
        here = {g.uuid for g in self.gpus}
        spans = [tuple(u for u in span if u in here) for span in self.config.domains.span]
        spanned = {u for span in spans for u in span}
        return [s for s in spans if s] + [(g.uuid,) for g in self.gpus if g.uuid not in spanned]

    def _slot_wanted(self, gpus: tuple[str, ...], uid: int | None) -> ev.SlotWanted:
        return ev.SlotWanted(slot_name(gpus, uid), gpus, uid, self._exclusive(gpus))

    def _exclusive(self, gpus: Sequence[str]) -> bool:
        try:
            return any(self.backend.devices.compute_mode(g) is ComputeMode.EXCLUSIVE_PROCESS for g in gpus)
        except MpsdError as error:
            log.warning("compute mode unknown", reason=str(error))
            return False

    async def gpu_views(self) -> Sequence[GpuView]:
        """What NVML says of the GPUs; the last answer while it is held up, as it is during a fault."""
        if self._looking is None:
            look = asyncio.to_thread(look_at_gpus, self.backend.devices, self.gpus)
            self._looking = self._loop.create_task(look)
        looking = self._looking
        done, _ = await asyncio.wait({looking}, timeout=NVML_PATIENCE_S if self._views else None)
        if done:
            if self._looking is looking:
                self._looking = None
            self._views = looking.result()
        return self._views

    def gpu_named(self, name: str) -> Gpu:
        return find_gpu(self.gpus, name)

    async def path_for(self, uid: int, gpu: str | None, *, shared: bool) -> str:
        """The stable pipe directory for a user, once it leads to a running domain.

        Raises NotReadyError while the GPU is drained, DeadlineError when no domain comes up in time.
        """
        groups = self.groups()
        if gpu is not None:
            uuid = self.gpu_named(gpu).uuid
            group = next(g for g in groups if uuid in g)
        else:
            group = min(groups, key=self._load)
        drained = self.runtime.state.drained
        if "*" in drained or drained & set(group):
            raise NotReadyError(
                f"GPU {', '.join(group)} is drained", remedy="mpsd-ctl undrain, or take another"
            )
        owner = None if shared or self.config.domains.mode is DomainMode.SHARED else uid
        # In a thread: NVML can be held up for long.
        wanted = await asyncio.to_thread(self._slot_wanted, group, owner)
        slots = self.runtime.state.slots
        if wanted.slot not in slots and len(slots) >= MAX_SLOTS:
            raise BusyError(
                f"{len(slots)} users have domains of their own",
                remedy="use the shared one (mpsd-ctl env --shared), or restart mpsd with --stop-domains",
            )
        self._post(wanted)
        path = self.layout.slot_path(wanted.slot)
        await self._until_served(wanted.slot, path)
        return str(path)

    def _load(self, group: tuple[str, ...]) -> tuple[int, str]:
        state = self.runtime.state
        return sum(1 for c in state.clients.values() if state.domains[c.id.domain].gpus == group), group[0]

    async def _until_served(self, slot: str, path: Path) -> None:
        """Wait until the slot leads to a domain that takes clients."""
        deadline = self.config.domains.start_deadline_s
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            state = self.runtime.state
            active = state.slots[slot].active
            if active is not None and state.domains[active].state is DomainState.ACTIVE and path.exists():
                return
            await asyncio.sleep(0.005)
        problems = [d.problem for d in self.runtime.state.domains.values() if d.slot == slot and d.problem]
        raise DeadlineError(
            f"no domain came up within {deadline:g} s{': ' + problems[-1] if problems else ''}",
            remedy="mpsd-ctl doctor",
        )

    def _changed(self, before: State, after: State) -> None:
        """After each decision, before its effects."""
        if before.clients is not after.clients:
            for client in after.clients.values():
                old = before.clients.get(client.id)
                if client.leased and client.living and (old is None or not old.leased):
                    lease = self._attacher.leases.get(client.id)
                    if lease is not None:
                        gpus = after.domains[client.id.domain].gpus
                        self._guards.add(client.id, lease.space, gpus, lease.notes)
        same = before.slots is after.slots and before.domains is after.domains
        if not (same and before.clients is after.clients and before.drained is after.drained):
            # Before the tasks that effects start: a process is never started that the file does not know.
            self._save_soon()

    def _save_soon(self) -> None:
        if not self._save_pending:
            self._save_pending = True
            self._loop.call_soon(self.save_pending)

    def save_pending(self) -> None:
        """Write the state if it has changed: before an answer says that something is done for good."""
        if self._save_pending:
            self._save()

    def _save(self) -> None:
        self._save_pending = False
        self._statefile.save(to_file(self.runtime.state, self.settings.by_hand()))

    def _client_left(self, domain: str, pid: int) -> None:
        """The server dropped a client: its process has gone, or replaced its program."""
        self._attacher.check_identities(pid)

    async def _ping(self, notifier: Notifier) -> None:
        """Tell the service manager that the loop turns: apart from the tick, which waits for others."""
        while True:
            notifier.watchdog()
            await asyncio.sleep(min(TICK_S, watchdog_interval_s(self._environ) or TICK_S))

    async def _tick(self) -> None:
        """Once a second: what no descriptor tells. What fails in one round is tried in the next."""
        rounds = 0
        while True:
            await asyncio.sleep(TICK_S)
            rounds += 1
            try:
                await self._look_around(rounds)
            except Exception as error:
                log.error("round failed", error=repr(error), exc_info=True)

    async def _look_around(self, rounds: int) -> None:
        self._attacher.check_identities()
        self._orphans.look_around()
        self._work.refresh({c.process for c in self._attacher.leases})
        if self.bulletin.journal.problem:
            self.bulletin.journal.retry()
        if self._statefile.problem:
            self._statefile.retry()
        self._claim_default_path()
        if rounds % MODE_EVERY == 0 and (self._modes is None or self._modes.done()):
            # Not awaited: NVML can hang for good, and all else must go on.
            self._modes = self._loop.create_task(self._look_at_modes())
        self._log_disk_full = self.layout.log_space() < LOG_SPACE_NEEDED
        # Without a log nobody tells of newcomers: they are looked for.
        if self._log_disk_full or rounds % LIST_EVERY == 0:
            await self._reconcile()
        if rounds % TRIM_EVERY == 0:
            self._hosts.trim_logs(self.config.log.max_bytes)

    async def _look_at_modes(self) -> None:
        for slot in tuple(self.runtime.state.slots.values()):
            exclusive = await asyncio.to_thread(self._exclusive, slot.gpus)
            if exclusive != slot.exclusive:
                self._post(ev.ModeSeen(slot.id, exclusive))

    def _claim_default_path(self) -> None:
        if not self.config.domains.serve_default_path:
            return
        target = self.layout.slot_path(slot_name(self.groups()[0], None))
        path = Path(self.config.domains.default_path)
        if target.exists() and not (path.is_symlink() and os.readlink(path) == str(target)):
            self._default_path_problem = layout.claim_default_path(path, target)

    async def _reconcile(self) -> None:
        """Clients that no log line told of, servers that changed unseen."""
        known = {c.id.process.pid for c in self.runtime.state.clients.values() if c.living}
        for domain in self._hosts.names():
            try:
                listed = await self._hosts.listed_clients(domain)
            except MpsdError as error:
                log.warning("clients are not listed", domain=domain, reason=str(error))
                continue
            for pid in set(listed) - known:
                self._attacher.notice(domain, pid)
            self._hosts.ask(domain)

    async def _stop_domains(self) -> None:
        self._post(ev.StopRequested())
        end = time.monotonic() + STOP_PATIENCE_S
        while self.runtime.state.domains and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for domain in self.runtime.state.domains:
            log.error("domain did not stop", domain=domain)

    def protections(self) -> Mapping[ClientId, Sequence[str]]:
        return {c: self._guards.shown(c) for c in self._attacher.leases}

    def pending_work(self) -> Mapping[ProcessInstance, str]:
        return self._work.all_pending()

    def orphan_rows(self) -> list[dict[str, Any]]:
        return self._orphans.rows()

    def problems(self) -> list[str]:
        """Capability losses of the daemon itself, for `status`."""
        found = [*self._source_problems, *self._store.problems(), *self._unknown_domains]
        found += self._orphans.problems()
        found += [p for p in (self.bulletin.journal.problem, self._statefile.problem) if p]
        found += [self._default_path_problem] if self._default_path_problem else []
        if self._log_disk_full:
            found.append(
                f"{self.layout.log_dir} is full: clients are noticed once a second, and faults lack evidence"
            )
        if self._guards.kinds:
            names = ", ".join(sorted(self._guards.kinds))
            found.append(f"outer guard is silent: what it absorbs ({names}) is nobody's record")
        return found

    def extra_counters(self) -> dict[str, int]:
        return {
            "log_lines_unparsed": self._hosts.unparsed(),
            "leases_held": len(self._attacher.leases) + len(self._orphans),
            "effects_performed": self.runtime.performed,
        }
