"""The transition tables: every entry is written down a second time here, and there are no further ones."""

from __future__ import annotations

import pytest

from mpsd.core.domains import move
from mpsd.core.draft import Draft
from mpsd.core.lifecycle import (
    ClientTrigger,
    DomainTrigger,
    allows,
    next_client_state,
    next_domain_state,
)
from mpsd.core.state import ClientState, DomainState
from tests.support.core import World

DOMAIN_ENTRIES = """
starting  started       warm
starting  start failed  failed
starting  retire        retired
warm      activated     active
warm      fault         faulted
warm      poison        poisoned
warm      server died   retired
warm      control died  headless
warm      unreachable   retired
warm      retire        retired
active    fault         faulted
active    poison        poisoned
active    server died   retired
active    control died  headless
active    unreachable   retired
active    retire        retired
active    full          full
full      activated     active
full      fault         faulted
full      poison        poisoned
full      server died   retired
full      control died  headless
full      retire        retired
full      empty         stopping
faulted   recovered     active
faulted   empty         stopping
faulted   server died   retired
faulted   control died  headless
poisoned  fault         faulted
poisoned  empty         stopping
poisoned  server died   retired
poisoned  control died  headless
retired   fault         faulted
retired   poison        poisoned
retired   empty         stopping
retired   control died  headless
headless  empty         stopping
failed    empty         stopping
"""
CLIENT_ENTRIES = """
noticed      attached       attached
noticed      attach failed  unprotected
noticed      evict          terminating
noticed      kill           killing
noticed      died           -
attached     evict          terminating
attached     kill           killing
attached     died           lingering
unprotected  attached       attached
unprotected  evict          terminating
unprotected  kill           killing
unprotected  died           -
terminating  attached       terminating
terminating  kill           killing
terminating  died           lingering
killing      attached       killing
killing      died           lingering
lingering    endless        held
lingering    released       -
held         released       -
"""


def entries(text: str) -> list[tuple[str, str, str]]:
    rows = []
    for line in text.strip().splitlines():
        state, _, rest = line.partition(" ")
        trigger, _, target = rest.strip().rpartition(" ")
        rows.append((state, trigger.strip(), target))
    return rows


DOMAIN_WANTED = {(DomainState(s), DomainTrigger(t)): DomainState(to) for s, t, to in entries(DOMAIN_ENTRIES)}
CLIENT_WANTED = {
    (ClientState(s), ClientTrigger(t)): None if to == "-" else ClientState(to)
    for s, t, to in entries(CLIENT_ENTRIES)
}


@pytest.mark.parametrize("trigger", DomainTrigger)
@pytest.mark.parametrize("state", DomainState)
def test_domain_transition(state: DomainState, trigger: DomainTrigger) -> None:
    assert next_domain_state(state, trigger) == DOMAIN_WANTED.get((state, trigger))


@pytest.mark.parametrize("trigger", ClientTrigger)
@pytest.mark.parametrize("state", ClientState)
def test_client_transition(state: ClientState, trigger: ClientTrigger) -> None:
    legal = (state, trigger) in CLIENT_WANTED
    assert allows(state, trigger) is legal
    if legal:
        assert next_client_state(state, trigger) == CLIENT_WANTED[state, trigger]
    else:
        with pytest.raises(KeyError):
            next_client_state(state, trigger)


def test_a_trigger_that_means_nothing_is_counted_and_changes_nothing() -> None:
    world = World().ready()
    draft = Draft(world.state, world.now)
    assert not move(draft, "d1", DomainTrigger.EMPTY)
    assert draft.state.domains == world.state.domains
    assert draft.state.counters["ignored_domain_triggers"] == 1


@pytest.mark.parametrize(
    ("first", "last", "arrows"),
    [
        ("starting", {"stopping"}, {(s.value, to.value) for (s, _), to in DOMAIN_WANTED.items()}),
        ("noticed", set(), {(s.value, to.value if to else "-") for (s, _), to in CLIENT_WANTED.items()}),
    ],
)
def test_every_state_can_be_reached_and_left(
    first: str, last: set[str], arrows: set[tuple[str, str]]
) -> None:
    reached, found = {"-"}, {first}
    while found:
        reached |= found
        found = {to for state, to in arrows if state in reached} - reached
    assert reached == {"-"} | {s for arrow in arrows for s in arrow}
    assert reached - {"-"} - {state for state, _ in arrows} == last
