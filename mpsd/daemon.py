"""The daemon, assembled: adapters, runtime, listener.

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

from mpsd import workwatch
from mpsd.adoption import KIND, LEVEL, Adoption, to_file
from mpsd.attacher import Attacher
from mpsd.bulletin import Bulletin
from mpsd.calm import Calm
from mpsd.choices import absent_gpus, guard_classes, policy_of, vault_limits, zone_limits
from mpsd.config import Config, DomainMode
from mpsd.core import events as ev
from mpsd.core.state import DomainState, State
from mpsd.errors import (
    BusyError,
    DeadlineError,
    DeniedError,
    MpsdError,
    NotReadyError,
    UnsupportedError,
)
from mpsd.eventnumbers import EventNumbers
from mpsd.failover.desk import FailoverDesk
from mpsd.fdstore import open_store
from mpsd.freememory import FreeMemory
from mpsd.gpu.base import Backend, KernelLog, XidSource
from mpsd.gpuviews import GpuViews
from mpsd.guard import Guards
from mpsd.host import Callbacks, Hosts
from mpsd.isolation import IsolationDesk
from mpsd.journal import FAILOVERS, Journal
from mpsd.layout import Layout
from mpsd.leasestore import LeaseStore
from mpsd.listener import Listener
from mpsd.model import ClientId, ComputeMode, Gpu, KernelXid, NvmlXid, ProcessInstance
from mpsd.notify import Notifier, watchdog_interval_s
from mpsd.ops import Operations, find_gpu
from mpsd.orphans import Orphans
from mpsd.performer import Hands, Performer
from mpsd.privacy import shown_to
from mpsd.rounds import Rounds
from mpsd.runtime import Runtime, doomed_at
from mpsd.saving import Saving
from mpsd.settings import ControlSettings
from mpsd.statefile import StateFile
from mpsd.statusview import GpuView, own_pids
from mpsd.text import SILENT_GUARD
from mpsd.trackers import Trackers
from mpsd.usernames import foresee
from mpsd.vault.door import Door
from mpsd.vault.hold import Vault
from mpsd.zones.book import Zones
from mpsd.zones.desk import LedgerDesk

log = structlog.get_logger("mpsd.daemon")

PING_S = 1.0
STOP_PATIENCE_S = 30.0
FAILED_FOR_GOOD = 2
STORE_DEADLINE_S = 5.0


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
        self.layout = Layout.of(config)
        self.policy = policy_of(config, backend)
        self.settings = ControlSettings(config.limits)
        self._environ = environ
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._hosts_left = False
        self._unknown_domains: Sequence[str] = ()
        self._start_problems: dict[str, str] = {}

    def now(self) -> float:
        return time.monotonic()

    def uptime_s(self) -> float:
        return time.monotonic() - self._began

    def stop(self) -> None:
        self._stop.set()

    async def run(self, *, stop_domains: bool = False) -> None:
        """Serve until stopped, in directories that are prepared and locked (Layout).

        Raises MpsdError when this machine does not allow it.
        """
        notifier = Notifier.from_environ(self._environ)
        try:
            self._assemble(notifier)
            await self._serve(notifier, stop_domains=stop_domains)
            left = sorted(self.runtime.state.domains)
            note = "they live on until the next mpsd" if left else "none is left"
            log.info("stopped", domains=left, note=note)
            for text in self._unknown_domains:
                log.warning("not ended", what=text)
        finally:
            notifier.close()

    def _assemble(self, notifier: Notifier) -> None:
        loop = asyncio.get_running_loop()
        foresee(0)
        self.gpus = tuple(self.backend.devices.gpus())
        if not self.gpus:
            raise UnsupportedError("there is no GPU on this machine", remedy="run mpsd-ctl doctor")
        self.absent = absent_gpus(self.config, [g.uuid for g in self.gpus], max(map(len, self.groups())))
        for text in self.absent:
            log.warning("a GPU of the configuration is not there", problem=text)
        bounds = self.config.journal.max_records, self.config.journal.max_bytes
        journal = Journal.open(self.layout.state_dir, *bounds)
        failovers = None
        # What was kept is told, and its numbers go on, also where fail-over has been turned off since.
        if self.config.failover.enabled or (self.layout.state_dir / FAILOVERS).exists():
            failovers = Journal.open(self.layout.state_dir, *bounds, name=FAILOVERS)
        self.bulletin = Bulletin(journal, failovers, EventNumbers(self.layout.state_dir))
        store = self.config.store
        self._store = LeaseStore(
            open_store(store.kind.value, self.layout.run_dir, store.max_descriptors, self._environ, notifier),
            # No user's leases keep all others' out.
            share=store.max_descriptors // 2,
        )
        calm = Calm()
        self.saving = Saving(StateFile(self.layout.state_file, KIND, LEVEL), self._contents, calm)
        interval_s = self.config.lease.probe_interval_ms / 1e3
        self._work = workwatch.WorkWatch(self.backend.work, interval_s, self._post)
        guard = self.config.guard
        self._zones = Zones(zone_limits(self.config))
        self._trackers = Trackers(self._post, self._zones, lambda *asked: self.vault.has(*asked))
        self._attacher = Attacher(
            self.backend.uvm, self._work, self._store, self._post, self._known, self._trackers
        )
        self._orphans = Orphans(self.backend.uvm, self.backend.work, interval_s, self._store)
        self.vault = Vault(vault_limits(self.config), self.backend.memory, self._store)
        self.isolation = self._open_isolation()
        self._guards = Guards(
            guard_classes(self.config, self.backend, isolated=self.isolation.on),
            guard.max_ranges,
            guard.follow_interval_s,
            self._post,
        )
        self._hosts = self._open_hosts(calm)
        self.failover = FailoverDesk(
            self.layout,
            self._post,
            enabled=self.config.failover.enabled,
            lazy=self.config.failover.lazy,
            driver=self.config.failover.driver,
            copies=self.config.failover.copies,
        )
        hands = Hands(
            self._hosts,
            self._attacher,
            self._guards,
            self._work,
            self._zones,
            self.layout,
            self.bulletin,
            self.failover,
            self.isolation,
            self._post,
        )
        self._performer = Performer(hands)
        first = State(
            policy=self.policy,
            next_fault=journal.last_id + 1,
            next_failover=failovers.last_id + 1 if failovers is not None else 1,
            # Records and logs speak of domains by name: a name is not given twice.
            next_domain=self.layout.last_domain() + 1,
        )
        self.runtime = Runtime(first, self._performer.perform, self._changed, doomed_at(self._environ))
        domains, free = self.config.domains, self.config.failover.free_mib << 20
        self._rounds = Rounds(
            self._attacher,
            self._orphans,
            self._work,
            FreeMemory(self.backend.devices, self.gpus, free, lambda: self.runtime.state, self._post),
            [self.saving.file, *self.bulletin.files()],
            self._hosts,
            self.layout,
            lambda: self.runtime.state,
            self._post,
            self._exclusive,
            self.list_clients,
            slot_name(self.groups()[0], None),
            Path(domains.default_path) if domains.serve_default_path else None,
            self.config.log.max_bytes,
            lambda: self.problems(look=False),
        )
        self._views = GpuViews(self.backend.devices, self.gpus, lambda: own_pids(self.runtime.state))
        self._loop = loop

    def _open_hosts(self, calm: Calm) -> Hosts:
        return Hosts(
            self.backend.control_binary,
            self.backend.control_environment,
            self.layout,
            self.settings,
            Callbacks(
                self._post,
                self._attacher.notice,
                self._client_left,
                self.saving.soon,
                self.saving.pending,
                lambda domain: self.runtime.state.may_be_in_use(domain),
            ),
            calm,
            start_deadline_s=self.config.domains.start_deadline_s,
            private=self.config.domains.private,
        )

    def _open_isolation(self) -> IsolationDesk:
        backend, wanted = self.backend, self.config.kernel.isolation
        asked = (self.vault.has, self._zones.idle, self._leased, self.policy.evidence_window_s)
        return IsolationDesk(backend.isolation, backend.no_isolation, wanted, self._post, *asked)

    def _leased(self, process: ProcessInstance) -> bool:
        return {c.leased for c in self.runtime.state.spaces_of(process)} == {True}

    def _post(self, event: ev.Event) -> None:
        if isinstance(event, ev.DomainStarted | ev.DomainStartFailed):
            self._note_start(event)
        elif isinstance(event, ev.ClientNoticed | ev.LeaseRestored):
            # A fault record that names it may follow at once.
            foresee(event.facts.uid)
        elif isinstance(event, ev.SlotWanted) and event.uid is not None:
            foresee(event.uid)
        self.runtime.post(event)
        if isinstance(event, ev.ClientAttached):
            self.isolation.attached(event.process)

    def _known(self, domain: str, process: ProcessInstance, listed: bool) -> bool:
        """Whether to notice it once more would tell core nothing."""
        here = (c for c in self.runtime.state.spaces_of(process) if c.id.domain == domain and c.living)
        return any(c.listed or not listed for c in here)

    def _note_start(self, event: ev.DomainStarted | ev.DomainStartFailed) -> None:
        """Keep why a slot's last domain did not start: core forgets a domain that never came up."""
        domain = self.runtime.state.domains.get(event.domain)
        if domain is not None and isinstance(event, ev.DomainStartFailed):
            self._start_problems[domain.slot] = event.reason
        elif domain is not None:
            self._start_problems.pop(domain.slot, None)

    async def _serve(self, notifier: Notifier, *, stop_domains: bool) -> None:
        listener = Listener(
            self.layout.socket,
            Operations(self).handle,
            self.config.group,
            history=self.bulletin.events_since,
            gap=self.bulletin.gap_after,
            shown=shown_to,
        )
        sources = self._open_sources()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Started under nohup(1) it outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._stop.set)
        await self._adopt()
        self.isolation.start()
        await listener.start()
        ledgers = LedgerDesk(self._zones, self._trackers, lambda: self.runtime.state, self.vault.knows)
        door = Door(self.layout.vault_socket, self.vault, take_ledger=ledgers.take)
        self.vault.on_end.append(self._zones.leave)
        self.vault.held_elsewhere = self._zones.knows
        if self.config.vault.enabled:
            try:
                door.start()
            except OSError as error:
                self._source_problems.append(f"the vault is not offered: {error}")
        self.failover.start()
        self.bulletin.connect(listener.publish)
        background = [
            self._loop.create_task(self._guards.follow()),
            self._loop.create_task(self._rounds.run()),
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
            self._performer.tell()
            await listener.close()
            await door.close()
            await self.failover.close()
            for source in sources:
                self._loop.remove_reader(source.fileno())
                source.close()
            await self._close()

    async def _close(self) -> None:
        self.isolation.close()
        self._rounds.close()
        self._views.close()
        await self._work.close()
        await self._performer.close()
        self._hosts_left = bool(self.runtime.state.domains)
        await self._hosts.close()
        await self._attacher.settled()
        self.saving.now()
        self.saving.file.sync()
        held = bool(self._attacher.leases) or len(self._orphans) > 0 or len(self.vault.ledger) > 0
        await self.vault.close()
        self._attacher.close()
        self._zones.close()
        await self._orphans.close()
        # With nothing kept alive by it any more, the store leaves no process behind.
        await self._store.close(STORE_DEADLINE_S, end=not held and not self._hosts_left)
        self.bulletin.close()

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
        saved = self.saving.file.load()
        if saved is not None:
            self._restore_settings(saved["settings"])
            if saved["drained"]:
                wanted = () if "*" in saved["drained"] else tuple(saved["drained"])
                self._post(ev.DrainRequested(wanted, True))
        adoption = Adoption(
            self.layout,
            self._hosts,
            self._attacher,
            self._store,
            self._orphans,
            self._post,
            self.vault.takes,
        )
        adoption.run(saved)
        await self.vault.adopt()
        self._unknown_domains = adoption.unknown
        await adoption.join_living()
        lost = self._attacher.discard_kept()
        if lost:
            log.info("leases of nobody were given up", leases=lost)
        self._post(ev.AdoptionDone())

    def _restore_settings(self, saved: Mapping[str, Sequence[str]]) -> None:
        try:
            self.settings.restore(saved, [gpu.uuid for gpu in self.gpus])
        except (ValueError, AttributeError) as error:
            log.warning("settings made by hand are not restored", reason=str(error))

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
        """What NVML says of the GPUs."""
        return await self._views.now()

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
        if os.geteuid() not in (0, owner):
            raise DeniedError(
                f"this mpsd runs as uid {os.geteuid()} and can start MPS servers for that user alone, "
                f"not for {'all users' if owner is None else f'uid {owner}'}",
                remedy="its own user: mpsd-ctl env without --shared; others need an mpsd that root runs",
            )
        # In a thread: NVML can be held up for long.
        wanted = await asyncio.to_thread(self._slot_wanted, group, owner)
        self._post(wanted)
        if wanted.slot not in self.runtime.state.slots:
            raise BusyError(
                f"{len(self.runtime.state.slots)} users have domains of their own, all of them in use",
                remedy="use the shared one (mpsd-ctl env --shared), or ask again in some minutes",
            )
        path = self.layout.slot_path(wanted.slot)
        await self._until_served(wanted.slot, path)
        return str(path)

    def _load(self, group: tuple[str, ...]) -> int:
        state = self.runtime.state
        return sum(1 for c in state.clients.values() if state.domains[c.id.domain].gpus == group)

    async def _until_served(self, slot: str, path: Path) -> None:
        """Wait until the slot leads to a domain that takes clients. Raises NotReadyError, DeadlineError."""
        deadline = self.config.domains.start_deadline_s
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            state = self.runtime.state
            wanted = state.slots.get(slot)
            active = wanted.active if wanted else None
            if active is not None and state.domains[active].state is DomainState.ACTIVE and path.exists():
                return
            # Once may have been bad luck, and the next try comes soon.
            if wanted is not None and wanted.failures >= FAILED_FOR_GOOD and slot in self._start_problems:
                raise NotReadyError(
                    f"no domain comes up: {self._start_problems[slot]}",
                    remedy="mpsd goes on trying; see mpsd-ctl status and doctor",
                )
            await asyncio.sleep(0.005)
        raise DeadlineError(f"no domain came up within {deadline:g} s", remedy="mpsd-ctl doctor")

    def _changed(self, before: State, after: State) -> None:
        """After each decision, before its effects."""
        if before.clients is not after.clients:
            for client in after.clients.values():
                old = before.clients.get(client.id)
                if client.leased and client.living and (old is None or not old.leased):
                    lease = self._attacher.leases.get(client.id)
                    if lease is not None:
                        gpus = after.domains[client.id.domain].gpus
                        self._guards.add(client.id, lease.space, gpus, lease.notes, client.facts.uid)
        same = before.slots is after.slots and before.domains is after.domains
        same = same and before.homes_changed == after.homes_changed
        if not (same and before.clients is after.clients and before.drained is after.drained):
            # Before the tasks that effects start: a process is never started that the file does not know.
            self.saving.soon()

    def _contents(self) -> Mapping[str, object]:
        return to_file(self.runtime.state, self.settings.by_hand())

    def _client_left(self, domain: str, pid: int) -> None:
        """The server dropped a client: its process has gone, or replaced its program."""
        self._attacher.check_identities(pid)

    async def _ping(self, notifier: Notifier) -> None:
        """Tell the service manager that the loop turns: apart from the rounds, which wait for others."""
        while True:
            notifier.watchdog()
            await asyncio.sleep(min(PING_S, watchdog_interval_s(self._environ) or PING_S))

    async def list_clients(self, domain: str) -> None:
        """Ask a domain's server for its clients: those unknown are noticed, those known are proven."""
        try:
            listed = await self._hosts.listed_clients(domain)
        except MpsdError as error:
            log.warning("clients are not listed", domain=domain, reason=str(error))
            return
        state = self.runtime.state
        proven = {c.id.process.pid for c in state.clients_of(domain) if c.living and c.listed}
        for pid in set(listed) - proven:
            self._attacher.notice(domain, pid, listed=True)

    async def _stop_domains(self) -> None:
        self._post(ev.StopRequested())
        end = time.monotonic() + STOP_PATIENCE_S
        state = self.runtime.state
        for domain in {c.id.domain for c in state.clients.values() if c.living and c.eviction is None}:
            await self.list_clients(domain)
        while self.runtime.state.domains and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for domain in self.runtime.state.domains:
            log.error("domain did not stop", domain=domain)

    def protections(self) -> Mapping[ClientId, Sequence[str]]:
        return {c: self._guards.shown(c) for c in self._attacher.leases}

    def guard_checked(self) -> Mapping[ClientId, float | None]:
        return {c: self._guards.checked_s(c) for c in self._attacher.leases}

    def pending_work(self) -> Mapping[ProcessInstance, str]:
        return self._work.all_pending()

    def guard_zones(self) -> Mapping[ProcessInstance, Mapping[str, Any]]:
        return self._zones.shown()

    def holders(self) -> list[dict[str, Any]]:
        """Of whom there is anything on a GPU, as far as is known without asking the driver, until its leases
        are given up; what the descriptor store has of them goes a moment later. `blind`: nobody sees the end
        of its work."""
        clients = self.runtime.state.clients.values()
        known = [(c.id.process, c.facts.uid, c.blind) for c in clients]
        ending = [(client.process, uid, False) for client, uid in self._attacher.ending.items()]
        return [
            {"pid": process.pid, "start_ticks": process.start_ticks, "uid": uid, "blind": blind}
            for process, uid, blind in (*known, *ending, *self._orphans.holders())
        ]

    def orphan_rows(self) -> list[dict[str, Any]]:
        return self._orphans.rows()

    def problems(self, *, look: bool = True) -> list[str]:
        """Capability losses of the daemon itself, for `status`. `look`: as IsolationDesk.problems has it."""
        found = [*self._source_problems, *self.absent, *self._store.problems(), *self._unknown_domains]
        found += self._orphans.problems() + self.vault.problems()
        found += [p for p in (*self.bulletin.problems(), self.saving.file.problem) if p]
        found += self.failover.problems() + self.isolation.problems(look=look)
        found += [f"no domain starts for {slot}: {why}" for slot, why in self._start_problems.items()]
        found += self._rounds.problems()
        if names := ", ".join(sorted(self._guards.kinds)):
            found.append(f"{SILENT_GUARD}: what it absorbs ({names}) is nobody's record")
        return found

    def extra_counters(self) -> dict[str, int]:
        return {
            "log_lines_unparsed": self._hosts.unparsed(),
            "leases_held": len(self._attacher.leases) + len(self._orphans),
            "effects_performed": self.runtime.performed,
            **self.vault.totals(),
            **self._zones.totals(),
            **self.failover.counters(),
        }
