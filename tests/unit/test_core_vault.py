"""The ledger of the vault against a model, and against thousands of deaths."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Ledger, Limits, Outcome, Owner, Quota, Refusal, Segment, valid_name

LIMITS = Limits(Quota(60, 4), Quota(100, 7), Quota(50, 3), 9, 10.0)
OWNERS = (Owner(1, "/a"), Owner(1, "/b"), Owner(1, token="t"), Owner(2, "/a"))
NAMES = ("one", "two")
SHARES = ("a" * 32, "b" * 32)
PROCESS = st.integers(0, 7)
GENEROUS = Limits(Quota(1 << 40, 1 << 20), Quota(1 << 40, 1 << 20), Quota(1 << 40, 64), 1 << 20, 10.0)


def admit(
    ledger: Ledger,
    owner: Owner,
    process: ProcessInstance,
    number: int,
    size: int = 1,
    alone: str | None = None,
) -> Outcome:
    return ledger.admit(
        owner, process, number=number, size=size, address=0, gpu="GPU-0", now=0.0, alone=alone
    )


class LedgerMachine(RuleBasedStateMachine):
    """The model is a plain list; each segment that leaves the ledger is reported exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMITS)
        self.model: dict[int, Segment] = {}
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
            if changed.alone:
                moved = {"process": changed.process, "number": changed.number, "address": changed.address}
                moved |= {"share": changed.share}
                assert before.alone and replace(before, died=changed.died, **moved) == changed
            else:
                assert replace(before, name=changed.name, died=changed.died, share=changed.share) == changed
            self.model[changed.id] = changed

    def lives(self, which: int) -> list[Segment]:
        return [h for h in self.model.values() if h.process == self.process(which) and h.died is None]

    @rule(
        which=PROCESS,
        number=st.integers(0, 5),
        size=st.integers(1, 70),
        alone=st.none() | st.sampled_from((*NAMES, "7")),
    )
    def admit(self, which: int, number: int, size: int, alone: str | None) -> None:
        process, owner = self.process(which), self.owner(which)
        mine = self.lives(which)
        outcome = admit(self.ledger, owner, process, number, size, alone)
        self.told(outcome)
        assert (outcome.holding is None) != (outcome.refusal is None)
        # Only segments of the same owner's exited clients are freed to make space.
        assert all(h.owner == owner and h.died is not None for h in outcome.freed)
        if number in {h.number for h in mine}:
            assert outcome.refusal is Refusal.TWICE
        elif alone == "7":
            assert outcome.refusal is Refusal.BAD_NAME
        elif outcome.refusal is Refusal.NAME_TAKEN:
            assert alone is not None
        elif alone and any((h.owner, h.name) == (owner, alone) for h in self.model.values()):
            raise AssertionError("two have one name")
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
            assert outcome.holding.alone == (alone is not None)

    @rule(which=PROCESS, name=st.sampled_from(NAMES), number=st.integers(0, 5))
    def take(self, which: int, name: str, number: int) -> None:
        process, owner, mine = self.process(which), self.owner(which), self.lives(which)
        there = [h for h in self.model.values() if (h.owner, h.name) == (owner, name)]
        outcome = self.ledger.take(owner, process, name, number=number, address=9)
        self.told(outcome)
        assert not outcome.freed
        if not there:
            # A process that holds nothing may have reserved the name.
            assert outcome.refusal in (Refusal.NOTHING, Refusal.NAME_TAKEN)
        elif not there[0].alone:
            assert outcome.refusal is Refusal.NAME_TAKEN
        elif there[0].died is None and there[0].process != process:
            assert outcome.refusal is Refusal.IN_USE
        elif outcome.refusal is Refusal.TWICE:
            assert number in {h.number for h in mine} - {h.number for h in mine if h is there[0]}
        elif outcome.refusal is not None:
            assert outcome.refusal is Refusal.CLIENT_QUOTA
            assert sum(h.size for h in mine) + there[0].size > 60 or len(mine) >= 4
        else:
            assert outcome.holding in self.lives(which) and self.ledger.named(owner, name) == outcome.changed

    @rule(which=PROCESS, number=st.integers(0, 5))
    def leave(self, which: int, number: int) -> None:
        self.now += 1
        found = [h for h in self.lives(which) if h.number == number and h.alone]
        outcome = self.ledger.leave(self.process(which), number, self.now)
        self.told(outcome)
        assert (outcome.refusal is None) == bool(found)
        assert all(h.died is not None for h in outcome.freed)

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
            assert all((h.name == name) != h.alone for h in self.lives(which))

    @rule(which=PROCESS)
    def die(self, which: int) -> None:
        process = self.process(which)
        self.now += 1
        self.told(self.ledger.died(process, self.now))
        mine = [h for h in self.model.values() if h.process == process]
        assert all(h.name and h.died is not None and not h.share for h in mine)
        self.life[which] += 1

    @rule(which=PROCESS, number=st.integers(0, 5), share=st.sampled_from(SHARES))
    def share(self, which: int, number: int, share: str) -> None:
        process = self.process(which)
        found = [h for h in self.lives(which) if h.number == number]
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
        """Another daemon reads the notes: segments of living processes and kept segments are as they were."""
        later = Ledger(LIMITS)
        assert all(later.restore(h) for h in sorted(self.model.values(), key=lambda h: -h.id))
        assert not any(later.restore(h) for h in self.model.values())
        # Names reserved by processes that hold nothing are lost with the old daemon.
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
        # The same name of another owner is a different name.
        assert ledger.keep(other, ProcessInstance(8, other.uid), "model").refusal is None
    again = ProcessInstance(9, 1)
    assert ledger.keep(owner, again, "model").refusal is Refusal.NAME_TAKEN
    ledger.free(ledger.named(owner, "model"))
    assert ledger.keep(owner, again, "model").refusal is None


