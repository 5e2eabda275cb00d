"""Long random lives of a daemon: the invariants hold whatever happens, in any order.

decide() checks its own invariants after each step. The state machine below also records which requests were
made, which client truly faulted and which work still runs, and checks the effects against that. At the end
all pending work completes; then every request has an answer and every slot has a domain.

Long because one state machine has all rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpsd.base.model import (
    Access,
    AddressKind,
    ClientId,
    KernelAction,
    KernelFault,
    Liveness,
    Nearby,
    NvmlXid,
    ProcessInstance,
    Relation,
    ServerState,
    UvmFaultType,
    ZonePolicy,
    ZoneRole,
)
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.draft import DEPARTED_KEPT, OPEN_FAULTS_KEPT
from mpsd.core.faults.hitrecords import HITS_KEPT
from mpsd.core.faults.unattributed import UNATTRIBUTED_RETAINED
from mpsd.core.lists import LIST_WAIT_S, QUIET_LOG, UNSURE, UNSURE_S
from mpsd.core.state import ClientState, DomainState, LogState, Policy
from tests.support.core import (
    UID,
    World,
    control_of,
    facts,
    kernel_xid,
    process,
    server_of,
    uvm,
)
from tests.support.long import of
from tests.support.randomlives import (
    ADDRESSES,
    GPUS,
    ROUNDS,
    SLOTS,
    TIMERS,
    WORDS,
    XIDS,
    Truth,
    check_record,
    is_absorbed,
    picks,
    pids,
    processes,
)


class Daemon(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.truth = Truth()

    @initialize(
        spare=st.booleans(),
        kill=st.booleans(),
        crowded=st.booleans(),
        zone=st.sampled_from(ZonePolicy),
        private=st.booleans(),
        on_demand=st.booleans(),
    )
    def begin(
        self, spare: bool, kill: bool, crowded: bool, zone: ZonePolicy, private: bool, on_demand: bool
    ) -> None:
        self.truth.private = private
        room: Any = {"max_slots": 2, "slot_idle_s": 1.0, "clients_per_domain": 2} if crowded else {}
        room |= {"on_demand": on_demand, "idle_s": 1.0}
        self.world = World(
            Policy(spare=spare, kill_victims_after_s=3.0 if kill else 0.0, zone_policy=zone, **room)
        )
        for slot, gpu, uid in SLOTS[:2]:
            self.do(ev.SlotWanted(slot, (gpu,), uid))
        for name in tuple(self.world.state.domains):
            self.start(name)

    # One step, and the effects it must not have

    def do(self, event: ev.Event) -> None:
        self.world.do(event)
        for effect in self.world.last:
            match effect:
                case fx.SwitchPath(domain=name):
                    assert name in self.truth.came_up, f"the path leads to {name}, which never came up"
                case fx.Terminate():
                    asked = isinstance(event, ev.EvictRequested | ev.GuardHit) or is_absorbed(event)
                    running = getattr(event, "liveness", None) is Liveness.RUNNING
                    assert asked and running, "asked though it may not be running"
                    assert effect.process not in self.truth.stopped, "terminate_client for a frozen client"
                case fx.Freeze(client=client):
                    assert isinstance(event, ev.GuardHit), f"{client} is stopped by {event}"
                    own = self.world.state.domains[client.domain].uid == UID
                    assert own or (client.domain, client.process) in self.truth.vouched
                    self.truth.stopped.add(client.process)
                case fx.Kill(client=client):
                    self.check_kill(event, client)
                case fx.ReleaseLease(client=client):
                    self.check_release(client)
                case fx.DropPath(slot=slot):
                    here = [d.id for d in self.world.state.domains.values() if d.slot == slot]
                    assert not any(c.id.domain in here for c in self.world.state.clients.values())
                case fx.Answer(request=request):
                    self.truth.answered[request] += 1
                case fx.Record():
                    check_record(self.world, self.truth, effect.record)
                case fx.ArmTimer(kind=kind, subject=subject):
                    self.truth.timers.append((kind, subject))
                case _:
                    pass

    def check_kill(self, event: ev.Event, client: ClientId) -> None:
        came = isinstance(event, ev.ClientNoticed | ev.ClientAttached)
        victims = isinstance(event, ev.TimerFired) and event.kind == "kill-victims"
        asked = isinstance(event, ev.EvictRequested | ev.TerminateFinished | ev.GuardHit) or is_absorbed(
            event
        )
        stop = isinstance(event, ev.StopRequested) or (came and self.world.state.stopping)
        # A client that mpsd froze would never leave a faulted domain.
        frozen = any(c.frozen is not None for c in self.world.state.spaces_of(client.process))
        lost = frozen and self.world.state.domains[client.domain].state is not DomainState.ACTIVE
        assert asked or stop or victims or lost, f"{client} is killed by {event}"
        uid = self.world.state.domains[client.domain].uid
        besides = (client.domain, client.process) in self.truth.vouched
        assert uid == UID or (besides and (asked or uid is None)), f"only a log says that {client} is one"

    def check_release(self, client: ClientId) -> None:
        domain = self.world.state.domains.get(client.domain)
        harmless = domain is None or domain.state in (DomainState.FAULTED, DomainState.STOPPING)
        # A client that departed before it was leased is an exception: core never held its lease.
        # Leases of contexts without work follow their process's home: test_core_ends.
        here = [gone for gone in self.world.state.departed if gone.id == client and gone.leased]
        held = any(not gone.waited for gone in here)
        if held and not harmless and client not in self.truth.ended:
            assert not any(self.world.state.living_of(client.domain)), f"work of {client} is let loose"

    # Picking: existing things, or made-up ones

    def domain_named(self, pick: int) -> str:
        names = sorted(self.world.state.domains)
        return names[pick % len(names)] if names and pick < 11 else "d99"

    def client_picked(self, pick: int) -> ClientId:
        clients = sorted(self.world.state.clients)
        return clients[pick % len(clients)] if clients and pick < 11 else ClientId("d99", process(99))

    def start(self, name: str) -> None:
        self.truth.came_up.add(name)
        alone = any(e.domain == name and not e.server for e in self.world.ever(fx.StartDomain))
        server = None if alone else server_of(name)
        self.do(ev.DomainStarted(name, control_of(name), server, self.truth.private))

    # Domains

    @rule(number=st.integers(0, 2), exclusive=st.booleans(), start=st.booleans())
    def want(self, number: int, exclusive: bool, start: bool) -> None:
        slot, gpu, uid = SLOTS[number]
        self.do(ev.SlotWanted(slot, (gpu,), uid, exclusive, start))

    @rule(pick=picks)
    def domain_starts(self, pick: int) -> None:
        starting = [d.id for d in self.world.state.domains.values() if d.state is DomainState.STARTING]
        self.start(starting[pick % len(starting)] if starting and pick < 9 else self.domain_named(pick))

    @rule(pick=picks)
    def domain_fails(self, pick: int) -> None:
        self.do(ev.DomainStartFailed(self.domain_named(pick), "no memory"))

    @rule(pick=picks)
    def domain_is_out_of_reach(self, pick: int) -> None:
        self.do(ev.DomainUnreachable(self.domain_named(pick), "its socket was removed"))

    @rule(pick=picks)
    def domain_stops(self, pick: int) -> None:
        self.do(ev.DomainStopped(self.domain_named(pick)))

    @rule(pick=picks, other=st.booleans())
    def control_dies(self, pick: int, other: bool) -> None:
        name = self.domain_named(pick)
        self.do(ev.ControlDied(name, process(5) if other else control_of(name)))

    @rule(pick=picks, other=st.booleans())
    def server_dies(self, pick: int, other: bool) -> None:
        name = self.domain_named(pick)
        self.do(ev.ServerDied(name, process(5) if other else server_of(name)))

    @rule(pick=picks, seen=st.sampled_from((None, 5, 0)), late=st.booleans())
    def server_fails_to_start(self, pick: int, seen: int | None, late: bool) -> None:
        name = self.domain_named(pick)
        server = None if seen is None else process(seen) if seen else server_of(name)
        self.do(ev.ServerStartFailed(name, "invalid argument", server, late and server is not None))

    @rule(pick=picks, uid=st.sampled_from((None, UID, 2000)))
    def server_seen(self, pick: int, uid: int | None) -> None:
        name = self.domain_named(pick)
        self.do(ev.ServerSeen(name, server_of(name), uid))

    @rule(pick=picks)
    def fatal_line(self, pick: int) -> None:
        before = self.world.state
        name = self.domain_named(pick)
        self.do(ev.ServerFatalLogged(name, "handling a fatal GPU error"))
        if name in before.domains and not before.domains[name].private:
            assert self.world.state.next_fault == before.next_fault, "text of an open log makes a record"

    @rule(pick=picks, state=st.sampled_from(ServerState))
    def server_state(self, pick: int, state: ServerState) -> None:
        self.do(ev.ServerStateSeen(self.domain_named(pick), state))

    @rule(pick=picks, log=st.sampled_from(LogState), unpinned=st.integers(0, 1))
    def log_state(self, pick: int, log: LogState, unpinned: int) -> None:
        self.do(ev.LogStateSeen(self.domain_named(pick), log, "a client has no line"))
        self.do(ev.ClientsUnpinned(self.domain_named(pick), unpinned))

    @rule(pick=picks, unknown=st.booleans(), age=st.sampled_from((0.0, 1.0)))
    def clients_listed(self, pick: int, unknown: bool, age: float) -> None:
        name = self.domain_named(pick)
        here = {c.id.process.pid for c in self.world.state.clients_of(name)}
        self.do(
            ev.ClientsListed(name, self.world.now - age, frozenset({*here, *([9999] if unknown else [])}))
        )

    @rule(number=st.integers(0, 2), exclusive=st.booleans())
    def mode(self, number: int, exclusive: bool) -> None:
        self.do(ev.ModeSeen(SLOTS[number][0], exclusive))

    @rule(on=st.booleans(), gpus=st.sampled_from(((), GPUS[:1], GPUS)))
    def drain(self, on: bool, gpus: tuple[str, ...]) -> None:
        self.do(ev.DrainRequested(gpus, on))

    @rule(dice=st.integers(0, 19))
    def stop(self, dice: int) -> None:
        if dice == 0:
            self.do(ev.StopRequested())

    # Adoption

    @rule(
        number=st.integers(0, 2),
        pick=st.integers(1, 30),
        role=st.sampled_from(ev.DomainRole),
        state=st.sampled_from(DomainState),
    )
    def adopt(self, number: int, pick: int, role: ev.DomainRole, state: DomainState) -> None:
        name = f"d{pick}"
        if name not in self.world.state.domains:
            self.truth.came_up.add(name)
        found = (control_of(name), server_of(name), ServerState.ACTIVE, frozenset[ProcessInstance]())
        private = self.truth.private
        self.do(ev.DomainAdopted(name, SLOTS[number][0], role, state, *found, private))

    @rule(pick=picks, who=processes, spaces=st.sampled_from(((), (0,), (0, 1), (2,))))
    def lease_restored(self, pick: int, who: ProcessInstance, spaces: tuple[int, ...]) -> None:
        self.truth.ended = {c for c in self.truth.ended if c.process != who}
        self.truth.vouched.add((self.domain_named(pick), who))
        self.do(ev.LeaseRestored(self.domain_named(pick), facts(who.pid, who.start_ticks), spaces))

    @rule()
    def adoption_done(self) -> None:
        self.do(ev.AdoptionDone())

    # Clients

    @rule(pick=picks, who=processes, listed=st.booleans())
    def notice(self, pick: int, who: ProcessInstance, listed: bool = False) -> None:
        name = self.domain_named(pick)
        if listed:
            self.truth.vouched.add((name, who))
        self.do(ev.ClientNoticed(name, facts(who.pid, who.start_ticks), listed))

    @rule(pick=picks)
    def foreign(self, pick: int) -> None:
        self.do(ev.ForeignNoticed(self.domain_named(pick)))

    @rule(pick=picks, listed=st.frozensets(pids, max_size=3), waits=st.booleans())
    def list_of_clients(self, pick: int, listed: frozenset[int], waits: bool) -> None:
        """Only a process that a log line alone names is forgotten for its absence from a list."""
        self.world.wait(self.world.state.policy.attach_deadline_s if waits else 0.0)
        before = self.world.state.clients
        self.do(ev.ClientsListed(self.domain_named(pick), self.world.now, listed))
        for client in (c for name, c in before.items() if name not in self.world.state.clients):
            domain = self.world.state.domains[client.id.domain]
            spoken_for = domain.private and domain.owns(client.facts)
            assert not (client.listed or (client.leased and spoken_for)) or not client.living
            assert client.id.process.pid not in listed or not client.living

    @rule(pick=picks, who=processes, spaces=st.integers(1, 2))
    def join(self, pick: int, who: ProcessInstance, spaces: int) -> None:
        self.notice(pick, who)
        for attach in [e for e in self.world.last if isinstance(e, fx.Attach)]:
            self.truth.vouched.add((attach.domain, who))
            self.truth.ended -= {ClientId(attach.domain, who, attach.space + n) for n in range(spaces)}
            self.do(ev.ClientAttached(attach.domain, who, spaces, True, space=attach.space))

    @rule(pick=picks, spaces=st.integers(0, 2), tracked=st.booleans())
    def attached(self, pick: int, spaces: int, tracked: bool) -> None:
        client = self.client_picked(pick)
        self.truth.vouched.add((client.domain, client.process))
        self.truth.ended -= {replace(client, space=client.space + n) for n in range(spaces)}
        self.do(
            ev.ClientAttached(client.domain, client.process, spaces, tracked, space=client.space),
        )

    @rule(pick=picks)
    def attach_fails(self, pick: int) -> None:
        client = self.client_picked(pick)
        self.do(ev.AttachFailed(client.domain, client.process, "not permitted", client.space))

    @rule(pick=picks, pid=pids)
    def refused(self, pick: int, pid: int) -> None:
        self.do(ev.ClientRefused(self.domain_named(pick), pid))

    @rule(pick=picks)
    def dies(self, pick: int) -> None:
        who = self.client_picked(pick).process
        self.truth.ended -= {c.id for c in self.world.state.spaces_of(who) if c.living}
        self.truth.stopped.discard(who)
        self.do(ev.ClientDied(who))

    @rule(pick=picks)
    def kill_is_withheld(self, pick: int) -> None:
        self.do(ev.KillRefused(self.client_picked(pick).process, "not its user's own"))

    @rule(pick=picks)
    def leaves(self, pick: int) -> None:
        who = self.client_picked(pick).process
        self.truth.ended -= {c.id for c in self.world.state.spaces_of(who) if c.living}
        self.truth.stopped.discard(who)
        self.do(ev.ClientLeft(who, "exec"))

    @rule(pick=picks)
    def work_ends(self, pick: int) -> None:
        client = self.client_picked(pick)
        self.truth.ended.add(client)
        self.do(ev.WorkEnded(client, "its channels are gone"))

    @rule(pick=picks)
    def work_runs(self, pick: int) -> None:
        self.do(ev.WorkRuns((self.client_picked(pick),), "a kernel"))

    @rule(pick=picks)
    def work_is_not_visible(self, pick: int) -> None:
        self.do(ev.WorkNotVisible(self.client_picked(pick)))

    # Signs of faults

    @rule(
        pick=picks,
        address=st.sampled_from(ADDRESSES),
        access=st.sampled_from((Access.WRITE, Access.WRITE, Access.PREFETCH)),
        kind=st.sampled_from((UvmFaultType.INVALID_PTE, UvmFaultType.WRITE)),
    )
    def uvm_fault(self, pick: int, address: int, access: Access, kind: UvmFaultType) -> None:
        client = self.client_picked(pick)
        if access is not Access.PREFETCH:
            self.truth.faulted.add(client.process)
        self.do(ev.UvmFatal(client, uvm(address, access, kind)))

    @rule(
        xid=st.sampled_from(XIDS),
        text=st.sampled_from(WORDS),
        pick=picks,
        whose=st.sampled_from(("nobody", "client", "server", "stranger")),
        gpu=st.sampled_from((*GPUS, None)),
    )
    def xid_line(self, xid: int, text: str, pick: int, whose: str, gpu: str | None) -> None:
        pid = {
            "nobody": None,
            "client": self.client_picked(pick).process.pid,
            "server": server_of(self.domain_named(pick)).pid,
            "stranger": 4242,
        }[whose]
        self.world.now += 0.01
        name = "stack" if pid else ""
        self.do(kernel_xid(xid, text, pid, name, gpu))

    @precondition(lambda self: any(s.logged for s in self.world.state.strays))
    @rule(pick=picks, lives=st.booleans(), on_mps=st.sampled_from((None, False, True)))
    def identified(self, pick: int, lives: bool, on_mps: bool | None) -> None:
        asked = [s for s in self.world.state.strays if s.logged is not None]
        stray = asked[pick % len(asked)]
        assert stray.logged is not None
        found = facts(stray.logged.pid) if lives else None
        self.do(ev.ProcessIdentified(stray.gpu, stray.logged, found, on_mps))

    @rule(xid=st.sampled_from(XIDS), gpu=st.sampled_from(GPUS))
    def nvml_xid(self, xid: int, gpu: str) -> None:
        self.do(ev.NvmlXidSeen(NvmlXid(gpu, xid)))

    @rule(pick=picks, gpu=st.sampled_from(GPUS))
    def server_at_fault(self, pick: int, gpu: str) -> None:
        domain = self.domain_named(pick)
        self.do(ev.ServerAtFault(domain, server_of(domain), gpu))

    # Guard zones

    @rule(
        pick=picks,
        role=st.sampled_from(ZoneRole),
        liveness=st.sampled_from((Liveness.RUNNING, Liveness.RUNNING, Liveness.STOPPED)),
        access=st.sampled_from((Access.WRITE, Access.WRITE, Access.PREFETCH)),
        count=st.integers(1, 3),
    )
    def guard_hit(self, pick: int, role: ZoneRole, liveness: Liveness, access: Access, count: int) -> None:
        client = self.client_picked(pick)
        if access is not Access.PREFETCH:
            self.truth.faulted.add(client.process)
        event = replace(uvm(ADDRESSES[1], access), fatal=False)
        self.do(ev.GuardHit(client, event, role, count, liveness))

    @rule(
        pick=picks,
        action=st.sampled_from(KernelAction),
        liveness=st.sampled_from((Liveness.RUNNING, Liveness.RUNNING, Liveness.STOPPED, Liveness.DEAD)),
        faults=st.integers(1, 9),
        known=st.booleans(),
    )
    def kernel_record(
        self, pick: int, action: KernelAction, liveness: Liveness, faults: int, known: bool
    ) -> None:
        client = self.client_picked(pick)
        maker = client.process if known and action is not KernelAction.ORPHAN else None
        self.tell_of_kernel(action, maker, liveness, faults)

    @rule(
        pick=picks,
        liveness=st.sampled_from((Liveness.RUNNING, Liveness.RUNNING, Liveness.STOPPED)),
        faults=st.integers(1, 9),
    )
    def sunk(self, pick: int, liveness: Liveness, faults: int) -> None:
        """A case that the rule above rarely reaches: the client is alive and may be evicted."""
        living = sorted({c.id.process for c in self.world.state.clients.values() if c.living and c.leased})
        if living:
            self.tell_of_kernel(KernelAction.SUNK, living[pick % len(living)], liveness, faults)

    def tell_of_kernel(
        self, action: KernelAction, maker: ProcessInstance | None, liveness: Liveness, faults: int
    ) -> None:
        if maker is not None and action in (KernelAction.SUNK, KernelAction.REPORTED, KernelAction.REFUSED):
            self.truth.faulted.add(maker)
        fault = KernelFault(1, action, faults % 3, maker, uvm(ADDRESSES[1]), "graphics", "", faults, GPUS[0])
        self.do(ev.KernelFaultSeen(fault, liveness))
        if self.world.made(fx.Acknowledge):
            assert maker is not None and action is KernelAction.SUNK
            living = [c for c in self.world.state.spaces_of(maker) if c.living]
            going = [c for c in living if c.eviction is not None]
            sent = any(c.eviction is not None and c.eviction.killed is not None for c in going)
            assert sent or any(c.state is ClientState.TERMINATING for c in going), "nobody puts it out"

    @rule(number=st.integers(0, 30), kernel=st.sampled_from((None, "wild")))
    def hit_described(self, number: int, kernel: str | None) -> None:
        nearby = Nearby(Relation.PAST, 4096, True, 0x7F0000000000, 4096, 1, 3.0)
        self.do(ev.HitDescribed(number, nearby, kernel))

    @rule(pick=picks, policy=st.sampled_from(ZonePolicy))
    def zone_policy(self, pick: int, policy: ZonePolicy) -> None:
        self.do(ev.ZonePolicySet(self.client_picked(pick).process, policy))

    @rule(pick=picks)
    def freeze_restored(self, pick: int) -> None:
        self.do(ev.FreezeRestored(self.client_picked(pick).process))

    @rule(pick=picks)
    def freeze_refused(self, pick: int) -> None:
        who = self.client_picked(pick).process
        self.truth.stopped.discard(who)
        self.do(ev.FreezeRefused(who, "not its user's own"))

    @rule(pick=picks, liveness=st.sampled_from(Liveness))
    def liveness_seen(self, pick: int, liveness: Liveness) -> None:
        who = self.client_picked(pick).process
        if liveness is Liveness.RUNNING:
            self.truth.stopped.discard(who)
        self.do(ev.LivenessSeen(who, liveness))

    @rule(number=st.integers(0, 30), lies=st.sampled_from(AddressKind))
    def inspected(self, number: int, lies: AddressKind) -> None:
        self.do(ev.Inspected(number, lies))

    # Eviction and time

    @rule(pick=picks, liveness=st.sampled_from(Liveness), as_user=st.booleans())
    def evict(self, pick: int, liveness: Liveness, as_user: bool) -> None:
        request = f"r{len(self.truth.asked)}"
        self.truth.asked.add(request)
        owner = UID if as_user else None
        process = self.client_picked(pick).process
        self.do(ev.EvictRequested(process, liveness, request, "asked", owner=owner))

    @rule(pick=picks, done=st.booleans())
    def terminate_finishes(self, pick: int, done: bool) -> None:
        self.do(ev.TerminateFinished(self.client_picked(pick).process, done, "answer"))

    @precondition(lambda self: bool(self.truth.timers))
    @rule(pick=st.integers(0, 63))
    def timer_fires(self, pick: int) -> None:
        self.do(ev.TimerFired(*self.truth.timers.pop(pick % len(self.truth.timers))))

    @rule(kind=st.sampled_from(TIMERS), subject=st.sampled_from(("a", "d1", "d99", "10@1", "GPU-0")))
    def timer_strays(self, kind: str, subject: str) -> None:
        self.do(ev.TimerFired(kind, subject))

    @rule(seconds=st.sampled_from((0.001, 0.2, 1.0, 3.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    # Invariants

    @invariant()
    def state_is_bounded(self) -> None:
        state = self.world.state
        assert len(state.departed) <= DEPARTED_KEPT
        assert len(state.open_faults) <= OPEN_FAULTS_KEPT
        assert len(state.strays) <= UNATTRIBUTED_RETAINED
        assert len(state.hits) <= HITS_KEPT
        assert len(state.tallies) <= len(state.clients)
        assert not (state.stopping and any(s.active or s.spare for s in state.slots.values()))

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        assert set(self.truth.answered) <= self.truth.asked
        assert all(count == 1 for count in self.truth.answered.values())

    @invariant()
    def the_path_leads_where_the_slot_does(self) -> None:
        for slot in self.world.state.slots.values():
            active = self.world.state.domains[slot.active] if slot.active else None
            if active is not None and active.state is DomainState.ACTIVE:
                assert self.world.path(slot.id) == active.id

    def teardown(self) -> None:
        """Complete all pending work, in the order in which the world would."""
        self.do(ev.AdoptionDone())
        for name in tuple(self.world.state.domains):
            self.do(ev.LogStateSeen(name, LogState.WORKS))
            self.do(ev.ClientsUnpinned(name, 0))
        self.world.wait(max(UNSURE_S, LIST_WAIT_S))
        for name in tuple(self.world.state.domains):
            for kind in (QUIET_LOG, UNSURE, "ask"):
                self.do(ev.TimerFired(kind, name))
        for _ in range(ROUNDS):
            self.play_out()
        state = self.world.state
        assert not state.clients
        assert set(self.truth.answered) == self.truth.asked, "somebody was left without an answer"
        for slot in state.slots.values():
            if not state.stopping:
                assert slot.active is not None, f"slot {slot.id} has no domain"
                assert state.domains[slot.active].state is DomainState.ACTIVE
                may_lack = slot.exclusive or not state.policy.spare or state.policy.on_demand
                assert may_lack or slot.spare is not None
        roles = {d for s in state.slots.values() for d in (s.active, s.spare) if d}
        assert set(state.domains) == roles, "a domain that serves nobody is left over"

    def play_out(self) -> None:
        for client in tuple(self.world.state.clients.values()):
            who = client.id.process
            self.do(ev.TerminateFinished(who, False, "no answer"))
            self.do(ev.ClientDied(who))
            self.truth.ended.add(client.id)
            self.do(ev.WorkEnded(client.id, "its channels are gone"))
        for name, domain in tuple(self.world.state.domains.items()):
            if domain.state is DomainState.STARTING:
                self.start(name)
            elif domain.state is DomainState.STOPPING:
                self.do(ev.DomainStopped(name))
            elif domain.state is DomainState.FAULTED:
                self.do(ev.ServerStateSeen(name, ServerState.ACTIVE))
            elif domain.server is None and domain.state in (DomainState.ACTIVE, DomainState.WARM):
                self.world.wait(1.0)
                self.do(ev.ServerStateSeen(name, ServerState.GONE))
        # A slot that has had many domains waits for the next one.
        self.world.wait(60.0)
        for name in tuple(self.world.state.domains):
            self.do(ev.ClientsListed(name, self.world.now, frozenset()))
        for slot in tuple(self.world.state.slots):
            self.do(ev.TimerFired("ensure", slot))


TestDaemon = Daemon.TestCase
TestDaemon.settings = settings(
    derandomize=True,
    max_examples=of(150, 75),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
