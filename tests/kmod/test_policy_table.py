"""Each row of the case table, the granule and the loop guard: the answers of the compiled policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import UvmFaultType, UvmReason
from mpsd.gpu.nvidia.kernel_abi import Action, ClientType, Engine, Mode, Why
from tests.kmod import policydriver as driver
from tests.kmod.policydriver import Policy
from tests.kmod.policymodel import (
    ADDRESS,
    ATOMIC,
    BIG_PAGE,
    COPY,
    MS,
    PAGE,
    PREFETCH,
    READ,
    SEMAPHORE,
    WIDEST,
    WILD,
    Around,
    Fault,
    Params,
    Range,
)

D = 2000 * MS

SUNK = {
    "wild store": (WILD, Around()),
    "wild load": (replace(WILD, access=READ), Around()),
    "wild atomic": (replace(WILD, access=ATOMIC), Around()),
    "no page directory": (replace(WILD, fault_type=UvmFaultType.INVALID_PDE), Around()),
    "null pointer": (Fault(0), Around()),
    "last page of the address space": (Fault((1 << 64) - 1), Around()),
    "was read-only when it faulted, is unmapped now": (
        replace(WILD, fault_type=UvmFaultType.WRITE),
        Around(range=Range.HOLE),
    ),
    "atomic where none are allowed, is unmapped now": (
        replace(WILD, fault_type=UvmFaultType.ATOMIC, access=ATOMIC),
        Around(range=Range.HOLE),
    ),
    "use after cuMemUnmap": (WILD, Around(range=Range.HOLE)),
    "HMM is on, nothing is mapped": (WILD, Around(hmm=True)),
    "copy engine": (COPY, Around()),
    "copy engine in a hole": (replace(COPY, access=READ), Around(range=Range.HOLE)),
    "semaphore of the host": (SEMAPHORE, Around()),
}


@pytest.mark.parametrize("row", SUNK)
def test_sunk(row: str, policy: Policy) -> None:
    fault, around = SUNK[row]
    told = policy.fault(fault, around, now=7)
    assert (told.decision.action, told.decision.why, told.isolates) == (Action.SUNK, Why.NONE, True)
    length = PAGE if around.hmm else BIG_PAGE
    assert (told.decision.base, told.decision.bytes) == (fault.address // length * length, length)
    assert told.decision.page_bytes == length
    assert (told.condemned, told.condemned_ns, told.sinks, told.faults) == (True, 7, 1, 1)
    assert (told.next_step, told.deadline_ns) == (Action.KILL, 7 + D)


BEYOND_HELP = [kind for kind in UvmFaultType if kind > UvmFaultType.ATOMIC or kind == UvmFaultType.UNKNOWN]
REFUSED: dict[str, tuple[Fault, Around, Why]] = {
    **{kind.name.lower(): (replace(WILD, fault_type=kind), Around(), Why.FAULT_TYPE) for kind in BEYOND_HELP},
    "a type newer than this": (replace(WILD, fault_type=17), Around(), Why.FAULT_TYPE),
    "prefetch": (replace(WILD, access=PREFETCH), Around(), Why.ACCESS),
    "unknown access": (replace(WILD, access=0), Around(), Why.ACCESS),
    "read-only mapping": (WILD, Around(range=Range.MAPPED), Why.PERMISSIONS),
    "UVM says permissions": (replace(WILD, reason=UvmReason.PERMISSIONS), Around(), Why.PERMISSIONS),
    **{
        f"UVM says {reason.name.lower()}": (replace(WILD, reason=reason), Around(), Why.REASON)
        for reason in UvmReason
        if reason not in (UvmReason.INVALID_ADDRESS, UvmReason.PERMISSIONS)
    },
    "managed memory": (WILD, Around(range=Range.MANAGED), Why.MANAGED),
    "channel or semaphore pool": (WILD, Around(range=Range.PROTECTED), Why.PROTECTED),
    "a range nobody looked at": (WILD, Around(range=Range.UNKNOWN), Why.RANGE),
    "a range newer than this": (WILD, Around(range=6), Why.RANGE),
    "ATS": (WILD, Around(ats=True), Why.ATS),
    "out of the GPU's reach": (WILD, Around(can_address=False), Why.UNADDRESSABLE),
    "front end of the graphics engine": (
        replace(WILD, client_type=ClientType.HUB),
        Around(),
        Why.CLIENT,
    ),
    "unknown client": (replace(WILD, client_type=0), Around(), Why.CLIENT),
    "replayable, of a copy engine": (replace(WILD, engine=Engine.CE), Around(), Why.CLIENT),
    "not replayable, of the graphics engine": (replace(WILD, replayable=False), Around(), Why.CLIENT),
    "unknown engine": (replace(COPY, engine=0), Around(), Why.CLIENT),
    "gap begins behind the page": (WILD, Around(free_first=ADDRESS + 1), Why.NO_GAP),
    "gap ends in the page": (WILD, Around(free_last=ADDRESS + PAGE - 2), Why.NO_GAP),
    "gap is empty": (WILD, Around(free_first=1, free_last=0), Why.NO_GAP),
    "nobody else in its channel group": (WILD, Around(alone=True), Why.ALONE),
    "copy of one that is alone": (COPY, Around(alone=True), Why.ALONE),
}


@pytest.mark.parametrize("row", REFUSED)
def test_left_to_the_stock_driver(row: str, policy: Policy) -> None:
    fault, around, why = REFUSED[row]
    told = policy.fault(fault, around)
    assert (told.decision.action, told.decision.why, told.isolates) == (Action.REFUSED, why, False)
    assert (told.decision.bytes, told.condemned, told.sinks, told.next_step) == (0, False, 0, Action.NONE)
    assert told.decision.report


@pytest.mark.parametrize("row", [*SUNK, *REFUSED])
def test_report_mode_tells_what_would_be_and_changes_nothing(row: str, policy: Policy) -> None:
    fault, around, why = (*SUNK[row], Why.NONE) if row in SUNK else REFUSED[row]
    policy.begin(Params(mode=Mode.REPORT))
    told = policy.fault(fault, around)
    assert (told.decision.action, told.decision.why, told.isolates) == (Action.REPORTED, why, False)
    assert (told.condemned, told.faults, told.next_step) == (False, 1, Action.NONE)
    record = policy.record()
    assert (record.action, record.why, record.sink, record.mode) == (
        Action.REPORTED,
        why,
        None,
        Mode.REPORT,
    )


@pytest.mark.parametrize("mode", [Mode.OFF, 3, 0xFFFF_FFFF])
def test_off_and_what_is_no_mode_do_nothing(mode: int, policy: Policy) -> None:
    policy.begin(Params(mode=mode))
    told = policy.fault(WILD)
    assert (told.decision.action, told.decision.report, told.faults) == (Action.NONE, False, 0)


def test_an_innocent_entry_of_a_cancelled_batch_is_no_fault(policy: Policy) -> None:
    told = policy.fault(replace(WILD, fatal=False))
    assert (told.decision.action, told.decision.report, told.faults) == (Action.NONE, False, 0)


def test_faults_that_do_not_replay_can_be_left_to_the_stock_driver(policy: Policy) -> None:
    policy.begin(Params(nonreplayable=False))
    assert policy.fault(COPY).decision.why == Why.NONREPLAYABLE
    assert policy.fault(WILD).decision.action == Action.SUNK


# The granule


def test_each_sink_is_wider_until_2_mib(policy: Policy) -> None:
    widths = []
    for number in range(9):
        address = ADDRESS + number * 4 * WIDEST
        widths.append(policy.fault(Fault(address, batch=number)).decision.bytes)
    assert widths == [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, *[WIDEST] * 4]


@pytest.mark.parametrize(
    ("before", "after", "length"),
    [
        (0, PAGE, PAGE),
        (0, BIG_PAGE - PAGE, PAGE),
        (0, BIG_PAGE, BIG_PAGE),
        (0, 2 * BIG_PAGE - 1, BIG_PAGE),
        (0, 2 * BIG_PAGE, 2 * BIG_PAGE),
        (BIG_PAGE, 2 * BIG_PAGE, 2 * BIG_PAGE),
        (0, WIDEST - 1, WIDEST // 2),
        (0, WIDEST, WIDEST),
    ],
)
def test_a_sink_stays_in_the_gap(before: int, after: int, length: int, policy: Policy) -> None:
    for number in range(5):
        policy.fault(Fault(number * 4 * WIDEST, batch=number))
    base = 0x7F12_0000_0000
    told = policy.fault(Fault(base, 9), Around(free_first=base - before, free_last=base + after - 1))
    assert (told.decision.base, told.decision.bytes) == (base, length)
    assert told.decision.page_bytes == min(length, BIG_PAGE)


def test_a_near_neighbour_below_narrows_it_too(policy: Policy) -> None:
    told = policy.fault(WILD, Around(free_first=ADDRESS))
    assert (told.decision.base, told.decision.bytes) == (ADDRESS, PAGE)


def test_only_so_many_sinks(policy: Policy) -> None:
    policy.begin(Params(max_sinks=3))
    actions = [policy.fault(Fault(number * 4 * WIDEST, number)).decision for number in range(5)]
    assert [each.action for each in actions] == [Action.SUNK] * 3 + [Action.REFUSED] * 2
    assert {each.why for each in actions[3:]} == {Why.TOO_MANY}


def test_no_sinks_at_all(policy: Policy) -> None:
    policy.begin(Params(max_sinks=0))
    assert policy.fault(WILD).decision.why == Why.TOO_MANY


# The loop guard


def test_a_page_that_the_sink_does_not_help_is_given_up(policy: Policy) -> None:
    policy.fault(replace(WILD, batch=1))
    again = Around(sink=1)
    same = policy.faults([(replace(WILD, batch=1), again)] * 10)
    assert {(told.decision.action, told.isolates, told.hits) for told in same} == {
        (Action.SUNK_BEFORE, True, 0)
    }
    later = policy.faults([(replace(WILD, batch=batch), again) for batch in (2, 2, 3, 4, 5, 5, 6)])
    assert [told.decision.action for told in later] == [Action.SUNK_BEFORE] * 4 + [Action.REFUSED] * 3
    assert {told.decision.why for told in later[4:]} == {Why.LOOP}
    assert (later[-1].sinks, later[-1].faults) == (1, 18)


def test_a_sink_is_made_anew_in_a_later_batch_where_nothing_else_lies(policy: Policy) -> None:
    policy.fault(replace(WILD, batch=1))
    base = ADDRESS & ~(BIG_PAGE - 1)
    free, taken = Around(sink=1), Around(sink=1, free_first=base + PAGE)
    seen = policy.faults([(replace(WILD, batch=batch), free) for batch in (1, 2, 2)])
    seen += policy.faults([(replace(WILD, batch=3), taken)])
    assert [(told.isolates, told.decision.renew, told.decision.relink) for told in seen] == [
        (True, False, False),
        (True, True, False),
        (True, False, False),
        (True, False, True),
    ]


def test_what_is_mapped_beside_a_sink_gets_its_table_back(policy: Policy) -> None:
    """The table is linked again as often as a sparse mapping is renewed; the page itself is not written."""
    lost = replace(WILD, address=ADDRESS + 4 * BIG_PAGE, fault_type=UvmFaultType.INVALID_PDE)
    around = Around(range=Range.MAPPED, beside=1)
    assert policy.fault(lost, Around(range=Range.MAPPED)).decision.why == Why.PERMISSIONS
    policy.fault(replace(WILD, batch=1))
    assert policy.fault(replace(lost, fault_type=2), around).decision.why == Why.PERMISSIONS
    seen = policy.faults([(replace(lost, batch=batch), around) for batch in (1, 2, 2, 3, 4, 5)])
    assert [(told.decision.action, told.decision.relink, told.beside_hits) for told in seen] == [
        (Action.SUNK_BEFORE, False, 0),
        (Action.SUNK_BEFORE, True, 1),
        (Action.SUNK_BEFORE, False, 1),
        (Action.SUNK_BEFORE, True, 2),
        (Action.SUNK_BEFORE, True, 3),
        (Action.REFUSED, False, 4),
    ]
    assert (seen[-1].decision.why, seen[-1].sinks) == (Why.LOOP, 1)
    assert not any(told.decision.renew for told in seen)
    over = replace(around, sink=1)
    policy.begin()
    policy.fault(replace(WILD, batch=1))
    again = policy.fault(replace(WILD, batch=2, fault_type=UvmFaultType.INVALID_PDE), over).decision
    assert (again.action, again.renew, again.relink) == (Action.SUNK_BEFORE, False, True)


def test_a_page_beside_the_sink_is_another_fault(policy: Policy) -> None:
    policy.fault(WILD)
    beside = replace(WILD, address=ADDRESS + BIG_PAGE, batch=2)
    assert policy.fault(beside, Around(sink=1)).decision.action == Action.SUNK


# Other clients in the group


@pytest.mark.parametrize("row", [row for row in REFUSED if REFUSED[row][2] is not Why.ALONE])
def test_one_that_is_alone_is_told_what_would_have_kept_it_from_a_sink(row: str, policy: Policy) -> None:
    """ALONE is the last reason: it reports faults that mode isolate would have absorbed."""
    fault, around, why = REFUSED[row]
    assert policy.fault(fault, replace(around, alone=True)).decision.why == why


def test_alone_comes_after_every_other_reason(policy: Policy) -> None:
    alone = Around(alone=True)
    policy.begin(Params(max_sinks=0))
    assert policy.fault(WILD, alone).decision.why == Why.TOO_MANY
    policy.begin(Params(nonreplayable=False))
    assert policy.fault(COPY, alone).decision.why == Why.NONREPLAYABLE
    policy.begin()
    policy.tell(driver.RELEASE)
    assert policy.fault(WILD, alone).decision.why == Why.RELEASED


def test_a_condemned_client_whose_company_has_left_is_ended_by_the_stock_driver(policy: Policy) -> None:
    """Also at an address absorbed before.

    The client stays condemned, and clients that come are protected again.
    """
    policy.fault(WILD)
    elsewhere = replace(WILD, address=ADDRESS + WIDEST, batch=2)
    left = [(replace(WILD, batch=2), Around(sink=1, alone=True)), (elsewhere, Around(alone=True))]
    for told in policy.faults(left):
        assert (told.decision.action, told.decision.why) == (Action.REFUSED, Why.ALONE)
        assert (told.isolates, told.condemned, told.sinks, told.next_step) == (False, True, 1, Action.KILL)
    assert policy.fault(replace(WILD, batch=3), Around(sink=1)).decision.action == Action.SUNK_BEFORE
    assert policy.fault(elsewhere).decision.action == Action.SUNK


def test_a_page_that_comes_again_and_again_counts_while_alone(policy: Policy) -> None:
    policy.fault(WILD)
    alone = [(replace(WILD, batch=batch), Around(sink=1, alone=True)) for batch in range(2, 6)]
    assert [told.decision.why for told in policy.faults(alone)] == [Why.ALONE] * 3 + [Why.LOOP]


def test_a_sunk_page_that_was_mapped_since_is_left_alone(policy: Policy) -> None:
    policy.fault(WILD)
    told = policy.fault(replace(WILD, batch=2), Around(sink=1, range=Range.MAPPED))
    assert (told.decision.action, told.decision.why) == (Action.REFUSED, Why.PERMISSIONS)
