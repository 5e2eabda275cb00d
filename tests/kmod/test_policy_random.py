"""Random faults and deadlines: the compiled policy agrees with the model, and keeps its laws."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mpsd.base.model import UvmFaultType, UvmReason
from mpsd.gpu.nvidia.kernel_abi import Action, ClientType, Engine, Mode, Why, decode_record
from tests.kmod import policydriver as driver
from tests.kmod.policydriver import Policy, Request, Told, expected, told
from tests.kmod.policymodel import (
    ATOMIC,
    BIG_PAGE,
    LATER_BATCHES,
    MS,
    PAGE,
    PATIENCE,
    PREFETCH,
    READ,
    WIDEST,
    WRITE,
    Around,
    Decision,
    Fault,
    Params,
    Range,
    Sink,
    Space,
    lost_table,
)
from tests.kmod.worlds import LAST, World, addresses, worlds

params = st.builds(
    Params,
    mode=st.sampled_from([Mode.ISOLATE] * 8 + [Mode.REPORT, Mode.OFF, 3]),
    deadline_ms=st.sampled_from([2000, 10, 60_000, 0, 0xFFFF_FFFF]),
    max_sinks=st.sampled_from([1024, 0xFFFF_FFFF, 7, 3, 1, 0]),
    nonreplayable=st.booleans(),
    stop_channels=st.booleans(),
)
SM = (Engine.GRAPHICS, ClientType.GPC, True)
COPY = (Engine.CE, ClientType.HUB, False)
HOST = (Engine.HOST, ClientType.HUB, False)
units = st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans())
# Changes that make a fault one that the policy does not absorb; applied now and then.
SPOILT: list[tuple[str, st.SearchStrategy[int]]] = [
    ("fault_type", st.sampled_from([*range(18), 255])),
    ("access", st.sampled_from([PREFETCH, 0, 5, 255])),
    ("reason", st.sampled_from([*range(8), 255])),
    ("fatal", st.just(False)),
]
TIMES = [0, 0, 1, MS, 10 * MS, 1999 * MS, 2000 * MS, 20_000 * MS]
OTHERS = ["deadline", "deadline", "deadline", "acknowledge", "abandoned", "kill", "release", "end", "orphan"]


@dataclass
class Play:
    """One history: the model follows it and supplies what the module's glue would look up."""

    world: World
    space: Space
    now: int = 0
    decision: Decision = field(default_factory=Decision)
    gpus: dict[int, list[tuple[int, Sink]]] = field(default_factory=lambda: {0: [], 1: []})
    requests: list[Request] = field(default_factory=list)
    expected: list[Told] = field(default_factory=list)
    # (fault, its surroundings, GPU) if the request is a fault
    faults: dict[int, tuple[Fault, Around, int]] = field(default_factory=dict)
    orphans: int = 0
    orphan_told: int | None = None

    def add(self, request: Request, result: int = 0, around: Around | None = None) -> None:
        self.requests.append(request)
        self.expected.append(expected(self.space, result, self.decision, around, self.orphans))

    def fault(self, fault: Fault, gpu: int, fails: bool, more: dict[str, bool]) -> None:
        around = self.world.around(fault.address, self.gpus[gpu], **more)
        self.faults[len(self.requests)] = (fault, around, gpu)
        self.decision = self.space.fault(fault, around, self.now, fails)
        if self.decision.action == Action.SUNK:
            self.gpus[gpu].append((len(self.space.sinks), self.space.sinks[-1]))
        self.add(driver.fault_request(fault, around, self.now, fails), around=around)

    def orphan(self) -> bool:
        if self.space.params.mode not in (Mode.REPORT, Mode.ISOLATE):
            return False
        self.orphans += 1
        if self.orphan_told is not None and self.now - self.orphan_told < 100 * MS:
            return False
        self.orphan_told = self.now
        return True

    def other(self, name: str) -> None:
        match name:
            case "deadline":
                step = self.space.deadline(self.now)
                self.add((driver.DEADLINE, self.now), step)
            case "acknowledge":
                self.add((driver.ACKNOWLEDGE,), self.space.acknowledge())
            case "abandoned":
                self.space.abandoned(self.now)
                self.add((driver.ABANDONED, self.now))
            case "kill":
                answer = self.space.kill(self.now)
                self.add((driver.KILL, self.now), answer)
            case "release":
                self.space.release()
                self.add((driver.RELEASE,))
            case "end":
                self.space.end()
                self.add((driver.ENDED,))
            case "orphan":
                result = self.orphan()
                self.add((driver.ORPHAN, self.now), result)

    def set_params(self, params: Params) -> None:
        self.space.params = params
        self.add(driver.params_request(params))


