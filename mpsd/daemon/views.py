"""Views of the daemon: its conditions and counters, and the parts of clients in `status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.api.percentages import Percentages
from mpsd.api.stateconditions import state_conditions
from mpsd.base import percentages
from mpsd.base.conditions import Code, Condition
from mpsd.base.model import ClientId, Gpu, ProcessInstance
from mpsd.clients import endofwork
from mpsd.clients.attach import Attacher
from mpsd.clients.guard import Guards
from mpsd.clients.isolation import KernelIsolation
from mpsd.clients.orphans import Orphans
from mpsd.core.state import Domain
from mpsd.daemon.failover import FailoverService
from mpsd.daemon.faultsources import FaultSources
from mpsd.daemon.periodic import PeriodicChecks
from mpsd.daemon.protection import NodeProtection
from mpsd.daemon.runtime import Runtime
from mpsd.daemon.slotpaths import SlotPaths
from mpsd.fdstore.queue import LeaseStore
from mpsd.limits.keeper import LimitKeeper
from mpsd.limits.values import Key, Kind
from mpsd.mps.domains import RunningDomains
from mpsd.os.descriptors import DescriptorBudget, Purpose
from mpsd.peers.server import Server
from mpsd.records.bulletin import Bulletin
from mpsd.records.statewriter import StateSaver
from mpsd.vault.holdings import Vault
from mpsd.zones.ledgers import Zones


class NodeViews:
    """The views of a daemon. The assembly sets the attributes."""

    gpus: tuple[Gpu, ...]
    runtime: Runtime
    bulletin: Bulletin
    saving: StateSaver
    vault: Vault
    isolation: KernelIsolation
    failover: FailoverService
    protection: NodeProtection
    percentages: Percentages
    descriptors: DescriptorBudget
    _attacher: Attacher
    _orphans: Orphans
    _guards: Guards
    _work: endofwork.WorkWatch
    _zones: Zones
    _store: LeaseStore
    _hosts: RunningDomains
    _slots: SlotPaths
    _rounds: PeriodicChecks
    _sources: FaultSources
    _doors: tuple[Server[Any], ...]
    _absent: Sequence[Condition]
    _unknown_domains: Sequence[Condition]

    @property
    def limits(self) -> LimitKeeper:
        return self._hosts.limits

    def percentage_limit(self, domain: Domain) -> float | None:
        """Return the thread percentage that a domain's control daemon gives to clients."""
        return percentages.read(self.limits.answers(domain.id).get(Key(Kind.PERCENTAGE), ""))

    def protections(self) -> Mapping[ClientId, Sequence[str]]:
        return {c: self._guards.shown(c) for c in self._attacher.leases}

    def guard_checked(self) -> Mapping[ClientId, float | None]:
        return {c: self._guards.checked_s(c) for c in self._attacher.leases}

    def pending_work(self) -> Mapping[ProcessInstance, str]:
        return self._work.all_pending()

    def guard_zones(self) -> Mapping[ProcessInstance, Mapping[str, Any]]:
        return self._zones.shown()

    def holders(self) -> list[dict[str, Any]]:
        """Return the processes with work or memory on a GPU, until their leases are released.

        The driver is not asked. Their descriptors leave the store a moment later. `blind`: mpsd cannot see
        the end of this process's work.
        """
        clients = self.runtime.state.clients.values()
        known = [(c.id.process, c.facts.uid, c.blind) for c in clients]
        ending = [(client.process, uid, False) for client, uid in self._attacher.ending.items()]
        return [
            {"pid": process.pid, "start_ticks": process.start_ticks, "uid": uid, "blind": blind}
            for process, uid, blind in (*known, *ending, *self._orphans.holders())
        ]

    def orphan_rows(self) -> list[dict[str, Any]]:
        return self._orphans.rows()

    def conditions(self, *, refresh: bool = True) -> list[Condition]:
        """Return all conditions that hold. `refresh`: as for KernelIsolation.conditions()."""
        found = state_conditions(self.runtime.state, [gpu.uuid for gpu in self.gpus])
        found += [*self._sources.conditions, *self._absent, *self._store.conditions(), *self._unknown_domains]
        found += self._attacher.conditions() + self._orphans.conditions() + self.vault.conditions()
        found += self.bulletin.conditions()
        if problem := self.saving.file.problem:
            found.append(Condition(Code.FILE_NOT_KEPT, str(self.saving.file.path), problem))
        found += self.protection.conditions() + self.isolation.conditions(refresh=refresh)
        found += self.limits.conditions()
        found += self.percentages.conditions(self.runtime.state, self.percentage_limit)
        found += self._slots.conditions() + self._hosts.conditions() + self._rounds.conditions()
        for server in self._doors:
            if server.problem:
                found.append(Condition(Code.SOCKET_REMOVED, str(server.path), server.problem))
        if names := ", ".join(sorted(self._guards.kinds)):
            found.append(Condition(Code.GUARD_SILENT, names))
        return found

    def _tell_condition(self, condition: Condition, begins: bool) -> None:
        """Publish that a condition begins or ends, to the user of its domain too."""
        domain = self.runtime.state.domains.get(condition.subject)
        owners = frozenset() if domain is None or domain.uid is None else frozenset({domain.uid})
        self.bulletin.publish_condition(condition, owners, begins=begins)

    def extra_counters(self) -> dict[str, int]:
        return {
            **self._hosts.totals(),
            "leases_held": len(self._attacher.leases) + len(self._orphans),
            "effects_performed": self.runtime.performed,
            "descriptors_left": self.descriptors.left,
            **{f"descriptors_{purpose.value}": self.descriptors.taken(purpose) for purpose in Purpose},
            **self.vault.totals(),
            **self._zones.totals(),
            **self.failover.counters(),
            **{f"control_{name}": n for server in self._doors[:1] for name, n in server.counters.items()},
        }
