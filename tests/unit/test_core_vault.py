"""The ledger of the vault against a model, and against thousands of deaths."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mpsd.core.vault import Holding, Ledger, Limits, Outcome, Owner, Quota, Refusal, valid_name
from mpsd.model import ProcessInstance

LIMITS = Limits(Quota(60, 4), Quota(100, 7), Quota(50, 3), 9, 10.0)
OWNERS = (Owner(1, "/a"), Owner(1, "/b"), Owner(1, token="t"), Owner(2, "/a"))
NAMES = ("one", "two")
SHARES = ("a" * 32, "b" * 32)
PROCESS = st.integers(0, 7)
GENEROUS = Limits(Quota(1 << 40, 1 << 20), Quota(1 << 40, 1 << 20), Quota(1 << 40, 64), 1 << 20, 10.0)


def admit(ledger: Ledger, owner: Owner, process: ProcessInstance, number: int, size: int = 1) -> Outcome:
    return ledger.admit(owner, process, number=number, size=size, address=0, gpu="GPU-0", now=0.0)


class LedgerMachine(RuleBasedStateMachine):
    """The model is a plain list; whatever leaves the ledger must have been told exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMITS)
        self.model: dict[int, Holding] = {}
        self.now = 0.0
        self.life = [0] * 8

    def process(self, which: int) -> ProcessInstance:
        return ProcessInstance(which + 10, self.life[which])

    def owner(self, which: int) -> Owner:
        return OWNERS[which % len(OWNERS)]

    def told(self, outcome: Outcome) -> None:
        for gone in outcome.freed:
            del self.model[gone.id]
        for changed in outcome.changed:
            before = self.model[changed.id]
            assert replace(before, name=changed.name, died=changed.died, share=changed.share) == changed
            self.model[changed.id] = changed

    @rule(which=PROCESS, number=st.integers(0, 5), size=st.integers(1, 70))
    def admit(self, which: int, number: int, size: int) -> None:
        process, owner = self.process(which), self.owner(which)
        mine = [h for h in self.model.values() if h.process == process]
        outcome = admit(self.ledger, owner, process, number, size)
        self.told(outcome)
        assert (outcome.holding is None) != (outcome.refusal is None)
        # Room is made of the same owner's dead alone.
        assert all(h.owner == owner and h.died is not None for h in outcome.freed)
        if number in {h.number for h in mine}:
            assert outcome.refusal is Refusal.TWICE
        elif sum(h.size for h in mine) + size > 60 or len(mine) >= 4:
            assert outcome.refusal is Refusal.CLIENT_QUOTA
        elif outcome.refusal is not None:
            assert not outcome.freed
            user = [h for h in self.model.values() if h.owner.uid == owner.uid]
            stay = [h for h in user if h.owner != owner or h.died is None]
            over = sum(h.size for h in stay) + size > 100 or len(stay) >= 7
            spare = len(user) - len(stay)
            assert over or len(self.model) - spare >= 9
        if outcome.holding is not None:
            self.model[outcome.holding.id] = outcome.holding

    @rule(which=PROCESS, number=st.integers(0, 5))
    def drop(self, which: int, number: int) -> None:
        outcome = self.ledger.drop(self.process(which), number)
        self.told(outcome)
        assert (outcome.refusal is Refusal.NOTHING) == (not outcome.freed)

    @rule(which=PROCESS, name=st.sampled_from((*NAMES, "", "7", "a b", "x" * 64)))
    def keep(self, which: int, name: str) -> None:
        process, owner = self.process(which), self.owner(which)
        outcome = self.ledger.keep(owner, process, name)
        self.told(outcome)
        if name not in NAMES:
            assert outcome.refusal is Refusal.BAD_NAME
        elif outcome.refusal is None:
            assert all(h.name == name for h in self.model.values() if h.process == process)

    @rule(which=PROCESS)
    def die(self, which: int) -> None:
        process = self.process(which)
        self.now += 1
        self.told(self.ledger.died(process, self.now))
        left = [h for h in self.model.values() if h.process == process]
        assert all(h.name and h.died == self.now and not h.share for h in left)
        self.life[which] += 1

    @rule(which=PROCESS, number=st.integers(0, 5), share=st.sampled_from(SHARES))
    def share(self, which: int, number: int, share: str) -> None:
        process = self.process(which)
        found = [h for h in self.model.values() if (h.process, h.number) == (process, number)]
        outcome = self.ledger.share(process, number, share)
        taken = [h for h in self.model.values() if h not in found and h.share == share]
        self.told(outcome)
        if not found:
            assert outcome.refusal is Refusal.NOTHING
        elif any(h.owner == found[0].owner for h in taken):
            assert outcome.refusal is Refusal.TWICE
        else:
            assert outcome.holding is not None and outcome.holding.share == share

    @rule(owner=st.sampled_from(OWNERS), share=st.sampled_from(SHARES))
    def open(self, owner: Owner, share: str) -> None:
        found = self.ledger.shared(owner, share)
        assert [found] == ([h for h in self.model.values() if (h.owner, h.share) == (owner, share)] or [None])

    @rule(seconds=st.integers(1, 12))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.told(self.ledger.expire(self.now))
        assert all(h.died is None or self.now - h.died < 10 for h in self.model.values())

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def claim(self, owner: Owner, name: str) -> None:
        found = self.ledger.named(owner, name)
        assert {h.id for h in found} == {
            h.id for h in self.model.values() if (h.owner, h.name) == (owner, name)
        }

    @rule(which=st.integers(0, 40))
    def free(self, which: int) -> None:
        found = self.ledger.get(which)
        self.told(self.ledger.free([found] if found else []))
        assert which not in self.model

    @rule()
    def restart(self) -> None:
        """Another daemon reads the notes: living processes and what is kept, as it was."""
        later = Ledger(LIMITS)
        assert all(later.restore(h) for h in sorted(self.model.values(), key=lambda h: -h.id))
        assert not any(later.restore(h) for h in self.model.values())
        # Wishes of processes that hold nothing are forgotten with the daemon that heard them.
        later.next_id = self.ledger.next_id
        self.ledger = later

    @invariant()
    def agrees(self) -> None:
        assert {h.id: h for h in self.ledger.holdings()} == self.model
        for owner in OWNERS:
            kept = [h for h in self.model.values() if h.owner == owner and h.died is not None]
            assert sum(h.size for h in kept) <= 50 and len(kept) <= 3
        for uid in (1, 2):
            user = [h for h in self.model.values() if h.owner.uid == uid]
            assert sum(h.size for h in user) <= 100 and len(user) <= 7
        assert len(self.model) <= 9

    def teardown(self) -> None:
        for which in range(8):
            self.told(self.ledger.died(self.process(which), self.now))
        self.told(self.ledger.expire(self.now + 100))
        assert self.ledger.is_empty() and not self.model