def rarely(draw: st.DrawFn, times: int) -> bool:
    """Return True once in so many times; examples shrink to the plain case."""
    return draw(st.integers(0, times - 1)) == times - 1


@st.composite
def faults(draw: st.DrawFn, play: Play) -> Fault:
    """Draw mostly faults that the case table absorbs, sometimes at an address that is absorbed already."""
    sunk = [sink.base for _, sink in play.gpus[0] + play.gpus[1]]
    anywhere = addresses(play.world)
    engine, client_type, replayable = draw(
        units if rarely(draw, 9) else st.sampled_from([SM, SM, SM, COPY, HOST])
    )
    fault = Fault(
        address=draw(st.one_of(st.sampled_from(sunk), anywhere) if sunk else anywhere),
        batch=draw(st.integers(0, 9)),
        fault_type=draw(st.integers(1, 4)),
        access=draw(st.sampled_from([READ, WRITE, ATOMIC])),
        engine=engine,
        client_type=client_type,
        replayable=replayable,
    )
    if rarely(draw, 5):
        name, values = draw(st.sampled_from(SPOILT))
        spoilt: dict[str, Any] = {name: draw(values)}
        return replace(fault, **spoilt)
    return fault


@st.composite
def plays(draw: st.DrawFn) -> Play:
    play = Play(draw(worlds()), Space())
    play.set_params(draw(params))
    for _ in range(draw(st.integers(1, 40))):
        play.now += draw(st.sampled_from(TIMES))
        choice = draw(st.integers(0, 19))
        if choice < 14:
            more = {name: rarely(draw, 20) for name in ("hmm", "ats", "alone")}
            more["can_address"] = not rarely(draw, 20)
            play.fault(draw(faults(play)), int(rarely(draw, 3)), rarely(draw, 10), more)
        elif choice < 17:
            play.other(draw(st.sampled_from(OTHERS)))
        elif choice < 19 and play.world.parts:
            play.world.gone ^= {draw(st.integers(0, len(play.world.parts) - 1))}
        else:
            play.set_params(draw(params))
    return play


def sinkable(fault: Fault, around: Around) -> bool:
    """Return whether the whitelist allows absorbing the fault, without any order of reasons."""
    by_sm = fault.replayable and (fault.engine, fault.client_type) == (Engine.GRAPHICS, ClientType.GPC)
    by_engine = not fault.replayable and fault.engine in (Engine.CE, Engine.HOST)
    return (
        fault.fatal
        and UvmFaultType.INVALID_PDE <= fault.fault_type <= UvmFaultType.ATOMIC
        and fault.access in (READ, WRITE, ATOMIC)
        and fault.reason == UvmReason.INVALID_ADDRESS
        and (by_sm or by_engine)
        and (around.range in (Range.FREE, Range.HOLE) or lost_table(fault, around))
        and around.can_address
        and not around.ats
        and not around.alone
    )


@dataclass
class Laws:
    """Check the laws that the compiled policy's answers must keep, whatever the model says."""

    params: Params = field(default_factory=Params)
    sinks: dict[int, list[Sink]] = field(default_factory=lambda: {0: [], 1: []})
    order: list[Sink] = field(default_factory=list)
    batches: dict[int, set[int]] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    condemned: bool = False
    released: bool = False

    def fault(self, fault: Fault, around: Around, gpu: int, answer: Told) -> None:
        decision = answer.decision
        if answer.isolates:
            assert self.params.mode == Mode.ISOLATE
            assert sinkable(fault, around), "only what is on the whitelist, beside others"
            assert not self.released, "after a release nothing is sunk"
        if decision.action == Action.SUNK:
            self.new_sink(fault, around, gpu, decision)
        elif decision.action == Action.SUNK_BEFORE:
            assert not (decision.renew and around.range == Range.MAPPED), "nothing is written over pages"
            self.same_page_again(fault, around)
        else:
            assert (decision.base, decision.bytes, decision.page_bytes) == (0, 0, 0)

    def new_sink(self, fault: Fault, around: Around, gpu: int, decision: Decision) -> None:
        base, length = decision.base, decision.bytes
        assert length == PAGE or BIG_PAGE <= length <= WIDEST
        assert length & (length - 1) == 0 and base % length == 0, "aligned"
        assert base <= fault.page and fault.page + PAGE <= base + length, "holds the page"
        assert around.free_first <= base and base + length - 1 <= around.free_last, "inside the gap"
        assert decision.page_bytes == (PAGE if length == PAGE else BIG_PAGE)
        assert not around.hmm or length == PAGE
        for other in self.sinks[gpu]:
            assert base + length <= other.base or other.base + other.bytes <= base, "no other sink"
        sink = Sink(base, length, fault.batch)
        self.sinks[gpu].append(sink)
        self.order.append(sink)
        assert len(self.order) <= self.params.max_sinks, "never more than max_sinks"

    def same_page_again(self, fault: Fault, around: Around) -> None:
        lost = lost_table(fault, around)
        sink = self.order[(around.beside if lost else around.sink) - 1]
        assert sink.base // WIDEST == fault.address // WIDEST if lost else sink.covers(fault.address)
        if fault.batch != sink.batch:
            sink.batch = fault.batch
            sink.hits += 1
        assert sink.hits <= LATER_BATCHES, "a page that comes again and again is given up"

    def state(self, answer: Told, now: int) -> None:
        assert answer.condemned or not self.condemned, "never innocent again"
        assert answer.condemned == bool(self.order), "condemned by a sink, and by nothing else"
        assert answer.released or not self.released
        self.condemned, self.released = answer.condemned, answer.released
        assert (answer.next_step == Action.NONE) == (answer.deadline_ns == 0)
        if not self.condemned:
            assert answer.next_step == Action.NONE, "no step against an innocent"
        if answer.next_step == Action.KILL:
            assert answer.deadline_ns <= answer.condemned_ns + PATIENCE * 60_000 * MS, "nobody lives on"

    def step(self, step: int, now: int) -> None:
        if step == Action.NONE:
            return
        assert self.condemned
        order = [Action.KILL, Action.STOP, Action.GIVE_UP]
        assert not self.steps or order.index(Action(step)) > order.index(Action(self.steps[-1][0]))
        assert not self.steps or now >= self.steps[-1][1] + 10 * MS, "time to work for each"
        assert self.steps or step == Action.KILL, "killed before anything is given up"
        self.steps.append((step, now))


