"""The daemon as operations see it, as protocols: operations never import the assembly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from mpsd.api.lastfaults import LastFaults
from mpsd.api.percentages import Percentages
from mpsd.api.statusview import GpuView
from mpsd.base.conditions import Condition
from mpsd.base.model import ClientId, Gpu, ProcessInstance
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.clients.isolation import KernelIsolation
from mpsd.config.layout import Layout
from mpsd.config.schema import Config
from mpsd.core.events import Event
from mpsd.core.state import Domain, Policy, State
from mpsd.gpu.base import Backend, Check
from mpsd.limits.keeper import LimitKeeper
from mpsd.vault.holdings import Vault

Answer = tuple[bool, Mapping[str, object]]


class Runtime(Protocol):
    @property
    def state(self) -> State: ...

    def post(self, event: Event) -> None: ...


class Records(Protocol):
    def records(self) -> list[dict[str, Any]]: ...


class Bulletin(Protocol):
    @property
    def journal(self) -> Records: ...

    @property
    def failovers(self) -> Records | None: ...

    @property
    def last_faults(self) -> LastFaults: ...

    def expect(self) -> tuple[str, asyncio.Future[Answer]]:
        """Return a new request id and the future that its answer resolves."""

    async def answered(self, request: str, future: asyncio.Future[Answer], deadline_s: float) -> Answer:
        """Wait for an answer. Raise DeadlineError."""


class StateWriter(Protocol):
    def shown(self) -> None:
        """Write the state file before the state is shown to a peer."""

    def pending(self) -> str:
        """Write the state file now. Return why it is not durable, empty when it is."""


class Failover(Protocol):
    @property
    def offered_at(self) -> str: ...

    def shown(self) -> Mapping[str, Any]: ...

    def check(self) -> Check: ...


class NodeProtection(Protocol):
    """The protection levels of the node: mpsd.daemon.protection."""

    def allows(self, wanted: ProtectionLevel, gpus: Iterable[str] = (), uid: int | None = None) -> bool: ...

    def of(self, gpus: Iterable[str] = (), uid: int | None = None) -> Protection: ...

    def view(self) -> Mapping[str, Any]: ...

    def views(self) -> Mapping[str, Mapping[str, Any]]: ...

    def checks(self) -> Sequence[Check]: ...

    def stalls(self, state: State) -> Mapping[str, float | None]: ...

    def stall_checks(self, state: State) -> Sequence[Check]: ...


class Node(Protocol):
    """The daemon as operations see it."""

    @property
    def config(self) -> Config: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def pid(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def limits(self) -> LimitKeeper: ...
    @property
    def gpus(self) -> tuple[Gpu, ...]: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def bulletin(self) -> Bulletin: ...
    @property
    def saving(self) -> StateWriter: ...
    @property
    def vault(self) -> Vault: ...
    @property
    def isolation(self) -> KernelIsolation: ...
    @property
    def failover(self) -> Failover: ...
    @property
    def protection(self) -> NodeProtection: ...
    @property
    def percentages(self) -> Percentages: ...

    def now(self) -> float:
        """Return monotonic seconds."""

    def uptime_s(self) -> float: ...

    async def gpu_views(self) -> Sequence[GpuView]: ...

    def protections(self) -> Mapping[ClientId, Sequence[str]]: ...

    def guard_checked(self) -> Mapping[ClientId, float | None]: ...

    def conditions(self) -> list[Condition]: ...

    def refusal(self, gpu: str | None) -> Condition | None:
        """Return why a new client must not join at this GPU, or None. Raise NotFoundError."""

    def percentage_limit(self, domain: Domain) -> float | None:
        """Return the thread percentage that a domain's control daemon gives to clients."""

    def pending_work(self) -> Mapping[ProcessInstance, str]: ...

    def extra_counters(self) -> dict[str, int]: ...

    def orphan_rows(self) -> list[dict[str, Any]]: ...

    def guard_zones(self) -> Mapping[ProcessInstance, Mapping[str, Any]]: ...

    def holders(self) -> list[dict[str, Any]]: ...

    def gpu_named(self, name: str) -> Gpu:
        """Return the GPU with this index, UUID or unique UUID prefix. Raise NotFoundError."""

    async def path_for(self, uid: int, gpu: str | None, *, shared: bool, admin: bool) -> str:
        """Return the stable pipe directory of a user. Raise NotReadyError, BusyError, DeadlineError."""

    async def list_clients(self, domain: str) -> None:
        """Ask the server of a domain for its clients, and post what it lists."""
