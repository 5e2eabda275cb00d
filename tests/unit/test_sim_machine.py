"""Every row of the measured table, on the simulated GPU with a clock of the test's own."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from mpsd.base.model import Access, UvmEvent, UvmFaultType
from mpsd.gpu.simulated import node
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.halts import Halt
from mpsd.gpu.simulated.machine.machine import MAX_CLIENTS, Machine
from mpsd.gpu.simulated.machine.parts import Kernel, Refused, Server, Space, Unit

A, B, C, OTHER, SERVER = 101, 102, 103, 104, 100
GIB = 1 << 30


@dataclass
class Recorder:
    """A listener that records events, with the time in milliseconds."""

    now: list[float] = field(default_factory=lambda: [0.0])
    events: list[tuple[int, UvmEvent]] = field(default_factory=list)
    answers: list[tuple[int, int, float]] = field(default_factory=list)
    notices: list[dict[str, object]] = field(default_factory=list)
    xids: list[tuple[int, int | None, str]] = field(default_factory=list)
    nvml: list[int] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)

    def uvm_event(self, space: Space, event: UvmEvent) -> None:
        self.events.append((space.pid, event))

    def idle(self, space: Space, request: int, error: int) -> None:
        self.answers.append((space.pid, error, self.now[0]))

    def server_notice(self, server: Server, notice: dict[str, object]) -> None:
        self.notices.append(notice)

    def xid(self, unit: Unit, number: int, pid: int | None, name: str, text: str) -> None:
        self.xids.append((number, pid, text))

    def nvml_xid(self, unit: Unit, number: int) -> None:
        self.nvml.append(number)

    def kernel_record(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def kill(self, space: Space) -> None:
        self.killed.append(space.pid)


class Node:
    """One machine, a server with the clients A and B, and a stopwatch."""

    def __init__(self, gpus: int = 1) -> None:
        self.sink = Recorder()
        self.states: dict[int, str] = {}
        units = [Unit(node.gpu(i, 4 * GIB)) for i in range(gpus)]
        self.machine = Machine(units, self.sink, process_state=lambda pid: self.states.get(pid, "S"))
        self.units = units
        self.server = self.machine.add_server(SERVER, 0, units)
        self.a, self.b = self.client(A), self.client(B)

    def client(self, pid: int, *, server: Server | None = None, mps: bool = True, gpu: int = 0) -> Space:
        chosen = (server or self.server) if mps else None
        space = self.machine.attach(pid, 0, "program", server=chosen, unit=self.units[gpu])
        space.va = space.mm = 1
        return space

    def pass_ms(self, ms: float) -> None:
        """Let time pass, one millisecond at a time, so that answers are dated."""
        end = self.machine.timers.now + ms / 1000
        while self.machine.timers.now < end - 1e-9:
            self.sink.now[0] = round(self.machine.timers.now * 1000) + 1
            self.machine.timers.run(self.machine.timers.now + 0.001)

    def launch(self, space: Space, name: str, **arguments: object) -> None:
        self.machine.launch(space, Kernel(name, **arguments))  # type: ignore[arg-type]
        self.machine.when_idle(space, 1)

    def die(self, space: Space, *, leased: bool = False) -> None:
        """End the process: its connection and its own descriptors close."""
        if not leased:
            space.va = space.mm = 0
        self.machine.disconnect(space)

    def answer(self, pid: int) -> tuple[int, float] | None:
        return next(((error, at) for who, error, at in self.sink.answers if who == pid), None)


@pytest.fixture
def here() -> Iterator[Node]:
    made = Node()
    yield made
    for space in list(made.machine.spaces.values()):
        space.memory.destroy()


STRAYS = {
    "store": (Access.WRITE, UvmFaultType.INVALID_PDE),
    "load": (Access.READ, UvmFaultType.INVALID_PDE),
    "atomic": (Access.ATOMIC, UvmFaultType.INVALID_PDE),
    "null": (Access.WRITE, UvmFaultType.INVALID_PDE),
    "use_after_unmap": (Access.WRITE, UvmFaultType.INVALID_PDE),
    "read_only": (Access.WRITE, UvmFaultType.WRITE),
}


def target(here: Node, kind: str) -> int:
    if kind == "null":
        return 0
    if kind == "read_only":
        return here.machine.allocate(here.b, 4, writable=False).base
    if kind == "use_after_unmap":
        base = here.machine.allocate(here.b, 4).base
        here.machine.unmap(here.b, base, keep_reservation=True)
        return base
    return 0x7E00_0000_0000


@pytest.mark.parametrize("kind", STRAYS)
def test_a_stray_access_kills_everybody_and_its_tracker_knows_at_once(here: Node, kind: str) -> None:
    address = target(here, kind)
    here.launch(here.a, "spin", duration_s=1.0)
    here.launch(here.b, kind, address=address)
    here.pass_ms(2)
    access, fault = STRAYS[kind]
    ((pid, event),) = here.sink.events
    assert (pid, event.fatal, event.access, event.fault_type, event.address) == (
        B,
        True,
        access,
        fault,
        address,
    )
    assert here.server.status == "ACTIVE"
    here.pass_ms(138)
    assert here.server.status == "FAULT"
    assert here.sink.answers == []
    here.pass_ms(20)
    for pid in (A, B):
        error, at = here.answer(pid) or (0, 0.0)
        assert error == 700 and 142 <= at <= 157
    # The line of the kernel log names the innocent client.
    ((number, named, text),) = here.sink.xids
    assert (number, named) == (31, A)
    assert f"@ 0x{address >> 32:x}_{address & 0xFFFFFFFF:08x}" in text
    assert here.sink.nvml == [31]


SM_FAULTS = {
    "noncanonical": (700, True, "Out Of Range Address"),
    "misaligned": (716, True, "Misaligned Address"),
    "shared_window": (700, True, "Out Of Range Address"),
    "local_window": (700, True, "Out Of Range Address"),
    "trap": (719, False, ""),
    "breakpoint": (719, False, ""),
    "stack_overflow": (700, False, "Out Of Range Address"),
}


@pytest.mark.parametrize("kind", SM_FAULTS)
def test_an_sm_exception_has_no_event_and_names_the_server(here: Node, kind: str) -> None:
    code, lies, text = SM_FAULTS[kind]
    here.launch(here.a, "spin", duration_s=1.0)
    here.launch(here.b, kind)
    if lies:
        assert here.answer(B) == (0, 0.0), "the offender's sync returns success"
    here.pass_ms(17)
    assert here.server.status == "FAULT"
    assert here.answer(A) is None
    here.pass_ms(350)
    assert here.sink.events == []
    assert (here.a.error, here.b.error) == (code, code)
    assert (here.answer(A) or (0,))[0] == code
    numbers = [number for number, _, _ in here.sink.xids]
    assert numbers == ([13, 13, 43] if text else [43])
    assert here.sink.xids[-1][1] == SERVER
    assert all(pid is None for number, pid, _ in here.sink.xids if number == 13)
    assert any(text in line for _, _, line in here.sink.xids)
    assert here.sink.nvml == [43]


def test_trap_reaches_its_offender_long_before_the_others(here: Node) -> None:
    here.launch(here.a, "spin", duration_s=1.0)
    here.launch(here.b, "trap")
    here.pass_ms(400)
    (b_error, b_at), (a_error, a_at) = here.answer(B) or (0, 0), here.answer(A) or (0, 0)
    assert (b_error, a_error) == (719, 719)
    assert b_at <= 21 and a_at >= 93


def test_registers_tell_a_stack_overflow_from_a_window(here: Node) -> None:
    here.launch(here.b, "stack_overflow")
    here.pass_ms(100)
    overflow = here.sink.xids[1][2]
    other = Node()
    other.launch(other.b, "shared_window")
    other.pass_ms(100)
    assert overflow != other.sink.xids[1][2]


def test_a_wild_call_is_a_read_fault(here: Node) -> None:
    here.launch(here.b, "wild_call", address=0x7E00_0000_0000)
    here.pass_ms(160)
    assert here.sink.events[0][1].access is Access.READ
    assert (here.a.error, here.b.error) == (700, 700)


def test_a_call_through_a_low_pointer_hangs_and_harms_nobody(here: Node) -> None:
    here.launch(here.b, "wild_call_low", address=0x10)
    here.pass_ms(500)
    assert here.answer(B) is None
    assert here.sink.xids == [] and here.server.status == "ACTIVE"
    here.die(here.b)
    here.pass_ms(200)
    assert here.a.error == 700


def test_a_host_engine_fault_is_at_once_and_names_its_offender(here: Node) -> None:
    here.launch(here.b, "pbdma", address=0x7E00_0000_0000)
    here.pass_ms(5)
    assert (here.a.error, here.b.error) == (719, 719)
    assert here.sink.xids[0][:2] == (31, B)
    assert "GR0_PBDMA" in here.sink.xids[0][2]
    assert here.sink.events[0][0] == B
    assert here.units[0].stall_until <= here.machine.timers.now


def test_a_device_assert_stays_with_its_client(here: Node) -> None:
    here.launch(here.b, "assert")
    here.pass_ms(300)
    assert (here.b.error, here.a.error) == (710, 0)
    assert here.server.status == "ACTIVE" and here.sink.xids == []


def test_death_in_mid_kernel_kills_the_others(here: Node) -> None:
    here.launch(here.b, "spin", duration_s=5.0)
    here.launch(here.a, "spin", duration_s=5.0)
    here.die(here.b)
    here.pass_ms(200)
    error, at = here.answer(A) or (0, 0.0)
    assert error == 700 and 175 <= at <= 190
    assert here.sink.xids[0][:2] == (31, A)


def test_idle_death_and_clean_exit_harm_nobody_and_give_the_memory_back(here: Node) -> None:
    before = here.machine.memory_used(here.units[0])
    here.machine.allocate(here.b, 1 << 20)
    here.die(here.b)
    here.pass_ms(300)
    assert here.a.error == 0 and here.server.status == "ACTIVE"
    assert here.machine.memory_used(here.units[0]) < before


def test_under_a_lease_the_kernel_of_a_dead_client_runs_to_its_end(here: Node) -> None:
    base = here.machine.allocate(here.b, 4).base
    here.launch(here.b, "fill", address=base, words=4, value=7, duration_s=1.0)
    here.launch(here.b, "increment", address=base, words=4, duration_s=1.0)
    held = here.machine.memory_used(here.units[0])
    here.die(here.b, leased=True)
    assert here.server.spaces == [here.a]
    busy = []
    for ms in (1500, 600):
        here.pass_ms(ms)
        busy.append(here.b.busy)
    assert busy == [True, False]
    mapping = here.b.memory.find(base)
    assert mapping is not None and mapping.contents()[:16] == (8).to_bytes(4, "little") * 4
    assert here.machine.memory_used(here.units[0]) == held, "the lease holds the memory"
    here.b.va = here.b.mm = 0
    here.machine.settle(here.b)
    here.pass_ms(300)
    assert here.a.error == 0 and here.machine.memory_used(here.units[0]) < held


def test_a_tracker_holds_the_memory_too(here: Node) -> None:
    here.b.trackers = 1
    here.die(here.b)
    assert here.b in here.machine.spaces.values()
    here.b.trackers = 0
    here.machine.settle(here.b)
    assert here.b not in here.machine.spaces.values()


@pytest.mark.parametrize("role", ["va", "mm"])
def test_a_lease_that_ends_before_the_kernel_faults_everybody(here: Node, role: str) -> None:
    here.launch(here.b, "forever")
    here.die(here.b, leased=True)
    here.pass_ms(500)
    assert here.a.error == 0
    setattr(here.b, role, 0)
    here.machine.settle(here.b)
    here.pass_ms(200)
    assert here.a.error == 700


def test_the_server_is_in_fault_until_its_last_client_has_gone(here: Node) -> None:
    here.launch(here.b, "trap")
    here.pass_ms(400)
    with pytest.raises(Refused) as refused:
        here.client(C)
    assert refused.value.code == 807
    here.die(here.b)
    states = []
    for patience_ms, leaves in ((200, here.a), (50, None), (30, None)):
        here.pass_ms(patience_ms)
        states.append(here.server.status)
        if leaves is not None:
            here.die(leaves)
    assert states == ["FAULT", "FAULT", "ACTIVE"]
    assert here.client(C).error == 0


def test_terminate_ends_an_endless_kernel_in_milliseconds(here: Node) -> None:
    done: list[int | None] = []
    here.launch(here.b, "forever", fill_gpu=True)
    here.machine.terminator.request(here.server, B, done.append)
    here.launch(here.a, "spin")
    here.pass_ms(10)
    assert done == [0]
    assert here.answer(B) is not None and here.b.error == 810
    assert here.answer(A) == (0, 5.0), "the others wait meanwhile, and go on unharmed"
    here.die(here.b)
    here.pass_ms(300)
    assert here.a.error == 0


def test_terminate_of_a_stopped_client_blocks_everybody_until_it_is_dead(here: Node) -> None:
    done: list[int | None] = []
    here.states[B] = "T"
    here.launch(here.b, "forever")
    here.machine.terminator.request(here.server, B, done.append)
    here.launch(here.a, "spin")
    here.pass_ms(4000)
    assert done == [] and here.answer(A) is None
    here.states[B] = "Z"
    here.die(here.b)
    here.pass_ms(10)
    assert done == [0] and here.a.error == 0
    assert here.answer(A) is not None
    here.pass_ms(300)
    assert here.a.error == 0, "and the death of the one that was being terminated harms nobody"


def test_terminate_of_a_client_that_is_continued_goes_on(here: Node) -> None:
    done: list[int | None] = []
    here.states[B] = "T"
    here.machine.terminator.request(here.server, B, done.append)
    here.pass_ms(100)
    here.states[B] = "S"
    here.pass_ms(20)
    assert done == [0] and here.b.error == 810


def test_terminate_in_fault_blocks_until_the_server_is_back(here: Node) -> None:
    done: list[int | None] = []
    here.launch(here.b, "trap")
    here.pass_ms(1)
    here.machine.terminator.request(here.server, A, done.append)
    here.pass_ms(2000)
    assert done == []
    here.die(here.a)
    here.die(here.b)
    here.pass_ms(100)
    assert done == [None]


def test_terminate_of_somebody_else_is_refused(here: Node) -> None:
    done: list[int | None] = []
    here.machine.terminator.request(here.server, C, done.append)
    assert done == [None]


def test_two_terminations_at_once_both_end(here: Node) -> None:
    done: list[int | None] = []
    here.launch(here.b, "forever")
    here.machine.terminator.request(here.server, B, done.append)
    here.machine.terminator.request(here.server, A, done.append)
    here.pass_ms(20)
    assert done == [0, 0] and here.server.held == 0


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("store", 138, 155), ("misaligned", 13, 46), ("trap", 13, 46), ("pbdma", 0, 2)]
)
def test_another_server_on_the_gpu_stalls_but_lives(here: Node, kind: str, low: int, high: int) -> None:
    second = here.machine.add_server(OTHER, 0, here.units)
    neighbour = here.client(C, server=second)
    here.launch(here.b, kind, address=0x7E00_0000_0000)
    here.launch(here.b, "spin")
    here.sink.answers.clear()
    here.launch(neighbour, "spin")
    here.pass_ms(200)
    error, at = here.answer(C) or (-1, 0.0)
    assert error == 0 and low <= at <= high
    assert second.status == "ACTIVE"


def test_a_context_outside_mps_dies_alone(here: Node) -> None:
    loner = here.client(C, mps=False)
    here.launch(loner, "store", address=0x7E00_0000_0000)
    here.pass_ms(200)
    assert (loner.error, here.a.error, here.b.error) == (700, 0, 0)
    assert here.server.status == "ACTIVE"
    assert here.sink.xids[0][1] == C


def test_on_other_gpus_only_those_linked_by_a_common_process_die() -> None:
    here = Node(gpus=3)
    linked = here.client(B, gpu=1)
    beside = here.client(C, gpu=1)
    apart = here.client(OTHER, gpu=2)
    here.launch(here.a, "store", address=0x7E00_0000_0000)
    here.pass_ms(200)
    assert [s.error for s in (here.a, here.b, linked, beside, apart)] == [700, 700, 700, 700, 0]


def test_the_second_of_two_offenders_is_seen_by_its_own_tracker(here: Node) -> None:
    here.launch(here.a, "store", address=0x7E00_0000_0000)
    here.launch(here.b, "load", address=0x7E00_0010_0000)
    here.pass_ms(200)
    assert {(pid, event.address) for pid, event in here.sink.events} == {
        (A, 0x7E00_0000_0000),
        (B, 0x7E00_0010_0000),
    }
    assert [number for number, _, _ in here.sink.xids] == [31]


@pytest.mark.parametrize("kind", ["store", "atomic", "load", "guard_low"])
def test_a_guarded_address_absorbs_without_a_trace(here: Node, kind: str) -> None:
    assert here.b.memory.guard(0x40000, 1 << 16) == semantics.NV_OK
    here.launch(here.b, kind, address=0x40008)
    here.pass_ms(300)
    assert here.sink.events == [] and here.sink.xids == []
    assert (here.a.error, here.b.error) == (0, 0)


def test_pinning_guarded_host_memory_fails(here: Node) -> None:
    here.machine.host_register(here.b, 0x40000, 4096)
    here.b.memory.guard(0x40000, 1 << 16)
    with pytest.raises(Refused) as refused:
        here.machine.host_register(here.b, 0x40000, 4096)
    assert refused.value.code == 1
    assert here.b.error == 0


def test_memory_is_limited_by_the_gpu_and_by_the_client(here: Node) -> None:
    here.a.limit_bytes = GIB
    for space, words in ((here.a, GIB // 4), (here.b, GIB)):
        with pytest.raises(Refused) as refused:
            here.machine.allocate(space, words)
        assert refused.value.code == 2
    here.machine.allocate(here.a, GIB // 8)


def test_a_server_takes_so_many_clients(here: Node) -> None:
    unit = Unit(node.gpu(1, 64 * GIB))
    server = here.machine.add_server(OTHER, 0, [unit])
    for pid in range(MAX_CLIENTS):
        here.machine.attach(1000 + pid, 0, "", server=server, unit=unit)
    with pytest.raises(Refused) as refused:
        here.machine.attach(999, 0, "", server=server, unit=unit)
    assert refused.value.code == 808


def test_exclusive_process_lets_nobody_beside_the_server(here: Node) -> None:
    here.units[0].compute_mode = "exclusive-process"
    with pytest.raises(Refused) as refused:
        here.client(C, mps=False)
    assert refused.value.code == 46
    with pytest.raises(Refused):
        here.machine.add_server(OTHER, 0, here.units)
    assert here.client(C).error == 0


def test_the_death_of_a_server_is_a_broken_connection_for_its_clients(here: Node) -> None:
    here.launch(here.a, "spin", duration_s=1.0)
    here.machine.remove_server(here.server)
    assert here.a.error == 806 and here.answer(A) == (806, 0.0)


@pytest.mark.parametrize(("number", "error"), [(48, 214), (79, 999), (63, 0), (119, 999), (140, 214)])
def test_faults_of_the_device(here: Node, number: int, error: int) -> None:
    here.machine.device_xid(here.units[0], number, None, None)
    assert here.sink.xids[0][:2] == (number, None) and here.sink.nvml == [number]
    assert (here.a.error, here.b.error) == (error, error)
    assert here.server.status == ("FAULT" if error else "ACTIVE")


def test_kernels_run_in_order_and_really_compute(here: Node) -> None:
    base = here.machine.allocate(here.a, 8).base
    here.launch(here.a, "fill", address=base, words=8, value=0xFFFF_FFFF, duration_s=0.01)
    here.launch(here.a, "increment", address=base + 16, words=4)
    mapping = here.a.memory.find(base)
    assert mapping is not None and mapping.contents()[:32] == bytes(32)
    here.pass_ms(15)
    assert mapping.contents()[:32] == b"\xff" * 16 + bytes(16)
    assert [answer[1] for answer in here.sink.answers] == [0, 0]


def test_work_in_flight_at_a_fault_is_lost(here: Node) -> None:
    base = here.machine.allocate(here.a, 4).base
    here.launch(here.a, "fill", address=base, words=4, value=1, duration_s=0.05)
    here.launch(here.b, "store", address=0x7E00_0000_0000)
    here.pass_ms(300)
    mapping = here.a.memory.find(base)
    assert mapping is not None and mapping.contents()[:16] == bytes(16)


def test_a_good_kernel_past_its_buffer_is_a_stray_store(here: Node) -> None:
    base = here.machine.allocate(here.b, 4).base
    here.launch(here.b, "increment", address=base, words=1 << 20)
    here.pass_ms(200)
    assert here.b.error == 700 and here.sink.events[0][1].address == base + (1 << 16)


@pytest.mark.parametrize("kind", ["store", "load", "atomic", "prefetch"])
def test_a_stray_access_to_a_managed_range_harms_nobody_and_is_told_of_once(here: Node, kind: str) -> None:
    here.machine.lay(here.b, "managed", 0x7E00_0000_0000, 1 << 20)
    for _ in range(2):
        here.launch(here.b, kind, address=0x7E00_0000_1010)
    here.pass_ms(2)
    ((pid, event),) = here.sink.events
    assert (pid, event.fatal, event.address) == (B, False, 0x7E00_0000_1000)
    assert event.access is Access({"store": "write", "load": "read"}.get(kind, kind))
    assert [error for _, error, _ in here.sink.answers] == [0, 0]
    here.machine.lay(here.b, "unmanaged", 0x7E00_0000_0000, 1 << 20)
    if kind != "prefetch":
        here.launch(here.b, kind, address=0x7E00_0000_1010)
        here.pass_ms(2)
        assert here.sink.events[-1][1].fatal


def test_a_prefetch_of_nothing_does_nothing(here: Node) -> None:
    here.launch(here.b, "prefetch", address=0x7E00_0000_0000)
    here.pass_ms(200)
    assert here.sink.events == []
    assert here.answer(B) is not None
    assert here.server.status == "ACTIVE"


def test_a_sparse_range_of_the_program_itself_absorbs_silently(here: Node) -> None:
    here.machine.lay(here.b, "sparse", 0x7E00_0000_0000, 1 << 20)
    here.launch(here.b, "store", address=0x7E00_0000_1010)
    here.pass_ms(200)
    assert here.sink.events == []
    with pytest.raises(Refused):
        here.machine.lay(here.b, "managed", 0x7E00_0000_0000, 1 << 20)
    here.machine.lay(here.b, "unsparse", 0x7E00_0000_0000, 1 << 20)
    here.machine.lay(here.b, "managed", 0x7E00_0000_0000, 1 << 20)


def test_the_reset_is_said_once_nothing_of_the_domain_writes_any_more(here: Node) -> None:
    here.a.halt = words = Halt()
    shared = mmap.mmap(words.fd, mmap.PAGESIZE)
    running = memoryview(shared).cast("I")
    running[1] = 1
    here.launch(here.b, "misaligned")
    assert running[0] == 0, "until it is reset it goes on"
    here.pass_ms(400)
    assert running[0] == 1
    assert [number for number, _, _ in here.sink.xids] == [13, 13] and here.sink.nvml == []
    running[1] = 0
    here.pass_ms(1)
    assert [number for number, _, _ in here.sink.xids] == [13, 13, 43] and here.sink.nvml == [43]
    running.release()
    words.close()


def test_a_process_that_has_gone_is_not_waited_for(here: Node) -> None:
    here.a.halt = words = Halt()
    with mmap.mmap(words.fd, mmap.PAGESIZE) as shared:
        shared[4] = 1
    here.launch(here.b, "trap")
    here.die(here.a)
    here.pass_ms(20)
    assert [number for number, _, _ in here.sink.xids] == [43]
    words.close()
