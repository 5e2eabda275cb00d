"""Fair shares of a door: bounds, the reserve, and the connection that a newcomer displaces."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.peers.quotas import Account, FairShares, Seat, Standing
from mpsd.peers.receive import _BUDGETS, Budgets

ROOT = 0


def seat(owner: int, cgroup: str = "", standing: Standing = Standing.WORKING, uid: int | None = None) -> Seat:
    made = Seat(Account(owner, owner if uid is None else uid, cgroup), privileged=owner == ROOT)
    made.standing = standing
    return made


def ask(shares: FairShares, newcomer: Seat) -> Seat | bool | None:
    """Let a newcomer in as a server does. Return the displaced seat, None without one, False if refused."""
    displaced = None
    if not shares.has_room(newcomer):
        displaced = shares.displaced_by(newcomer)
        if displaced is None:
            return False
        shares.remove(displaced)
    shares.add(newcomer)
    return displaced


def seats_of(shares: FairShares) -> list[Seat]:
    return [one for seats in shares._owners.values() for one in seats]


def filled(capacity: int, holders: dict[int, int], each: int = 100, reserve: int = 0) -> FairShares:
    shares = FairShares(capacity, each, reserve)
    for owner, number in holders.items():
        for _ in range(number):
            assert ask(shares, seat(owner)) is None
    return shares


def test_a_newcomer_displaces_the_largest_holder_until_shares_are_equal() -> None:
    shares = filled(10, {1: 7, 2: 3})
    for _ in range(3):
        displaced = ask(shares, seat(3))
        assert isinstance(displaced, Seat) and displaced.account.owner == 1
    assert [shares.held_by(owner) for owner in (1, 2, 3)] == [4, 3, 3]
    assert ask(shares, seat(3)) is False
    assert ask(shares, seat(1)) is False


def test_the_largest_holder_is_refused() -> None:
    shares = filled(10, {1: 7, 2: 3})
    assert ask(shares, seat(1)) is False
    assert isinstance(ask(shares, seat(2)), Seat)


def test_new_and_idle_connections_go_first_and_the_newest_of_them() -> None:
    shares = FairShares(4, 100, 0)
    seats = [seat(1, standing=s) for s in (Standing.NEW, Standing.NEW, Standing.IDLE, Standing.WORKING)]
    for one in seats:
        ask(shares, one)
    assert ask(shares, seat(2)) is seats[1]
    assert ask(shares, seat(2)) is seats[0]


def test_many_users_with_one_silent_connection_each_lock_out_nobody() -> None:
    shares = FairShares(100, 100, 0)
    silent = [seat(owner, standing=Standing.NEW) for owner in range(1, 101)]
    for one in silent:
        assert ask(shares, one) is None
    newcomer = seat(1000, standing=Standing.NEW)
    assert ask(shares, newcomer) is silent[0]
    # More of them displace each other, the oldest first: the newcomer has time to greet.
    for number in range(98):
        assert ask(shares, seat(2000 + number, standing=Standing.NEW)) is silent[number + 1]
    newcomer.standing = Standing.WORKING
    for number in range(200):
        assert ask(shares, seat(3000 + number, standing=Standing.NEW)) is not newcomer


def test_the_reserve_is_for_privileged_peers_alone() -> None:
    shares = filled(10, {1: 4, 2: 4}, reserve=2)
    assert ask(shares, seat(1)) is False
    assert ask(shares, seat(ROOT)) is None
    assert ask(shares, seat(ROOT)) is None
    # Inside the reserve no other peer displaces root; outside of it root is a holder like the rest.
    displaced = ask(shares, seat(3))
    assert isinstance(displaced, Seat) and displaced.account.owner in (1, 2)
    assert shares.held_by(ROOT) == 2


def test_cgroups_of_one_user_share_its_connections() -> None:
    shares = FairShares(100, 6, 0)
    for _ in range(5):
        ask(shares, seat(1, "/pod-a"))
    ask(shares, seat(1, "/pod-b"))
    displaced = ask(shares, seat(1, "/pod-b"))
    assert isinstance(displaced, Seat) and displaced.account.cgroup == "/pod-a"
    assert ask(shares, seat(1, "/pod-a")) is False
    assert isinstance(ask(shares, seat(1, "/pod-c", uid=4711)), Seat)


class Sender:
    """Sends as one account, as fast as its budget allows."""

    def __init__(self, budgets: Budgets, account: Account) -> None:
        self.budgets, self.account, self.sent = budgets, account, 0

    def send(self, most: int) -> None:
        for _ in range(most):
            if not self.budgets.allows(self.account):
                break
            self.budgets.charge(self.account)
            self.sent += 1


def test_one_container_leaves_the_others_of_its_user_half_of_the_rate() -> None:
    now = [0.0]
    budgets = Budgets(500.0, 1000.0, lambda: now[0])
    flooding = Sender(budgets, Account(1, 100_000, "/pod-a"))
    calling = Sender(budgets, Account(1, 100_000, "/pod-b"))
    stranger = Sender(budgets, Account(2, 2))

    def run(seconds: int, *senders: tuple[Sender, int]) -> list[int]:
        before = [sender.sent for sender, _ in senders]
        for _ in range(seconds * 100):
            now[0] += 0.01
            for sender, most in senders:
                sender.send(most)
        return [sender.sent - sent for (sender, _), sent in zip(senders, before, strict=True)]

    # Alone it has the whole rate and burst of the user.
    assert 2980 < run(4, (flooding, 100))[0] <= 3000
    (flooded, called) = run(4, (flooding, 100), (calling, 2))
    assert 780 < called <= 800 and 900 < flooded <= 1250
    (flooded, called) = run(4, (flooding, 100), (calling, 100))
    assert 900 < flooded <= 1010 and 900 < called <= 1510
    assert run(2, (flooding, 100), (stranger, 5))[1] == 1000
    # A little later it has all again.
    assert 980 < run(2, (flooding, 100))[0] <= 1000


def test_budgets_of_many_users_are_forgotten_when_they_are_full() -> None:
    now = [0.0]
    budgets = Budgets(500.0, 1000.0, lambda: now[0])
    for owner in range(5000):
        now[0] += 0.01
        assert budgets.allows(Account(owner, owner))
        budgets.charge(Account(owner, owner))
    assert len(budgets._of) <= 2 * _BUDGETS


owners = st.integers(0, 5)
steps = st.lists(
    st.tuples(owners, st.sampled_from(("", "/a", "/b")), st.sampled_from(Standing), st.booleans()),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 12), st.integers(1, 8), st.integers(0, 4))
def test_whatever_happens_shares_are_bounded_and_fair(
    moves: list[tuple[int, str, Standing, bool]], capacity: int, each: int, reserve: int
) -> None:
    shares = FairShares(capacity, each, reserve)
    for owner, cgroup, standing, leaves in moves:
        present = seats_of(shares)
        if leaves and present:
            shares.remove(min(present, key=lambda s: s.number))
            continue
        before = Counter(s.account.owner for s in present)
        accounts = Counter(s.account for s in present if s.account.owner == owner)
        privileged = before[ROOT]
        newcomer = seat(owner, cgroup, standing)
        result = ask(shares, newcomer)
        after = Counter(s.account.owner for s in seats_of(shares))
        assert len(shares) == after.total() <= capacity and max(after.values(), default=0) <= each
        assert after.total() - after[ROOT] <= capacity - shares.reserve
        if owner == ROOT and privileged < min(shares.reserve, each):
            assert result is not False
        if isinstance(result, Seat):
            loser = result.account.owner
            if loser == owner:
                mine, unused = accounts[newcomer.account], result.standing < Standing.WORKING
                assert accounts[result.account] > mine + 1 or (not mine and unused)
            else:
                # It held more than the newcomer holds now; or, in a tie, its connection did no work.
                tie = not before[owner] and result.standing is not Standing.WORKING
                assert before[loser] > before[owner] + 1 or tie
                rivals = {o: n for o, n in before.items() if o != ROOT or owner == ROOT}
                assert tie or before[loser] >= max(rivals.values())
        elif result is False and before[owner] < each:
            rivals = {o: n for o, n in before.items() if o != ROOT}
            assert max(rivals.values(), default=0) <= before[owner] + 1