def check_laws(play: Play, answers: list[Told]) -> None:
    laws = Laws()
    for number, (request, answer) in enumerate(zip(play.requests, answers, strict=True)):
        now = request[1] if request[0] in (driver.DEADLINE, driver.KILL, driver.ABANDONED) else 0
        if request[0] == driver.SET_PARAMS:
            laws.params = Params(request[1], request[2], request[3], bool(request[4]), bool(request[5]))
        if number in play.faults:
            laws.fault(*play.faults[number], answer)
        if request[0] == driver.DEADLINE:
            laws.step(answer.result, now)
        laws.state(answer, now)


def note(answers: list[Told]) -> None:
    """Count the histories' properties for `pytest --hypothesis-show-statistics`."""
    for why in {answer.decision.why for answer in answers}:
        event(f"why {Why(why).name}")
    for action in {answer.decision.action for answer in answers}:
        event(f"action {Action(action).name}")


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(play=plays())
def test_the_compiled_policy_is_where_the_model_is(policy: Policy, play: Play) -> None:
    raw = policy.ask([(driver.NEW_SPACE,), *play.requests])[1:]
    answers = [told(each) for each in raw]
    note(answers)
    check_laws(play, answers)
    for number, (found, wanted) in enumerate(zip(answers, play.expected, strict=True)):
        assert found == wanted, (number, play.requests[number])


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(play=plays())
def test_a_record_says_what_was_decided(policy: Policy, play: Play) -> None:
    both = [request for each in play.requests for request in (each, (driver.RECORD,))]
    raw = policy.ask([(driver.NEW_SPACE,), *both])[1:]
    for number in play.faults:
        answer, record = told(raw[2 * number]), decode_record(raw[2 * number + 1])
        fault, decision = play.faults[number][0], answer.decision
        assert (record.action, record.why) == (decision.action, decision.why)
        assert record.sink == ((decision.base, decision.bytes) if decision.bytes else None)
        assert (record.address, record.replayable) == (fault.address, fault.replayable)
        assert (record.faults, record.sinks) == (answer.faults, answer.sinks)
        assert (record.deadline_ns or 0) == answer.deadline_ns
        flags = (answer.condemned, answer.acknowledged, answer.released)
        assert (record.condemned, record.acknowledged, record.released) == flags


def test_a_sweep_over_free_memory_is_sunk_in_few_faults(policy: Policy) -> None:
    """One access to each page of 256 MiB: pages absorbed before do not fault again."""
    play = Play(World([], set()), Space())
    base, swept = 0x7F00_0000_0000, 256 << 20
    at, batch = base, 0
    while at < base + swept:
        batch += 1
        play.fault(Fault(at, batch), 0, False, {})
        at = play.decision.base + play.decision.bytes
    answers = [told(raw) for raw in policy.ask(play.requests)]
    assert answers == play.expected
    check_laws(play, answers)
    # 64 KiB to 1 MiB fill the first 2 MiB but 64 KiB; each later fault takes 2 MiB.
    assert len(answers) <= 6 + 128
    assert at < LAST
