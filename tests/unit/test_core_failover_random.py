"""Long random lives of a daemon with fail-over: test_core_random plus client messages, true or false."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from mpsd.base.model import (
    ClientId,
    Confidence,
    ExceptionOwner,
    FailoverMode,
    ProcessInstance,
    SnapshotBudget,
)
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.draft import FAILOVERS_MOST
from mpsd.core.failover import reports as mev
from mpsd.core.failover.budgets import gpus_of
from mpsd.core.failover.participants import (
    OFFERED,
    OPAQUE_KEPT,
    Excess,
    FailoverRecord,
    Outcome,
    ParticipantOutcome,
    Standing,
)
from mpsd.core.state import DomainState, Policy
from tests.support.core import UID, World, facts
from tests.support.long import of
from tests.unit import test_core_random as base

MOVES = 2
generations = st.integers(0, 12)


class FailoverDaemon(base.Daemon):
    # A frozen client that dies when its domain faults is covered by the other state machine.
    freeze_restored = None
    zone_policy = None

    def __init__(self) -> None:
        super().__init__()
        self.said_ready: set[tuple[ProcessInstance, int]] = set()
        self.moves: dict[ProcessInstance, list[float]] = {}
        self.connected: set[ProcessInstance] = set()

    @initialize(
        spare=st.booleans(),
        kill=st.booleans(),
        copies=st.sampled_from((True, True, True, False)),
        put_out=st.booleans(),
        most=st.sampled_from((2, 48)),
        standbys=st.sampled_from((1, 12)),
    )
    def begin(  # type: ignore[override]
        self, spare: bool, kill: bool, copies: bool, put_out: bool, most: int, standbys: int
    ) -> None:
        self.world = World(
            Policy(
                spare=spare,
                kill_victims_after_s=3.0 if kill else 0.0,
                failover=FailoverMode.KEEP,
                moves_per_minute=MOVES,
                evict_offender=put_out,
                clients_per_domain=most,
                standby_contexts=standbys,
            )
        )
        for slot, gpu, uid in base.SLOTS[:2]:
            self.do(ev.SlotWanted(slot, (gpu,), uid))
        for name in tuple(self.world.state.domains):
            self.start(name)
        self.do(ev.DriverFilesSeen("" if copies else "the disk is full"))

    def do(self, event: ev.Event) -> None:
        super().do(event)
        for effect in self.world.last:
            if isinstance(effect, fx.Move):
                self.check_move(effect)
            elif isinstance(effect, fx.OfferStandby | fx.StandDown):
                assert effect.process in self.connected
            if isinstance(effect, fx.OfferStandby):
                assert self.world.state.members[effect.process].excess is None

    def check_move(self, effect: fx.Move) -> None:
        state, who = self.world.state, effect.process
        assert who in self.connected and (who, effect.generation) in self.said_ready
        home = state.members[who].home
        assert state.members[who].excess is None, f"{who} has left"
        # A process that lost its contexts with an earlier server of the active domain moves to the standby.
        bereft = home in state.domains and who in state.domains[home].bereft
        allowed = {DomainState.ACTIVE, *([DomainState.WARM] if bereft else [])}
        assert state.domains[f"d{effect.generation}"].state in allowed
        sure = [r for r in state.open_faults if r.domain == home and r.confidence is Confidence.CERTAIN]
        hang = [r for r in sure if r.fault_class == "hang" or r.hit is not None]
        named = {r.offender.id.process for r in sure if r not in hang and r.offender}
        assert who not in named, f"{who} was named"
        recent = [t for t in self.moves.get(who, []) if self.world.now - t < 60]
        assert len(recent) < MOVES
        self.moves[who] = [*recent, self.world.now]

    def check_kill(self, event: ev.Event, client: ClientId) -> None:
        named = [
            r.offender.id.process
            for r in self.world.state.open_faults
            if r.confidence is Confidence.CERTAIN and r.offender is not None
        ]
        if client.process in named and self.world.state.failovers:
            domain = self.world.state.domains[client.domain]
            assert domain.uid == UID or (client.domain, client.process) in self.truth.vouched
        else:
            super().check_kill(event, client)

    @rule(
        pick=base.picks,
        mode=st.sampled_from((FailoverMode.KEEP, FailoverMode.KEEP, FailoverMode.OFF)),
        generation=st.sampled_from((0, 0, 0, 1, 2, 5)),
    )
    def comes(self, pick: int, mode: FailoverMode, generation: int) -> None:
        who = self.client_picked(pick).process
        self.connected.add(who)
        # It forgets what it was told earlier.
        self.said_ready = {(p, g) for p, g in self.said_ready if p != who}
        self.do(mev.MemberCame(who, UID, mode, generation, budgets=True))

    @rule(pick=base.picks)
    def exceeds(self, pick: int) -> None:
        excess = Excess(SnapshotBudget.MEMORY, 2, 1)
        self.do(mev.MemberExceeds(self.client_picked(pick).process, excess))

    @rule(who=base.processes, number=st.integers(0, 2))
    def takes_part(self, who: ProcessInstance, number: int) -> None:
        """The success path: join, say HELLO, create a second context, become ready."""
        slot = self.world.state.slots.get(base.SLOTS[number][0])
        if slot is None or slot.active is None:
            return
        for domain in (slot.active, None):
            member = self.world.state.members.get(who)
            target = domain or (f"d{member.generation}" if member is not None and member.generation else None)
            for name in tuple(self.world.state.domains):
                if self.world.state.domains[name].state is DomainState.STARTING:
                    self.start(name)
            if target is None or target not in self.world.state.domains:
                return
            self.do(ev.ClientNoticed(target, facts(who.pid, who.start_ticks)))
            for attach in [e for e in self.world.last if isinstance(e, fx.Attach)]:
                self.truth.vouched.add((attach.domain, who))
                self.truth.ended.discard(ClientId(attach.domain, who, attach.space))
                self.do(ev.ClientAttached(attach.domain, who, 1, True, space=attach.space, apart=True))
            if domain is not None:
                self.connected.add(who)
                self.said_ready = {(p, g) for p, g in self.said_ready if p != who}
                self.do(mev.MemberCame(who, UID, FailoverMode.KEEP, budgets=True))
        member = self.world.state.members.get(who)
        if member is not None:
            self.said_ready.add((who, member.generation))
            self.do(mev.MemberReady(who, member.generation, 1, 1))

    @rule(pick=base.picks)
    def goes(self, pick: int) -> None:
        who = self.client_picked(pick).process
        self.connected.discard(who)
        self.do(mev.MemberLeft(who))

    @rule(pick=base.picks, domain=base.picks)
    def restored(self, pick: int, domain: int) -> None:
        who = self.client_picked(pick).process
        clients = [c for c in self.world.state.spaces_of(who) if c.living]
        if who not in self.connected and clients:
            home = self.domain_named(domain)
            self.do(mev.MemberRestored(who, UID, FailoverMode.KEEP, home))

    @rule(pick=base.picks, number=st.integers(1, 40), outcome=st.sampled_from(Outcome), to=generations)
    def failover_restored(self, pick: int, number: int, outcome: Outcome, to: int) -> None:
        who = self.client_picked(pick).process
        entries = (ParticipantOutcome(who, UID, "", outcome, told_ms=0.0),)
        target = f"d{to}" if to else None
        record = FailoverRecord(
            number, self.world.now - 1, "s", "d1", target, to, "fault", False, 1, 0.0, None, entries
        )
        known = self.world.state.next_failover
        self.do(mev.FailoverRestored(record, frozenset({who} if pick % 2 else ())))
        assert self.world.state.next_failover == max(known, number + 1)

    @rule(pick=base.picks, true=st.booleans(), generation=generations)
    def ready(self, pick: int, true: bool, generation: int) -> None:
        who = self.client_picked(pick).process
        member = self.world.state.members.get(who)
        if true and member is not None and member.generation:
            generation = member.generation
            self.notice(0 if f"d{generation}" not in self.world.state.domains else 1, who)
        self.said_ready.add((who, generation))
        self.do(mev.MemberReady(who, generation, 1, 1))

    @rule(pick=base.picks, generation=generations, kind=st.integers(0, 4))
    def speaks(self, pick: int, generation: int, kind: int) -> None:
        who = self.client_picked(pick).process
        self.do(
            (
                mev.MemberUnready(who, generation, "why"),
                mev.MemberOpaque(who, f"cu{generation}"),
                mev.MemberError(who, 700),
                mev.MemberStayed(who, generation, "why"),
                mev.MemberFoundCode(who, generation, ExceptionOwner.OWN),
            )[kind]
        )

    @rule(pick=base.picks, true=st.booleans(), generation=generations)
    def moved(self, pick: int, true: bool, generation: int) -> None:
        who = self.client_picked(pick).process
        member = self.world.state.members.get(who)
        if true and member is not None and member.standing is Standing.MOVING:
            generation = member.generation
        self.do(mev.MemberMoved(who, generation))

    @rule(kind=st.sampled_from(("failover-wait", "standby-linger")), subject=st.sampled_from("abc123"))
    def failover_timer(self, kind: str, subject: str) -> None:
        self.do(ev.TimerFired(kind, subject))

    @rule(problem=st.sampled_from(("", "", "the disk is full")))
    def copies_seen(self, problem: str) -> None:
        self.do(ev.DriverFilesSeen(problem))

    @invariant()
    def no_gpu_has_too_many_standby_contexts(self) -> None:
        state = self.world.state
        offered = [m for m in state.members.values() if m.standing in (*OFFERED, Standing.MOVING)]
        for gpu in {gpu for domain in state.domains.values() for gpu in domain.gpus}:
            here = [m for m in offered if gpu in gpus_of(state, m) and m.standing is not Standing.UNREADY]
            assert len([m for m in here if m.placed]) <= state.policy.standby_contexts
            assert all(m.placed or m.standing is Standing.MOVING or state.has_lost(m) for m in here)

    @invariant()
    def members_are_bounded(self) -> None:
        state = self.world.state
        assert len(state.failovers) <= FAILOVERS_MOST
        assert all(len(m.opaque) <= OPAQUE_KEPT and len(m.told) <= MOVES for m in state.members.values())
        for member in state.members.values():
            assert member.connected or any(c.living for c in state.spaces_of(member.process))

    def teardown(self) -> None:
        super().teardown()
        for who in tuple(self.connected):
            self.do(mev.MemberLeft(who))
        assert not [m for m in self.world.state.members.values() if m.connected]


TestFailoverDaemon = FailoverDaemon.TestCase
TestFailoverDaemon.settings = settings(
    derandomize=True,
    max_examples=of(150, 75),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
