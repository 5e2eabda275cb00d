"""The daemon, assembled from its adapters, the runtime and the listener. Decisions and adapters are
elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from mpsd.api.gpuviews import GpuViews
from mpsd.api.operations import Operations, find_gpu
from mpsd.api.percentages import Percentages
from mpsd.api.privacy import visible_to
from mpsd.api.statusview import GpuView, own_pids
from mpsd.api.usernames import prefetch
from mpsd.base import debug
from mpsd.base.conditions import Condition
from mpsd.base.errors import MpsdError, UnsupportedError
from mpsd.base.model import Gpu, ProcessInstance, ServerState
from mpsd.base.protection import Obstacle, ProtectionLevel
from mpsd.clients import endofwork
from mpsd.clients.attach import Attacher
from mpsd.clients.guard import Guards
from mpsd.clients.isolation import KernelIsolation
from mpsd.clients.orphans import Orphans
from mpsd.clients.trackers import Trackers
from mpsd.clients.zonegrants import ZoneGrants
from mpsd.config.layout import Layout
from mpsd.config.schema import BackendName, Config, DomainMode
from mpsd.core import events as ev
from mpsd.core.failover.participants import FailoverRecord
from mpsd.core.proof import may_be_client
from mpsd.core.state import SERVING, Policy, State
from mpsd.daemon.adoption import KIND, LEVEL, Adoption, still_lost, to_file
from mpsd.daemon.failover import FailoverService
from mpsd.daemon.faultsources import FaultSources
from mpsd.daemon.freememory import FreeMemory
from mpsd.daemon.options import (
    absent_gpus,
    guard_classes,
    policy_of,
    tell_indices,
    vault_limits,
    zone_limits,
)
from mpsd.daemon.pathchecks import PathChecks
from mpsd.daemon.performer import Adapters, Performer
from mpsd.daemon.periodic import PeriodicChecks
from mpsd.daemon.protection import NodeProtection, of_descriptors
from mpsd.daemon.runtime import Runtime, effect_of_death
from mpsd.daemon.slotpaths import SlotPaths, slot_name
from mpsd.daemon.views import NodeViews
from mpsd.fdstore.notify import Notifier, watchdog_interval_s
from mpsd.fdstore.queue import LeaseStore
from mpsd.fdstore.store import open_store
from mpsd.gpu.base import Backend
from mpsd.limits.book import LimitBook, Owner
from mpsd.mps.domains import Callbacks, RunningDomains
from mpsd.os.descriptors import OPENED_LATER, SHARES, DescriptorBudget, open_count, open_limit
from mpsd.os.quietperiod import QuietPeriod
from mpsd.peers import Listener
from mpsd.peers.server import Server, Surroundings
from mpsd.peers.vaultserver import VaultServer
from mpsd.records import failoverreader
from mpsd.records.bulletin import Bulletin
from mpsd.records.conditionlog import ConditionLog
from mpsd.records.eventnumbers import EventNumbers
from mpsd.records.journal import FAILOVERS, Journal
from mpsd.records.statefile import StateFile
from mpsd.records.statewriter import StateSaver
from mpsd.vault.holdings import Vault
from mpsd.zones.ledgers import Zones

log = structlog.get_logger("mpsd.daemon")

PING_S = 1.0
PROBE_INTERVAL_S = 0.01
"""Interval between checks whether an exited client's work has ended."""
GUARD_FOLLOW_S = 1.0
"""Interval at which the outer guard follows a client's mappings."""
STOP_PATIENCE_S = 30.0
STORE_DEADLINE_S = 5.0
DRIVER_FILES_DEADLINE_S = 5.0


