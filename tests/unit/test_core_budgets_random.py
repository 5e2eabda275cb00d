"""Random programs of two accounts: the limits of snapshot buffers always add up."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import budgets
from mpsd.core.failover import reports as mev
from mpsd.core.failover.budgets import SETTLE
from tests.support.core import GPU, facts, process
from tests.unit.test_core_budgets import EXACT, FIRST, KEEP, MEMORY, ON, POOL, TOO_SLOW, start_all
from tests.unit.test_core_failover import Site

SLOTS = {
    "a": ((GPU,), 1000),
    "b": (("GPU-1",), 1001),
    "both": ((GPU, "GPU-1"), 1001),
    "c": ((GPU,), 1001),
}
pids = st.integers(10, 21)
sizes = st.one_of(st.integers(0, POOL), st.integers(0, 4).map(lambda n: n * FIRST), st.just(1 << 60))


class Limits(RuleBasedStateMachine):
    """Programs of two accounts that come, grow, shrink, lie, leave and end; the daemon restarts meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.world = self.daemon()
        self.told: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.said: dict[int, int] = {}
        self.saved = self.world.state

    def daemon(self) -> Site:
        world = Site(ON)
        for slot, (gpus, uid) in SLOTS.items():
            world.do(ev.SlotWanted(slot, gpus, uid))
        start_all(world)
        world.do(ev.DriverFilesSeen(""))
        return world

    def do(self, event: ev.Event) -> None:
        before, sums = self.world.state.members, self.sums()
        self.world.do(event)
        for effect in self.world.made(fx.LimitSnapshots):
            pid = effect.process.pid
            self.told[pid] = effect.bytes
            self.held[pid] = min(self.held.get(pid, 0), effect.bytes)
        for who, member in self.world.state.members.items():
            was = before.get(who)
            lowered = was is not None and was.limit and member.limit and member.limit.bytes < was.limit.bytes
            if lowered and member.limit and self.uid(who.pid) == self.uid(self.pid_of(event)):
                assert member.limit.bytes >= self.said.get(who.pid, 0), "taken from what it holds"
        if isinstance(event, mev.MemberHolds):
            self.check_shares(event.process.pid, sums)

    def uid(self, pid: int) -> int:
        return list(SLOTS.values())[pid % len(SLOTS)][1]

    def pid_of(self, event: ev.Event) -> int:
        who = getattr(event, "process", None)
        return who.pid if isinstance(who, ProcessInstance) else 0

    def sums(self) -> dict[tuple[int, str], int]:
        """Return what each account has on each GPU."""
        sums = {(uid, gpu): 0 for uid in (1000, 1001) for gpu in MEMORY}
        for who, member in self.world.state.members.items():
            for gpu in member.limit.gpus if member.limit else ():
                sums[self.uid(who.pid), gpu] += member.limit.bytes if member.limit else 0
        return sums

    def check_shares(self, pid: int, before: dict[tuple[int, str], int]) -> None:
        """Check what a wish took from the other account, and what it added to its own one."""
        accounts = {
            gpu: {self.uid(m.process.pid) for m in budgets._on(self.world.state, gpu)} for gpu in MEMORY
        }
        for (uid, gpu), size in self.sums().items():
            was, share = before[uid, gpu], POOL // max(1, len(accounts[gpu]))
            if uid == self.uid(pid):
                assert size <= max(was, share), "more than its share"
            elif gpu in SLOTS[list(SLOTS)[pid % len(SLOTS)]][0]:
                assert size >= min(was, share), "taken from its share"

    def home(self, pid: int) -> str:
        slot = self.world.state.slots[list(SLOTS)[pid % len(SLOTS)]]
        assert slot.active is not None
        return slot.active

    def is_known(self, pid: int) -> bool:
        return process(pid) in self.world.state.members

    @rule(pid=pids)
    def joins(self, pid: int) -> None:
        home = self.home(pid)
        if any(c.id.domain == home for c in self.world.state.spaces_of(process(pid))):
            return
        self.do(ev.ClientNoticed(home, facts(pid, uid=self.uid(pid))))
        self.do(ev.ClientAttached(home, process(pid), 1, tracked=True, apart=True))

    @rule(pid=pids, mode=st.sampled_from((EXACT, EXACT, EXACT, KEEP)))
    def says_hello(self, pid: int, mode: FailoverMode) -> None:
        self.do(mev.MemberCame(process(pid), self.uid(pid), mode, budgets=True))

    @rule(pid=pids, size=sizes)
    def grows(self, pid: int, size: int) -> None:
        """An honest program fills its buffers up to its limit before it says so."""
        self.held[pid] = min(size, self.told.get(pid, 0))

    @rule(pid=pids, wants=sizes)
    def says_holds(self, pid: int, wants: int) -> None:
        held = self.held.get(pid, 0)
        if self.is_known(pid):
            self.said[pid] = held
        self.do(mev.MemberHolds(process(pid), held, wants if wants > held else 0))

    @rule(pid=pids, held=sizes, wants=sizes)
    def lies(self, pid: int, held: int, wants: int) -> None:
        """Say anything. What it really holds is not known then."""
        self.said.pop(pid, None)
        self.do(mev.MemberHolds(process(pid), held, wants))

    @rule(pid=pids)
    def leaves(self, pid: int) -> None:
        self.do(mev.MemberExceeds(process(pid), TOO_SLOW))

    @rule(pid=pids)
    def connection_ends(self, pid: int) -> None:
        self.do(mev.MemberLeft(process(pid)))

    @rule(pid=pids)
    def ends(self, pid: int) -> None:
        self.do(ev.ClientDied(process(pid)))
        for known in (self.told, self.held, self.said):
            known.pop(pid, None)

    @rule(pid=pids)
    def time_passes(self, pid: int) -> None:
        self.do(ev.TimerFired(SETTLE, str(process(pid))))

    @rule()
    def is_saved(self) -> None:
        self.saved = self.world.state

    @rule(whole=st.booleans())
    def restarts(self, whole: bool) -> None:
        """Restart the daemon with the last state, or with an older one."""
        old = self.world.state if whole else self.saved
        living = {(c.id.process.pid, c.id.domain) for c in self.world.state.clients.values() if c.living}
        self.world = self.daemon()
        self.said.clear()
        for m in old.members.values():
            if m.home in self.world.state.domains:
                self.do(mev.MemberRestored(m.process, m.uid, m.mode, m.home or "", "", m.limit, m.excess))
        for pid, domain in sorted(living):
            self.do(ev.ClientNoticed(domain, facts(pid, uid=self.uid(pid))))
            self.do(ev.ClientAttached(domain, process(pid), 1, tracked=True, apart=True))
        self.saved = self.world.state

    @invariant()
    def the_limits_are_within_the_pool(self) -> None:
        for gpu in MEMORY:
            assert 0 <= budgets.free(self.world.state, gpu) <= POOL

    @invariant()
    def the_programs_are_told_the_limits_that_count(self) -> None:
        for who, member in self.world.state.members.items():
            if member.connected and member.limit is not None and budgets.has_limit(member):
                assert self.told[who.pid] == member.limit.bytes

    @precondition(lambda self: self.world.state.members)
    @rule()
    def all_end(self) -> None:
        for who in tuple(self.world.state.members):
            self.ends(who.pid)
            # A participant that has no client any more goes with its connection.
            self.do(mev.MemberLeft(who))
        assert [budgets.free(self.world.state, gpu) for gpu in MEMORY] == [POOL, POOL]


Limits.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLimits = Limits.TestCase
