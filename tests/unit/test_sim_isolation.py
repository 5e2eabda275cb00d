"""The simulated kernel module, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpsd.gpu.simulated.machine.isolation import PATIENCE, KernelModule
from tests.unit.test_sim_machine import OTHER, A, B, Node, target

DEADLINE_S = 2.0
NOWHERE = 0x7E00_0000_0000
DEADLINE_MS = DEADLINE_S * 1e3


@pytest.fixture
def here() -> Iterator[Node]:
    made = Node()
    made.machine.kernel_part = part = KernelModule(made.machine, DEADLINE_S)
    part.mode = "isolate"
    yield made
    for space in list(made.machine.spaces.values()):
        space.memory.destroy()


def part_of(here: Node) -> KernelModule:
    assert here.machine.kernel_part is not None
    return here.machine.kernel_part


def actions(here: Node) -> list[str]:
    return [str(r["action"]) for r in here.sink.records]


@pytest.mark.parametrize("kind", ["store", "load", "atomic", "null", "use_after_unmap", "pbdma"])
def test_a_stray_access_is_sunk_and_nobody_notices(here: Node, kind: str) -> None:
    address = target(here, kind)
    here.launch(here.a, "spin", duration_s=0.2)
    here.launch(here.b, kind, address=address)
    here.pass_ms(400)
    assert here.answer(A) == (0, 200.0 + 1) or (here.answer(A) or (1, 0))[0] == 0
    assert (here.answer(B) or (1, 0))[0] == 0
    assert not here.server.fault and not here.sink.xids and not here.sink.events
    (record,) = here.sink.records
    assert (record["action"], record["pid"], record["event"][3]) == ("sunk", B, address & -4096)


def test_the_same_place_faults_once(here: Node) -> None:
    for offset in (0, 4, 8192):
        here.launch(here.b, "store", address=NOWHERE + offset)
    here.launch(here.b, "store", address=NOWHERE + (1 << 20))
    here.pass_ms(50)
    assert [r["faults"] for r in here.sink.records] == [1, 2]


def test_a_storm_does_not_push_out_the_records_of_others(here: Node) -> None:
    for number in range(20):
        here.launch(here.b, "store", address=NOWHERE + (number << 16))
    here.pass_ms(50)
    assert [r["faults"] for r in here.sink.records] == [1, 2, 4, 8, 16]


def test_whom_the_kernel_part_gave_up_gets_the_drivers_answer(here: Node) -> None:
    """Its process cannot be killed, for example: its time is over."""
    here.launch(here.b, "store", address=NOWHERE)
    here.pass_ms((PATIENCE + 1) * DEADLINE_MS + 100)
    assert actions(here) == ["sunk", "kill", "give up"]
    here.launch(here.b, "store", address=NOWHERE + (1 << 20))
    here.pass_ms(400)
    assert (here.sink.records[-1]["action"], here.sink.records[-1]["why"]) == ("refused", "released")
    assert here.server.fault


def test_what_runs_past_its_end_computes_wrongly_and_goes_on(here: Node) -> None:
    base = here.machine.allocate(here.b, 16384).base
    here.launch(here.b, "increment", address=base, words=16385)
    here.pass_ms(50)
    assert here.answer(B) is not None and actions(here) == ["sunk"]


@pytest.mark.parametrize(
    ("mode", "kind", "said"),
    [
        ("isolate", "read_only", ["refused"]),
        ("report", "read_only", ["refused"]),
        ("report", "store", ["reported"]),
        ("off", "store", []),
    ],
)
def test_everything_else_is_the_drivers_answer(here: Node, mode: str, kind: str, said: list[str]) -> None:
    part_of(here).mode = mode
    here.launch(here.b, kind, address=target(here, kind))
    here.pass_ms(400)
    assert actions(here) == said
    assert here.server.fault and len(here.sink.events) == 1


def test_who_is_alone_meets_its_own_error(here: Node) -> None:
    """The client is a program outside MPS, or the last client of its server: no other client is harmed."""
    outside = here.client(OTHER, mps=False)
    here.launch(outside, "store", address=NOWHERE)
    here.pass_ms(400)
    (record,) = here.sink.records
    assert (record["action"], record["why"]) == ("refused", "alone")
    assert here.answer(OTHER) is not None and outside.error == 700
    here.die(here.a)
    here.launch(here.b, "store", address=NOWHERE)
    here.pass_ms(400)
    assert [r["why"] for r in here.sink.records] == ["alone", "alone"] and here.b.error == 700


def test_whom_nobody_puts_out_is_killed_at_the_deadline_and_harms_nobody(here: Node) -> None:
    here.launch(here.b, "store", address=NOWHERE)
    here.launch(here.b, "forever")
    here.pass_ms(DEADLINE_MS - 10)
    assert here.sink.killed == []
    here.pass_ms(20)
    assert here.sink.killed == [B] and actions(here) == ["sunk", "kill"]
    here.die(here.b)
    here.pass_ms(400)
    assert not here.server.fault and here.b.leased
    here.pass_ms(PATIENCE * DEADLINE_MS)
    assert actions(here) == ["sunk", "kill", "give up"]


def test_who_is_being_put_out_has_ten_times_as_long(here: Node) -> None:
    here.launch(here.b, "store", address=NOWHERE)
    here.pass_ms(5)
    assert part_of(here).acknowledge(here.b.id, "me")
    here.pass_ms(PATIENCE * DEADLINE_MS - 10)
    assert here.sink.killed == []
    here.pass_ms(20)
    assert here.sink.killed == [B]
    assert not part_of(here).acknowledge(here.b.id, "me")


def test_an_acknowledgement_ends_with_whoever_gave_it(here: Node) -> None:
    here.launch(here.b, "store", address=NOWHERE)
    here.pass_ms(5)
    part_of(here).acknowledge(here.b.id, "me")
    here.pass_ms(DEADLINE_MS + 10)
    part_of(here).abandon("me")
    here.pass_ms(DEADLINE_MS + 10)
    assert here.sink.killed == [B]


def test_kill_now_and_of_nobody_else(here: Node) -> None:
    here.launch(here.b, "store", address=NOWHERE)
    here.pass_ms(5)
    assert not part_of(here).kill(here.a.id)
    assert part_of(here).kill(here.b.id) and here.sink.killed == [B]
    assert not part_of(here).kill(here.b.id)


def test_who_has_gone_in_time_is_not_killed(here: Node) -> None:
    here.launch(here.b, "store", address=NOWHERE)
    here.pass_ms(20)
    here.die(here.b)
    here.pass_ms(2 * DEADLINE_MS)
    assert here.sink.killed == []
