"""The invariants checked at each decision: each of them notices its violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mpsd.base.model import ClientId
from mpsd.core import engine
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import Effect, Kill, ReleaseLease, Terminate
from mpsd.core.faults.records import FaultRecord, Party
from mpsd.core.state import Client, ClientState, DomainState, InvariantViolation, Slot, check_invariants
from tests.support.core import GPU, SLOT, World, facts, process, server_of

NOTHING = ev.AdoptionDone()


def prepared() -> Draft:
    """d1 active with clients 10 and 11, d2 its standby domain."""
    world = World().ready()
    world.join(10, 11)
    return Draft(world.state, world.now)


def change_domain(draft: Draft, name: str, **changes: object) -> None:
    draft.put_domain(replace(draft.state.domains[name], **changes))  # type: ignore[arg-type]


def change_slot(draft: Draft, **changes: object) -> None:
    draft.put_slot(replace(draft.state.slots[SLOT], **changes))  # type: ignore[arg-type]


def change_client(draft: Draft, **changes: object) -> None:
    client = draft.state.clients[ClientId("d1", process(10))]
    draft.put_client(replace(client, **changes))  # type: ignore[arg-type]


def blame_a_victim(draft: Draft) -> None:
    who = ClientId("d1", process(10))
    party = Party(who, facts(10))
    record = FaultRecord(1, 0.0, "d1", (GPU,), "sm-trap", offender=party, victims=(party,))
    draft.put_fault(record)


def stop_under_the_living(draft: Draft) -> None:
    change_slot(draft, active=None)
    change_domain(draft, "d1", state=DomainState.STOPPING)


def give_two_roles(draft: Draft) -> None:
    change_domain(draft, "d1", state=DomainState.WARM)
    change_slot(draft, spare="d1")


BROKEN: dict[str, Callable[[Draft], object]] = {
    "a domain serves two roles": give_two_roles,
    "domain d3 has no slot": lambda d: d.put_domain(
        replace(d.state.domains["d2"], id="d3", slot="none"),
    ),
    "stopped under living clients": stop_under_the_living,
    "names a victim as its offender": blame_a_victim,
    "leads to unknown domain d9": lambda d: change_slot(d, active="d9"),
    "borrows domain d1": lambda d: d.put_slot(Slot("other", (GPU,), 1, active="d1")),
    "leads to a domain that is being stopped": lambda d: change_domain(d, "d1", state=DomainState.STOPPING),
    f"standby domain of {SLOT} is active": lambda d: change_domain(d, "d2", state=DomainState.ACTIVE),
    "serves while it is retired": lambda d: change_slot(d, retiring=True),
    "has a standby domain in exclusive mode": lambda d: change_slot(d, exclusive=True),
    "has no domain": lambda d: d.put_client(
        Client(ClientId("d9", process(12)), facts(12), ClientState.NOTICED, 0.0)
    ),
    "has foreign facts": lambda d: change_client(d, facts=facts(11)),
    "is lingering, died None": lambda d: change_client(d, state=ClientState.LINGERING),
    "is kept without a lease": lambda d: change_client(d, state=ClientState.HELD, died=1.0, leased=False),
    "is evicted without an eviction": lambda d: change_client(d, state=ClientState.KILLING),
}


def test_a_sound_state_passes() -> None:
    check_invariants(prepared().state)


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_state_is_noticed(what: str) -> None:
    draft = prepared()
    BROKEN[what](draft)
    with pytest.raises(InvariantViolation, match=what):
        check_invariants(draft.state)


def decide_wrongly(monkeypatch: pytest.MonkeyPatch, *effects: Effect, fault: bool = False) -> None:
    world = World().ready()
    world.join(10, 11)
    if fault:
        world.fault(10)
    monkeypatch.setitem(engine._HANDLERS, ev.AdoptionDone, lambda d, e: d.emit(*effects))
    world.do(NOTHING)


def test_harmful_effects_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminate = Terminate("d1", server_of("d1"), process(11), 0.05)
    with pytest.raises(InvariantViolation, match="sent to faulted domain d1"):
        decide_wrongly(monkeypatch, terminate, fault=True)
    for pid in (10, 99):
        with pytest.raises(InvariantViolation, match="killed without an eviction"):
            decide_wrongly(monkeypatch, Kill(ClientId("d1", process(pid)), "why"))
    with pytest.raises(InvariantViolation, match="released while its client is kept"):
        decide_wrongly(monkeypatch, ReleaseLease(ClientId("d1", process(10))))


def test_work_let_loose_on_the_living_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(draft: Draft, event: ev.AdoptionDone) -> None:
        client = draft.state.clients[ClientId("d1", process(10))]
        draft.emit(ReleaseLease(client.id))
        draft.drop_client(client)

    world = World().ready()
    world.join(10, 11)
    monkeypatch.setitem(engine._HANDLERS, ev.AdoptionDone, release)
    with pytest.raises(InvariantViolation, match="released while other clients live there"):
        world.do(NOTHING)
