"""Builders for tests of core: a world that feeds events to decide() and keeps the resulting effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mpsd.base.model import (
    Access,
    ClientId,
    KernelXid,
    Liveness,
    NvmlXid,
    ProcessFacts,
    ProcessInstance,
    Requester,
    ServerState,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.engine import decide
from mpsd.core.faults.records import FaultRecord, Party
from mpsd.core.state import Client, ClientState, Domain, DomainState, Policy, State

GPU = "GPU-0"
SLOT = "gpu0.uid1000"
UID = 1000
REQUESTER = Requester(0, 0, 77, "/system.slice")
E = TypeVar("E", bound=fx.Effect)

OUT_OF_RANGE = "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address"
MISALIGNED = "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address"
STACK = "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Stack Error"
REGISTER = "Graphics Exception: ESR 0x504730=0x102000e 0x504734=0x24"


def process(pid: int, start: int = 1) -> ProcessInstance:
    return ProcessInstance(pid, start)


def facts(pid: int, start: int = 1, uid: int = UID) -> ProcessFacts:
    return ProcessFacts(process(pid, start), 1, uid, uid, f"program{pid}", "/usr/bin/program")


def control_of(domain: str) -> ProcessInstance:
    return process(100_000 + int(domain[1:]))


def server_of(domain: str) -> ProcessInstance:
    return process(200_000 + int(domain[1:]))


def uvm(
    address: int = 0x7F0000001000,
    access: Access = Access.WRITE,
    fault_type: UvmFaultType = UvmFaultType.INVALID_PTE,
    reason: UvmReason = UvmReason.INVALID_ADDRESS,
) -> UvmEvent:
    return UvmEvent(True, fault_type, access, reason, address, 123)


def mmu_text(address: int, client: str = "GPCCLIENT_T1_0") -> str:
    """Return the text of an MMU fault line; the driver splits the address in two halves."""
    where = f"0x{address >> 32:x}_{address & 0xFFFFFFFF:08x}"
    return f"MMU Fault: ENGINE GRAPHICS {client} faulted @ {where}. Fault is of type FAULT_PTE"


def kernel_xid(xid: int, text: str, pid: int | None, name: str, gpu: str | None) -> ev.KernelXidSeen:
    """Return an Xid line as the driver prints it."""
    who = f", pid={pid}, name={name}" if pid is not None else ""
    line = f"NVRM: Xid (PCI:0000:01:00): {xid}{who}, {text}"
    return ev.KernelXidSeen(gpu, KernelXid("0000:01:00.0", xid, pid, name, line, 1))


class World:
    """The state of one daemon. `now` moves only when a test moves it; every effect is kept, in order."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.state = State(policy=policy or Policy(), log_read_since=0.0)
        self.now = 100.0
        self.last: tuple[fx.Effect, ...] = ()
        self.effects: list[fx.Effect] = []
        # Random plays ask after every event, so a search through all effects would be most of their time.
        self._by_kind: dict[type[fx.Effect], list[fx.Effect]] = {}

    def do(self, event: ev.Event) -> tuple[fx.Effect, ...]:
        decision = decide(self.state, event, self.now)
        self.state, self.last = decision.state, decision.effects
        self.effects += decision.effects
        for effect in decision.effects:
            self._by_kind.setdefault(type(effect), []).append(effect)
        return self.last

    def forget(self) -> None:
        """Forget all effects so far."""
        self.effects.clear()
        self._by_kind.clear()

    def wait(self, seconds: float) -> World:
        self.now += seconds
        return self

    # Queries

    def made(self, kind: type[E]) -> list[E]:
        """Return the last event's effects of one kind."""
        return [e for e in self.last if isinstance(e, kind)]

    def ever(self, kind: type[E]) -> list[E]:
        return [e for e in self._by_kind.get(kind, ()) if isinstance(e, kind)]

    def record(self) -> FaultRecord:
        """Return the newest revision of the newest record."""
        return self.ever(fx.Record)[-1].record

    def records(self) -> dict[int, FaultRecord]:
        return {e.record.id: e.record for e in self.ever(fx.Record)}

    def domain(self, name: str) -> Domain:
        return self.state.domains[name]

    def client(self, domain: str, pid: int, space: int = 0, start: int = 1) -> Client:
        return self.state.clients[ClientId(domain, process(pid, start), space)]

    def client_states(self) -> dict[int, ClientState]:
        return {c.id.process.pid: c.state for c in self.state.clients.values()}

    def path(self, slot: str = SLOT) -> str | None:
        """Return the target of the slot's stable path."""
        switches = [e.domain for e in self.ever(fx.SwitchPath) if e.slot == slot]
        return switches[-1] if switches else None

    def pauses(self, record: FaultRecord) -> dict[int, float | None]:
        """Return the pause [ms] of each client that the record lists as moved."""
        return {m.party.id.process.pid: m.pause_ms for m in record.moved}

    def pids(self, parties: Sequence[Party]) -> list[int]:
        return [p.id.process.pid for p in parties]

    # Events

    def want(self, slot: str = SLOT, gpu: str = GPU, uid: int | None = UID, exclusive: bool = False) -> None:
        self.do(ev.SlotWanted(slot, (gpu,), uid, exclusive))

    def started(self, name: str, *, private: bool | None = None, server: bool = True) -> None:
        """Let a domain start. `private`: by default if it belongs to a user."""
        owned = name in self.state.domains and self.state.domains[name].uid is not None
        instance = server_of(name) if server else None
        self.do(ev.DomainStarted(name, control_of(name), instance, owned if private is None else private))

    def stopped(self, name: str) -> None:
        self.do(ev.DomainStopped(name))

    def ready(self, exclusive: bool = False, *, uid: int | None = UID, private: bool | None = None) -> World:
        """Make domain d1 active and, unless exclusive, d2 its standby domain. `private`: see started()."""
        self.want(uid=uid, exclusive=exclusive)
        self.started("d1", private=private)
        if not exclusive:
            self.started("d2", private=private)
        return self

    def join(self, *pids: int, domain: str = "d1", spaces: int = 1) -> None:
        for pid in pids:
            self.do(ev.ClientNoticed(domain, facts(pid)))
            self.do(ev.ClientAttached(domain, process(pid), spaces, tracked=True))

    def die(self, pid: int) -> None:
        self.do(ev.ClientDied(process(pid)))

    def work_ended(self, pid: int) -> None:
        """End the work of every client of the process."""
        ids = [c.id for c in self.state.spaces_of(process(pid))] or [ClientId("d1", process(pid))]
        self.last = tuple(e for i in ids for e in self.do(ev.WorkEnded(i, "its channels are gone")))

    def fault(self, pid: int, event: UvmEvent | None = None, domain: str = "d1") -> None:
        self.do(ev.UvmFatal(ClientId(domain, process(pid)), event or uvm()))

    def kernel(
        self, xid: int, text: str = "", pid: int | None = None, name: str = "", gpu: str | None = GPU
    ) -> None:
        self.do(kernel_xid(xid, text, pid, name, gpu))

    def nvml(self, xid: int, gpu: str = GPU) -> None:
        self.do(ev.NvmlXidSeen(NvmlXid(gpu, xid)))

    def evict(
        self,
        pid: int,
        request: str = "r1",
        liveness: Liveness = Liveness.RUNNING,
        owner: int | None = None,
    ) -> None:
        self.do(ev.EvictRequested(process(pid), liveness, request, "asked", owner, REQUESTER))

    def terminate_finished(self, pid: int, done: bool = True) -> None:
        self.do(ev.TerminateFinished(process(pid), done, "done" if done else "no answer"))

    def timer(self, kind: str, subject: object) -> None:
        self.do(ev.TimerFired(kind, str(subject)))

    def lingers(self, pid: int) -> None:
        """Let the linger limit pass; each requested check then finds work."""
        self.timer("linger", process(pid))
        asked = [e.client for e in self.made(fx.ConfirmWork)]
        lives = [
            tuple(c for c in asked if c.domain == name) for name in dict.fromkeys(c.domain for c in asked)
        ]
        self.last = tuple(e for life in lives for e in self.do(ev.WorkRuns(life, "a kernel")))

    def server_state(self, name: str, state: ServerState) -> None:
        self.do(ev.ServerStateSeen(name, state))

    def adopt(
        self,
        name: str,
        role: ev.DomainRole,
        state: DomainState,
        *,
        server: bool = True,
        server_state: ServerState = ServerState.ACTIVE,
    ) -> None:
        instance = server_of(name) if server else None
        owned = SLOT in self.state.slots and self.state.slots[SLOT].uid is not None
        self.do(
            ev.DomainAdopted(name, SLOT, role, state, control_of(name), instance, server_state, private=owned)
        )