def test_a_piece_kept_alone_goes_from_process_to_process() -> None:
    ledger = Ledger(GENEROUS)
    owner, first, second = Owner(0, "/pod"), ProcessInstance(7, 1), ProcessInstance(8, 1)
    admit(ledger, owner, first, 1, alone="weights")
    admit(ledger, owner, first, 2, alone="moments")
    assert ledger.take(owner, second, "weights", number=5, address=0).refusal is Refusal.IN_USE
    assert ledger.take(Owner(1, "/pod"), second, "weights", number=5, address=0).refusal is Refusal.NOTHING
    # Neither is part of what the process keeps as a whole.
    admit(ledger, owner, first, 3)
    assert [h.number for h in ledger.keep(owner, first, "all").changed] == [3]
    assert ledger.keep(owner, second, "weights").refusal is Refusal.NAME_TAKEN
    assert admit(ledger, owner, second, 1, alone="all").refusal is Refusal.NAME_TAKEN
    assert ledger.died(first, 5.0).freed == ()
    taken = ledger.take(owner, second, "weights", number=5, address=0).holding
    assert taken is not None and (taken.process, taken.number, taken.died) == (second, 5, None)
    # The other segments expire; this segment does not while its process lives, and does after that.
    assert {h.name for h in ledger.expire(15.0).freed} == {"moments", "all"}
    assert ledger.next_expiry() is None
    ledger.died(second, 20.0)
    assert ledger.next_expiry() == 30.0
    assert [h.name for h in ledger.expire(30.0).freed] == ["weights"] and ledger.is_empty()


def test_what_is_left_is_there_for_the_next_and_for_the_same_process() -> None:
    ledger = Ledger(GENEROUS)
    owner, first, second = Owner(0), ProcessInstance(7, 1), ProcessInstance(8, 1)
    admit(ledger, owner, first, 1, alone="weights")
    admit(ledger, owner, first, 2)
    assert ledger.leave(first, 2, 1.0).refusal is Refusal.NOTHING
    assert ledger.leave(first, 1, 1.0).refusal is None
    assert ledger.take(owner, first, "weights", number=3, address=0).refusal is None
    assert ledger.take(owner, second, "weights", number=3, address=0).refusal is Refusal.IN_USE
    ledger.leave(first, 3, 2.0)
    assert ledger.take(owner, second, "weights", number=3, address=0).refusal is None


def test_a_program_that_replaced_itself_can_use_its_numbers_again() -> None:
    """The process is the same, and segments kept by its earlier program do not count as its own."""
    ledger = Ledger(GENEROUS)
    owner, process = Owner(0), ProcessInstance(7, 1)
    admit(ledger, owner, process, 1, alone="weights")
    ledger.died(process, 1.0)
    assert admit(ledger, owner, process, 1).refusal is None
    assert [h.number for h in ledger.of(process)] == [1]
    assert ledger.take(owner, process, "weights", number=1, address=0).refusal is Refusal.TWICE
    assert ledger.take(owner, process, "weights", number=2, address=0).refusal is None
    assert [h.name for h in ledger.died(process, 2.0).freed] == [None]
    assert [h.name for h in ledger.expire(99.0).freed] == ["weights"] and ledger.is_empty()


def test_names() -> None:
    assert all(map(valid_name, ("a", "model-7", "x" * 63, "7b")))
    assert not any(map(valid_name, ("", "12", "a b", "ä", "x" * 64, "a\n")))