TestLedger = LedgerMachine.TestCase


def test_ten_thousand_deaths_leave_nothing() -> None:
    ledger = Ledger(GENEROUS)
    for life in range(10_000):
        process, owner = ProcessInstance(100 + life % 300, life), Owner(life % 5, f"/{life % 7}")
        brought = [admit(ledger, owner, process, n).holding for n in range(life % 4)]
        if life % 10 == 0:
            ledger.keep(owner, process, f"job-{life}")
        outcome = ledger.died(process, float(life))
        assert len(outcome.freed) + len(outcome.changed) >= len(brought)
        ledger.expire(float(life))
    assert len(ledger) < 20
    ledger.expire(20_000.0)
    assert ledger.is_empty()


def test_a_kept_name_is_its_owner_s_alone() -> None:
    ledger = Ledger(GENEROUS)
    owner, process = Owner(0, "/pod-a"), ProcessInstance(7, 1)
    held = admit(ledger, owner, process, 1).holding
    assert held is not None
    ledger.keep(owner, process, "model")
    later = admit(ledger, owner, process, 2).holding
    assert ledger.died(process, 5.0).freed == ()
    assert [h.number for h in ledger.named(owner, "model")] == [1, 2]
    assert later is not None and later.name == "model"
    for other in (Owner(0, "/pod-b"), Owner(1, "/pod-a"), Owner(0), Owner(0, token="x")):
        assert ledger.named(other, "model") == ()
        # The same name of another owner is another one.
        assert ledger.keep(other, ProcessInstance(8, other.uid), "model").refusal is None
    again = ProcessInstance(9, 1)
    assert ledger.keep(owner, again, "model").refusal is Refusal.NAME_TAKEN
    ledger.free(ledger.named(owner, "model"))
    assert ledger.keep(owner, again, "model").refusal is None


def test_names() -> None:
    assert all(map(valid_name, ("a", "model-7", "x" * 63, "7b")))
    assert not any(map(valid_name, ("", "12", "a b", "ä", "x" * 64, "a\n")))