class Daemon(NodeViews):
    """One running mpsd. run() returns when it is told to stop; everything that it supervises keeps
    running."""

    def __init__(self, config: Config, backend: Backend, environ: MutableMapping[str, str]) -> None:
        self.config = config
        self.backend = backend
        self.pid = os.getpid()
        self.layout = Layout.of(config)
        self._environ = environ
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._domains_detached = False
        self._unknown_domains: Sequence[Condition] = ()

    def now(self) -> float:
        return time.monotonic()

    def uptime_s(self) -> float:
        return time.monotonic() - self._began

    def stop(self) -> None:
        self._stop.set()

    async def run(self, *, stop_domains: bool = False) -> None:
        """Serve until stopped, in directories that are prepared and locked (Layout).

        Raises MpsdError if this machine does not allow it.
        """
        notifier = Notifier.from_environ(self._environ)
        try:
            self._assemble(notifier)
            await self._serve(notifier, stop_domains=stop_domains)
            left = sorted(self.runtime.state.domains)
            note = "they keep running for the next mpsd" if left else "no domain is left"
            log.info("stopped", domains=left, note=note)
            for found in self._unknown_domains:
                log.warning("a domain keeps running without supervision", what=found.text, do=found.remedy)
        finally:
            notifier.close()

    def _assemble(self, notifier: Notifier) -> None:
        loop = asyncio.get_running_loop()
        prefetch(0)
        self._prepare_doors()
        self.gpus = tuple(self.backend.devices.gpus())
        if not self.gpus:
            raise UnsupportedError("this machine has no GPU", remedy="run mpsd-ctl doctor")
        self.percentages = Percentages(self.backend, self.gpus, self._post)
        self._slots = SlotPaths(
            self.config.domains,
            self.gpus,
            self.backend.devices,
            self.layout,
            lambda: self.runtime.state,
            self._post,
            lambda slot, uid: self._paths.hand_out(slot, uid),
            self._surroundings.accounts.owner,
        )
        self._open_protection()
        self._absent = absent_gpus(self.config, self.gpus)
        tell_indices(self.config, self.gpus)
        journal, self._failovers = self._open_records()
        self._open_store(notifier)
        quiet_period = QuietPeriod()
        self.saving = StateSaver(StateFile(self.layout.state_file, KIND, LEVEL), self._contents, quiet_period)
        self._work = endofwork.WorkWatch(self.backend.work, PROBE_INTERVAL_S, self._post)
        guard = self.config.guard
        self._zones = Zones(zone_limits(self.config))
        self._trackers = Trackers(self._post, self._zones, lambda *asked: self.vault.has(*asked))
        self._open_clients()
        self.vault: Vault = Vault(
            vault_limits(self.config), self.backend.memory, self._store, self.descriptors
        )
        self.isolation = self._open_isolation()
        self._guards = Guards(
            guard_classes(self.config, self.backend, isolated=self.isolation.on),
            guard.max_ranges,
            GUARD_FOLLOW_S,
            self._post,
        )
        self._hosts = self._open_domains(quiet_period)
        self.failover = FailoverService(
            self.layout,
            self._post,
            enabled=self.protection.allows(ProtectionLevel.FAILOVER),
            lazy=self.config.failover.lazy,
            driver=self.config.failover.driver,
            copies=self.config.failover.copies,
            simulated=self.backend.name == BackendName.SIMULATED,
            surroundings=self._surroundings,
        )
        adapters = Adapters(
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
            self.backend.devices.processes,
        )
        self._performer = Performer(adapters)
        first = State(
            policy=self.policy,
            next_fault=journal.last_id + 1,
            next_failover=self._failovers.last_id + 1 if self._failovers is not None else 1,
            # Records and logs name domains, so a name is never reused.
            next_domain=self.layout.last_domain() + 1,
        )
        self.runtime: Runtime = Runtime(
            first, self._performer.perform, self._changed, effect_of_death(self._environ)
        )
        self._paths: PathChecks = PathChecks(self._hosts, lambda: self.runtime.state, self._post)
        self._rounds = self._open_rounds()
        self._views = self._open_views()
        self._loop = loop

    def _open_rounds(self) -> PeriodicChecks:
        domains, free = self.config.domains, self.config.failover.free_mib << 20
        return PeriodicChecks(
            self._attacher,
            self._orphans,
            self._work,
            FreeMemory(self.backend.devices, self.gpus, free, lambda: self.runtime.state, self._post),
            [self.saving.file, *self.bulletin.files()],
            self._hosts,
            self.layout,
            lambda: self.runtime.state,
            self._post,
            self._slots.exclusive,
            self.list_clients,
            slot_name(self._slots.groups()[0], None),
            Path(domains.default_path) if domains.serve_default_path else None,
            self.config.log.max_bytes,
            lambda: self.conditions(refresh=False),
            self._paths,
            ConditionLog(self._tell_condition),
            self._check_sockets,
        )

    def _open_store(self, notifier: Notifier) -> None:
        store = self.config.store
        self._store = LeaseStore(
            open_store(store.kind.value, self.layout.run_dir, store.max_descriptors, self._environ, notifier),
            # The leases of one user cannot fill the store.
            share=store.max_descriptors // 2,
            budget=self.descriptors,
        )

    def _open_clients(self) -> None:
        self._attacher = Attacher(
            self.backend.uvm,
            self._work,
            self._store,
            self._post,
            self._known,
            self._trackers,
            self.descriptors,
            self._may_join,
        )
        self._orphans = Orphans(
            self.backend.uvm, self.backend.work, PROBE_INTERVAL_S, self._store, self.descriptors
        )

    def _prepare_doors(self) -> None:
        # Descriptors of the systemd store are charged when their leases are adopted.
        stored = self._environ.get("LISTEN_FDS", "")
        used = open_count() - (int(stored) if stored.isdecimal() else 0) + OPENED_LATER
        self.descriptors = DescriptorBudget(open_limit(), used, shares=SHARES)
        # Adopted leases may take all the rest.
        doors = 1 + self.config.protect.limit.rank
        self._surroundings = Surroundings.of(self.config.group, self.descriptors, doors)
        self._doors: tuple[Server[Any], ...] = ()

    def _open_protection(self) -> None:
        for gpu in self.gpus:
            self._slots.exclusive([gpu.uuid])
        self.protection: NodeProtection = NodeProtection(
            self.config,
            self.backend,
            self.gpus,
            lambda: [*self.failover.obstacles(), *of_descriptors(self.descriptors)],
            lambda: self.failover.obstacles_of_users(),
            lambda: self._slots.exclusive_gpus,
        )
        self.policy: Policy = policy_of(self.config, self.backend, self.protection, self.gpus)

    def _open_records(self) -> tuple[Journal, Journal | None]:
        """Open the journals of faults and, unless there can be none, of fail-overs."""
        bounds = self.config.journal.max_records, self.config.journal.max_bytes
        journal = Journal.open(self.layout.state_dir, *bounds)
        failovers = None
        # Old records are shown, and their numbers continue, even if fail-over has been disabled since.
        if self.protection.allows(ProtectionLevel.FAILOVER) or (self.layout.state_dir / FAILOVERS).exists():
            failovers = Journal.open(self.layout.state_dir, *bounds, name=FAILOVERS)
        numbers = EventNumbers(self.layout.state_dir)
        self.bulletin = Bulletin(journal, failovers, numbers, self._slot_of)
        return journal, failovers

    def _slot_of(self, domain: str) -> str | None:
        known = self.runtime.state.domains.get(domain)
        return known.slot if known is not None else None

    def _open_domains(self, quiet_period: QuietPeriod) -> RunningDomains:
        return RunningDomains(
            self.backend.control_binary,
            self.backend.control_environment,
            self.layout,
            LimitBook(self.config.limits, self.gpus),
            Callbacks(
                self._post,
                self._attacher.notice,
                self._client_left,
                self.saving.now,
                self.saving.pending,
                lambda domain: self.runtime.state.may_be_in_use(domain),
                self.list_clients,
                self._serves,
            ),
            quiet_period,
            start_deadline_s=self.config.domains.start_deadline_s,
            private=self.config.domains.private,
            budget=self.descriptors,
        )

    def _open_views(self) -> GpuViews:
        run_dir = str(self.layout.run_dir)
        return GpuViews(
            self.backend.devices, self.gpus, lambda: own_pids(self.runtime.state), run_dir=run_dir
        )

    def _open_isolation(self) -> KernelIsolation:
        backend, wanted = self.backend, self.config.kernel.isolation
        asked = (self.vault.has, self._zones.idle, self._leased, self.policy.evidence_window_s)
        return KernelIsolation(backend.isolation, backend.no_isolation, wanted, self._post, *asked)

    def _leased(self, process: ProcessInstance) -> bool:
        return {c.leased for c in self.runtime.state.spaces_of(process)} == {True}

    def _post(self, event: ev.Event) -> None:
        if isinstance(event, ev.DomainStarted | ev.DomainStartFailed | ev.ServerStartFailed):
            self._slots.note_start(event)
        elif isinstance(event, ev.ClientNoticed | ev.LeaseRestored):
            # A fault record that names this user may follow at once.
            prefetch(event.facts.uid)
        elif isinstance(event, ev.SlotWanted) and event.uid is not None:
            prefetch(event.uid)
        elif isinstance(event, ev.ServerFatalLogged | ev.ServerStateSeen | ev.ServerAtFault):
            self._sources.read_kernel_log()
        self.runtime.post(event)
        if isinstance(event, ev.ClientAttached):
            self.isolation.attached(event.process)

    def _known(self, domain: str, process: ProcessInstance, listed: bool) -> bool:
        """Return whether core already knows all that another notice of this client would tell."""
        here = (c for c in self.runtime.state.spaces_of(process) if c.id.domain == domain and c.living)
        return any(c.listed or not listed for c in here)

    def _serves(self, domain: str) -> bool:
        """Return whether a domain takes clients, with a server that is not in FAULT."""
        known = self.runtime.state.domains.get(domain)
        return known is not None and known.state in SERVING and known.server_state is not ServerState.FAULT

    def _may_join(self, domain: str, uid: int) -> bool:
        """Return whether a log line suffices to pin a process of this user as a client of a domain."""
        known = self.runtime.state.domains.get(domain)
        return known is None or may_be_client(known, uid, os.getuid())

    async def _serve(self, notifier: Notifier, *, stop_domains: bool) -> None:
        listener = Listener(
            self.layout.socket,
            Operations(self).handle,
            self.config.group,
            history=self.bulletin.events_since,
            gap=self.bulletin.gap_after,
            shown=visible_to,
            surroundings=self._surroundings,
        )
        self._sources = FaultSources(self.backend, self.gpus, self._post)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A daemon started under nohup(1) outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._stop.set)
        if (effect := effect_of_death(self._environ, debug.DIE_AFTER_SIGNAL)) is not None:
            self._loop.add_signal_handler(signal.SIGUSR2, self.runtime.die_before, effect)
        await self._adopt()
        self.isolation.start()
        await listener.start()
        ledgers = ZoneGrants(self._zones, self._trackers, lambda: self.runtime.state, self.vault.knows)
        path = self.layout.vault_socket
        door = VaultServer(
            path,
            self.vault,
            take_ledger=ledgers.take,
            surroundings=self._surroundings,
            admits=lambda uid: self.protection.allows(ProtectionLevel.GUARD, uid=uid),
        )
        self._doors = (listener.server, door.server, self.failover.server)
        self.vault.on_end.append(self._zones.leave)
        self.vault.held_elsewhere = self._zones.knows
        if self.protection.allows(ProtectionLevel.GUARD):
            try:
                door.start()
            except MpsdError as error:
                closed = Obstacle(ProtectionLevel.OBSERVE, "vault", error.message, error.remedy)
                self.protection.closed.append(closed)
        self.failover.start()
        self.bulletin.connect(listener.publish)
        background = [
            self._loop.create_task(self._guards.follow()),
            self._loop.create_task(self._rounds.run()),
            self._loop.create_task(self._ping(notifier)),
        ]
        self._prestart()
        # Before that, the level would be lower than it is a moment later.
        await self.failover.checked(DRIVER_FILES_DEADLINE_S)
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
            self._sources.close()
            await self._close()

    async def _close(self) -> None:
        self.isolation.close()
        self._rounds.close()
        self._views.close()
        await self.percentages.close()
        await self._work.close()
        await self._performer.close()
        self._domains_detached = bool(self.runtime.state.domains)
        await self._hosts.close()
        await self._attacher.attachments_done()
        self.saving.now()
        self.saving.file.sync()
        held = bool(self._attacher.leases) or len(self._orphans) > 0 or len(self.vault.ledger) > 0
        await self.vault.close()
        self._attacher.close()
        self._zones.close()
        await self._orphans.close()
        # If the store keeps nothing alive any more, its process ends too.
        await self._store.close(STORE_DEADLINE_S, end=not held and not self._domains_detached)
        self.bulletin.close()

    async def _adopt(self) -> None:
        saved = self.saving.file.load()
        if saved is not None:
            self._restore_limits(saved)
            if saved["drained"]:
                wanted = () if "*" in saved["drained"] else tuple(saved["drained"])
                self._post(ev.DrainRequested(wanted, True))
            for gpu, why in (await still_lost(self.backend.devices, saved.get("lost_gpus", {}))).items():
                self._post(ev.GpuLost(gpu, why))
        adoption = Adoption(
            self.layout,
            self._hosts,
            self._attacher,
            self._store,
            self._orphans,
            self._post,
            self.vault.takes,
            failovers=self._earlier_failovers(),
            gpus=[gpu.uuid for gpu in self.gpus],
        )
        adoption.run(saved)
        await self.vault.adopt()
        self._unknown_domains = adoption.unknown
        await adoption.join_living()
        lost = self._attacher.discard_retained()
        if lost:
            log.info("released leases without a client", leases=lost)
        self._post(ev.AdoptionDone(frozenset(adoption.unlisted)))
        self.limits.begin()

    def _earlier_failovers(self) -> list[FailoverRecord]:
        """Return the records of fail-over that an earlier daemon left open."""
        if self._failovers is None:
            return []
        rows = self._failovers.records()
        return failoverreader.restorable(rows, self.bulletin.wall_at_zero, time.monotonic())

    def _restore_limits(self, saved: Mapping[str, Any]) -> None:
        try:
            if "limits" in saved:
                self.limits.restore(saved["limits"])
            else:
                # Written by an earlier version.
                slots = (Owner(tuple(slot["gpus"]), slot["uid"]) for slot in saved["slots"])
                self.limits.book.restore_old(saved["settings"], slots)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("cannot restore limits set by hand; set them again", reason=str(error))

    def _prestart(self) -> None:
        shared = self.config.domains.mode is DomainMode.SHARED
        groups = self._slots.groups()
        for group in groups:
            if shared or (self.config.domains.serve_default_path and group == groups[0]):
                self._post(self._slots.wanted(group, None))

    async def gpu_views(self) -> Sequence[GpuView]:
        """Return NVML's view of the GPUs."""
        return await self._views.now()

    def gpu_named(self, name: str) -> Gpu:
        return find_gpu(self.gpus, name)

    async def path_for(self, uid: int, gpu: str | None, *, shared: bool, admin: bool) -> str:
        """Return the stable pipe directory for a user: SlotPaths.path_for()."""
        return await self._slots.path_for(uid, gpu, shared=shared, admin=admin)

    def refusal(self, gpu: str | None) -> Condition | None:
        """Return why a new client must not join: SlotPaths.refusal()."""
        return self._slots.refusal(gpu)

    def _changed(self, before: State, after: State) -> None:
        """Act on each decision before its effects: add guards for new leases, and save the state."""
        if before.clients is not after.clients:
            self.percentages.follow(after.clients.values())
            for client in after.clients.values():
                old = before.clients.get(client.id)
                known = old is not None and old.leased and before.is_member(old)
                # Text that every user can write changes no process.
                if client.leased and client.living and after.is_member(client) and not known:
                    lease = self._attacher.leases.get(client.id)
                    if lease is not None:
                        gpus = after.domains[client.id.domain].gpus
                        self._guards.add(client.id, lease.space, gpus, lease.notes, client.facts.uid)
        same = before.slots is after.slots and before.domains is after.domains
        same = same and before.homes_changed == after.homes_changed
        same = same and before.drained is after.drained and before.lost_gpus is after.lost_gpus
        if not (same and before.clients is after.clients):
            # Before the effects: the file must know each process before it is started.
            self.saving.soon()

    def _contents(self) -> Mapping[str, object]:
        return to_file(self.runtime.state, self.limits.to_file(), self.limits.book.old_rows())

    def _client_left(self, domain: str, pid: int) -> None:
        """Check a pid that its server dropped: the process has exited, or has replaced its program."""
        self._attacher.check_identities(pid)

    async def _ping(self, notifier: Notifier) -> None:
        """Report to the service manager that the loop runs. Separate from the rounds, which can be
        delayed."""
        while True:
            notifier.watchdog()
            await asyncio.sleep(min(PING_S, watchdog_interval_s(self._environ) or PING_S))

    def _check_sockets(self) -> None:
        """Make sockets again that were removed, for example by a cleaner of /tmp."""
        self._surroundings.accounts.refresh()
        for server in self._doors:
            server.check()

    async def list_clients(self, domain: str) -> None:
        """Ask a domain's server for its clients: notice unknown clients, confirm known ones."""
        try:
            listed = await self._hosts.listed_clients(domain)
        except MpsdError as error:
            log.warning("cannot list the clients of a domain", domain=domain, reason=str(error))
            return
        self._attacher.listed(domain, listed)
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
